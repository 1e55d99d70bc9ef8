//! Hands out demanded experts in the order in which they arrive, and reads the next ones meanwhile.

use std::time::Instant;

use colibri_ring::record::Record;
use colibri_ring::sim::{Clock, SimDrive};
use colibri_ring::{Engine, Event, Priority, SlabId};

use super::cache::Cache;
use super::catalog::Projection;
use super::demand_trace::DemandTrace;
use super::error::StreamError;
use super::files::ExpertFiles;
use super::key::ExpertKey;
use super::pins::PinBudget;
use super::prefetch_policy::PrefetchPolicy;
use super::request::{Ready, Urgency};
use super::routing::{RoutingEvent, RoutingRecorder};
use super::slots::Slots;
use super::usage::Usage;
use crate::quant::Activations;
use crate::quant::encode::NotFinite;
use crate::weight::Damage;

mod demands;
mod options;
mod prefetches;
mod preloads;
mod slabs;
mod stats;
mod time;

use demands::{DemandQueue, DemandedExpert, Progress};
pub use options::StoreOptions;
use prefetches::PrefetchQueue;
use preloads::PreloadQueue;
use slabs::ExpertSlabs;
pub use stats::StoreStats;
use time::Time;

/// A prefetch that is demanded has been read to about this part.
const HALF_READ: f64 = 0.5;

/// Experts in slabs under a byte budget, read when they are demanded or prefetched.
///
/// A pass may have tokens of any number of sequences: the store sees rows of choices, and each expert once however many rows chose it.
#[derive(Debug)]
pub struct ExpertStore {
    slabs: ExpertSlabs,
    policy: PrefetchPolicy,
    time: Time,
    top_k: usize,
    demands: DemandQueue,
    prefetches: PrefetchQueue,
    preloads: PreloadQueue,
    pin_budget: PinBudget,
    per_layer_quota: usize,
    /// What routers chose in this run.
    usage: Usage,
    /// Scratch: experts to prefetch.
    predicted: Vec<u32>,
    recorder: Option<RoutingRecorder>,
    /// How the experts' products take activations.
    activations: Activations,
    stats: StoreStats,
}

// A run may move to another thread between two passes.
const _: () = {
    const fn assert_send<T: Send>() {}
    assert_send::<ExpertStore>();
};

impl ExpertStore {
    /// Allocates the slabs and starts the engine. A token uses `top_k` experts of a layer.
    ///
    /// # Errors
    /// When there is no memory for the slabs or the device is not available.
    pub fn new(
        files: ExpertFiles,
        top_k: usize,
        mut options: StoreOptions,
    ) -> Result<ExpertStore, StreamError> {
        options.engine = options.engine.for_reads_of(files.mean_bytes() as u64);
        let engine = Engine::new(&files.files, &options.slots.classes, options.engine)?;
        let time = Time::Real(Instant::now());
        Ok(ExpertStore::with_engine(
            engine, files, top_k, options, time,
        ))
    }

    /// A store whose drives are simulated on `clock`. `files` must be [`ExpertFiles::on_drives`] of as many as there are
    /// `drives`. Its experts are zeros.
    ///
    /// # Errors
    /// When there is no memory for the slabs.
    pub fn simulated(
        files: ExpertFiles,
        top_k: usize,
        mut options: StoreOptions,
        drives: Vec<SimDrive>,
        clock: Clock,
    ) -> Result<ExpertStore, StreamError> {
        options.engine = options.engine.for_reads_of(files.mean_bytes() as u64);
        let classes = &options.slots.classes;
        let time = Time::Simulated(clock.clone());
        let engine = Engine::simulated(&files.files, classes, options.engine, drives, clock)?;
        Ok(ExpertStore::with_engine(
            engine, files, top_k, options, time,
        ))
    }

    fn with_engine(
        engine: Engine,
        files: ExpertFiles,
        top_k: usize,
        options: StoreOptions,
        time: Time,
    ) -> ExpertStore {
        let Slots {
            classes,
            per_layer_quota,
        } = options.slots;
        let counts: Vec<usize> = classes.iter().map(|class| class.count).collect();
        tracing::debug!(
            ?classes,
            per_layer_quota,
            align = files.align(),
            "expert cache"
        );
        let footprints = files.footprints();
        let pin_budget = PinBudget {
            by_class: (counts.iter().zip(&footprints))
                .map(|(count, f)| count.saturating_sub((top_k + 1).min(f.experts)))
                .collect(),
            layers: files.moe_layers(),
            top_k,
        };
        let layers: Vec<usize> = files.catalog.layers().collect();
        let model_layers = layers.last().map_or(0, |last| last + 1);
        let experts = files.catalog.experts();
        let at_drive = options.engine.prefetch_bytes() as f64 / files.mean_bytes().max(1.0);
        let record = options.engine.record;
        ExpertStore {
            slabs: ExpertSlabs::new(
                engine,
                files,
                Cache::new(&counts, model_layers, experts, per_layer_quota),
                (record > 0).then(|| DemandTrace::new(record)),
            ),
            policy: PrefetchPolicy::new(options.lookahead, top_k, model_layers, at_drive),
            time,
            top_k,
            demands: DemandQueue::default(),
            prefetches: PrefetchQueue::default(),
            preloads: PreloadQueue::default(),
            pin_budget,
            per_layer_quota,
            usage: Usage::new(layers, experts, top_k),
            predicted: Vec::new(),
            recorder: None,
            activations: Activations::Exact,
            stats: StoreStats::default(),
        }
    }

    /// Pins the experts that `history` found to be the hottest, in a `share` (0 to 1) of the slabs that no single token needs. They are
    /// read while the drives are otherwise idle, and stay. Comes before the first demand.
    ///
    /// # Errors
    /// When a tensor's place in its file is impossible.
    pub fn pin(&mut self, history: &Usage, share: f64) -> Result<(), StreamError> {
        let files = &self.slabs.files;
        let class = |key: ExpertKey| {
            let known = files.catalog.expert(key.layer, key.expert);
            known.map(|_| files.class(key))
        };
        let pins = self.pin_budget.select(history, share, class);
        let quota = self.per_layer_quota.min(pins.per_layer_quota);
        self.slabs.cache.pin(&pins.keys, quota);
        self.stats.pinned = pins.keys.len() as u64;
        self.preloads = PreloadQueue::new(pins.keys);
        self.start_preloads()?;
        self.slabs.engine.flush();
        Ok(())
    }

    /// Sets how the products of the experts handed out from now on take activations.
    pub fn set_activations(&mut self, activations: Activations) {
        self.activations = activations;
    }

    /// How the experts' products take activations.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// How often routers chose each expert so far.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// How many candidates of a layer the model should predict for each token; 0 when no prediction pays.
    pub fn candidates(&mut self, layer: usize) -> usize {
        let candidates = self.policy.candidates(layer, self.time.now());
        if self.recorder.is_some() {
            return 2 * self.top_k;
        }
        match self.slabs.cache.holds(layer) == self.slabs.files.catalog.experts() {
            true => 0,
            false => candidates,
        }
    }

    /// Predicts the router of `layer`: `candidates` [tokens, ranks], the most likely first. Those that pay are prefetched when the drives
    /// have no demands to read. Replaces an earlier prediction.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub fn predict(
        &mut self,
        layer: usize,
        candidates: &[u32],
        ranks: usize,
    ) -> Result<(), StreamError> {
        if let Some(recorder) = &mut self.recorder {
            recorder.event(&RoutingEvent::Predicted {
                layer,
                ranks,
                experts: candidates.to_vec(),
            });
        }
        let mut predicted = std::mem::take(&mut self.predicted);
        let (now, slabs, prefetches) = (self.time.now(), &self.slabs, &self.prefetches);
        let missing = |expert| {
            let slab = slabs.cache.slab(ExpertKey { layer, expert });
            slab.is_none_or(|slab| prefetches.is_unconfirmed(slab) && !slabs.is_full(slab))
        };
        (self.policy).predict(layer, candidates, ranks, now, missing, &mut predicted);
        self.prefetches
            .drop_outdated(layer, &predicted, &mut self.slabs);
        let result = self.request(layer, &predicted, Urgency::Prefetch);
        self.predicted = predicted;
        result
    }

    /// The router of `layer` has decided for all tokens of the pass: `chosen` [tokens, top_k]. Counts predictions that came true and drops
    /// the others. Comes before the first demand for the layer.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub fn routed(&mut self, layer: usize, chosen: &[u32]) -> Result<(), StreamError> {
        if let Some(recorder) = &mut self.recorder {
            recorder.event(&RoutingEvent::Routed {
                layer,
                experts: chosen.to_vec(),
            });
        }
        self.take_events()?;
        let tokens = chosen.len() / self.top_k;
        self.policy.set_drives(self.slabs.engine.serving_drives());
        self.usage.record(layer, chosen);
        self.slabs.cache.begin_pass(layer, chosen, tokens);
        self.policy.routed(layer, chosen, tokens, self.time.now());
        self.stats.speculative_used +=
            (self.prefetches).drop_mispredicted(layer, chosen, &mut self.slabs);
        Ok(())
    }

    /// Requests experts of `layer`, all different. After `Demand`, [`ExpertStore::next`] hands them out; call it until it returns `None`
    /// before the next demand, unless the rest is not needed. They may be more than there are slabs.
    /// `Prefetch` is for experts that will probably be demanded next, the most likely first.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub fn request(
        &mut self,
        layer: usize,
        ids: &[u32],
        urgency: Urgency,
    ) -> Result<(), StreamError> {
        self.slabs.engine.begin_batch();
        match urgency {
            Urgency::Demand => self.demand(layer, ids)?,
            Urgency::Prefetch => {
                self.prefetches.replace(layer, ids, &mut self.slabs.cache);
                self.start_prefetches()?;
            }
        }
        self.slabs.engine.flush();
        Ok(())
    }

    fn demand(&mut self, layer: usize, ids: &[u32]) -> Result<(), StreamError> {
        self.abandon_demands();
        self.take_events()?;
        self.demands.layer = layer;
        self.prefetches.drop_waiting();
        let next_group = self.prefetches.take_next_group();
        let before = self.stats.hits;
        let mut missing = 0.0;
        for &expert in ids {
            let slab = self.slabs.cache.slab(ExpertKey { layer, expert });
            let full = slab.is_some_and(|slab| self.slabs.is_full(slab));
            self.count(full && slab.is_some_and(|slab| !next_group.contains(&slab)));
            if let Some(slab) = slab {
                if !full {
                    missing += HALF_READ;
                    self.slabs.engine.promote(slab);
                }
                self.slabs.cache.touch(slab);
                self.slabs.cache.set_busy(slab, true);
            }
            missing += f64::from(u8::from(slab.is_none()));
            self.demands.push(expert, slab);
        }
        self.policy.demanded(missing, self.time.now());
        if let Some(trace) = &mut self.slabs.trace {
            trace.demanded(layer, ids, self.stats.hits - before);
        }
        self.start_demands()
    }

    fn count(&mut self, hit: bool) {
        if hit {
            self.stats.hits += 1;
        } else {
            self.stats.misses += 1;
        }
    }

    /// After an error or a stop, demands remain that will not be computed: their slabs may be reused when they are full. A read of
    /// theirs that fails from now on is a failed prefetch.
    fn abandon_demands(&mut self) {
        for slab in self.demands.abandon() {
            if self.slabs.is_full(slab) {
                self.slabs.cache.set_busy(slab, false);
            }
        }
    }

    /// Starts the read of an expert if there is a slab for it.
    fn start(&mut self, key: ExpertKey, priority: Priority) -> Result<Option<SlabId>, StreamError> {
        let predicted = priority == Priority::Prefetch && key.layer != self.demands.layer;
        let Some(read) = self.slabs.start(key, priority, predicted)? else {
            return Ok(None);
        };
        if read.evicted {
            self.prefetches.forget(read.slab);
        }
        Ok(Some(read.slab))
    }

    /// Starts the reads of demanded experts for which there are slabs.
    fn start_demands(&mut self) -> Result<(), StreamError> {
        for i in 0..self.demands.experts.len() {
            if self.demands.experts[i].progress == Progress::NoSlab {
                // Not the first that finds no slab ends this: another class of slabs may have one.
                if let Some(slab) = self.start(self.demands.key(i), Priority::Demand)? {
                    self.demands.experts[i].progress = Progress::GateUp(slab);
                }
            }
        }
        Ok(())
    }

    /// Starts prefetches in slabs for which no demand waits.
    fn start_prefetches(&mut self) -> Result<(), StreamError> {
        if self.demands.is_waiting() {
            return Ok(());
        }
        while let Some(key) = self.prefetches.next() {
            let Some(slab) = self.start(key, Priority::Prefetch)? else {
                break;
            };
            let predicted = self.prefetches.started(slab, self.demands.layer);
            self.stats.speculative_reads += u64::from(predicted);
        }
        self.start_preloads()
    }

    /// Starts the reads of pinned experts, a few at a time, in slabs for which neither demands nor prefetches wait.
    fn start_preloads(&mut self) -> Result<(), StreamError> {
        if self.demands.is_waiting() || !self.prefetches.is_empty() {
            return Ok(());
        }
        while let Some(key) = self.preloads.next() {
            let mut started = None;
            if self.slabs.cache.slab(key).is_none() {
                started = self.start(key, Priority::Preload)?;
                if started.is_none() {
                    break;
                }
            }
            self.preloads.pop(started);
        }
        Ok(())
    }

    /// The next piece of the demanded experts that can be computed: begun experts first, then those that are in
    /// memory whole. Sleeps until there is one; `None` when all have been handed out. The borrow ends before the next call, which also
    /// releases the slab of a finished expert.
    ///
    /// # Errors
    /// When a read failed on every copy: names tensor, file and offset.
    #[allow(
        clippy::should_implement_trait,
        reason = "what it returns borrows the store, which an iterator cannot do"
    )]
    pub fn next(&mut self) -> Result<Option<Ready<'_>>, StreamError> {
        // Events first: the slab that is released must be known to be full.
        self.take_events()?;
        self.release_borrowed()?;
        let at = loop {
            if let Some(at) = self.demands.computable(&self.slabs.engine) {
                break at;
            }
            if self.demands.is_done() {
                if let Some(recorder) = &mut self.recorder {
                    recorder.event(&RoutingEvent::Computed {
                        layer: self.demands.layer,
                    });
                }
                return Ok(None);
            }
            self.slabs.engine.flush();
            let event = self.slabs.engine.wait()?;
            self.handle(event, true)?;
            while let Some(event) = self.slabs.engine.poll()? {
                self.handle(event, true)?;
            }
        };
        // The drives work while the caller computes.
        self.slabs.engine.flush();
        let DemandedExpert { expert, progress } = self.demands.experts[at];
        let locations = self.slabs.files.matrices(self.demands.key(at));
        match progress {
            Progress::GateUp(slab) => {
                let projections = [Projection::Gate, Projection::Up];
                self.slabs.check(slab, &projections, &locations)?;
            }
            Progress::Down(slab) => self.slabs.check(slab, &[Projection::Down], &locations)?,
            Progress::NoSlab | Progress::Done => {}
        }
        let (slabs, activations) = (&self.slabs, self.activations);
        let matrix = |slab, projection| slabs.matrix(slab, projection, &locations, activations);
        Ok(Some(match progress {
            Progress::GateUp(slab) => {
                self.demands.experts[at].progress = Progress::Down(slab);
                let (gate, up) = (matrix(slab, Projection::Gate), matrix(slab, Projection::Up));
                Ready::GateUp { expert, gate, up }
            }
            Progress::Down(slab) => {
                self.demands.experts[at].progress = Progress::Done;
                self.demands.borrowed = Some(slab);
                let down = matrix(slab, Projection::Down);
                Ready::Down { expert, down }
            }
            Progress::NoSlab | Progress::Done => unreachable!("not computable"),
        }))
    }

    /// The expert whose last piece was handed out has been computed: its slab may be reused, first for demands that had none.
    fn release_borrowed(&mut self) -> Result<(), StreamError> {
        let Some(slab) = self.demands.borrowed.take() else {
            return Ok(());
        };
        self.slabs.cache.set_busy(slab, false);
        self.start_demands()?;
        self.start_prefetches()?;
        self.slabs.engine.flush();
        Ok(())
    }

    fn take_events(&mut self) -> Result<(), StreamError> {
        while let Some(event) = self.slabs.engine.poll()? {
            self.handle(event, false)?;
        }
        Ok(())
    }

    fn handle(&mut self, event: Event, waited: bool) -> Result<(), StreamError> {
        match event {
            Event::Part(..) => return Ok(()),
            Event::Full(slab) => {
                self.preloads.ended(slab);
                if !self.demands.uses(slab) {
                    self.slabs.cache.set_busy(slab, false);
                } else if self.demands.are_read(&self.slabs.engine) {
                    self.policy.drained(waited, self.time.now());
                }
            }
            Event::Dropped(slab) => {
                // It may have been demanded after all, too late for the ring thread to go on with it.
                if let Some(at) = self.demands.on(slab) {
                    self.demands.experts[at].progress = Progress::NoSlab;
                }
                self.forget(slab);
            }
            Event::Failed(slab, source) => {
                let key = self.slabs.key(slab);
                let demand = self.demands.on(slab);
                self.forget(slab);
                if let Some(at) = demand {
                    self.demands.experts[at].progress = Progress::Done;
                    let (file, offset) = (Some(source.file), source.offset);
                    let tensor = (self.slabs.files).tensor_at(key, file, offset, source.len);
                    return Err(StreamError::Read { tensor, source });
                }
                // If it is demanded later, it is read again, and that failure counts.
                tracing::warn!("{source}");
            }
        }
        // The slab may be what a demand waits for.
        self.start_demands()
    }

    /// The read into a slab has ended without an expert.
    fn forget(&mut self, slab: SlabId) {
        self.slabs.cache.remove(slab);
        self.prefetches.forget(slab);
        self.preloads.ended(slab);
    }

    /// The error for an expert's matrix with this damage.
    pub fn damaged(
        &self,
        layer: usize,
        expert: u32,
        projection: Projection,
        source: Damage,
    ) -> StreamError {
        let key = ExpertKey { layer, expert };
        self.slabs.files.damaged(key, projection, source)
    }

    /// The error for a matrix with a weight that cannot be rounded.
    pub fn not_finite(
        &self,
        layer: usize,
        expert: u32,
        projection: Projection,
        found: NotFinite,
    ) -> StreamError {
        StreamError::NotFinite {
            tensor: self
                .slabs
                .files
                .catalog
                .tensor_name(layer, expert, projection),
            expert,
            found,
        }
    }

    /// The counts so far.
    pub fn stats(&self) -> StoreStats {
        StoreStats {
            lookahead: self.policy.accuracy(),
            ..self.stats.clone()
        }
    }

    /// Statistics of the reads so far; `None` when the engine has stopped.
    pub fn read_stats(&mut self) -> Option<colibri_ring::Stats> {
        self.slabs.engine.stats()
    }

    /// "uring", "pread" or "simulated".
    pub fn device(&self) -> &'static str {
        self.slabs.engine.device()
    }

    /// From now on, records predictions and decisions of routers.
    pub fn record_routing(&mut self, recorder: RoutingRecorder) {
        self.recorder = Some(recorder);
    }

    /// Ends [`ExpertStore::record_routing`].
    pub fn take_recorder(&mut self) -> Option<RoutingRecorder> {
        self.recorder.take()
    }

    /// Takes the trace that [`colibri_ring::Options::record`] turned on: when chunks were read, and which experts they and the demands are of.
    pub fn take_record(&mut self) -> Option<(Record, DemandTrace)> {
        let trace = self.slabs.trace.take()?;
        // Prefetches may be under way.
        self.abandon_demands();
        self.prefetches.drop_waiting();
        while self.slabs.is_reading() {
            let event = self.slabs.engine.wait().ok()?;
            if let Err(error) = self.handle(event, false) {
                tracing::debug!("{error}");
            }
        }
        Some((self.slabs.engine.take_record()?, trace))
    }
}
