//! The store: demands, prefetches, and the order in which experts are handed out.

use std::collections::VecDeque;

use colibri_ring::sim::{Clock, SimDrive};
use colibri_ring::{Engine, Event, Options, Priority, SlabId, SlabState};

use super::cache::{Cache, Key};
use super::catalog::{Location, Projection};
use super::demand_trace::DemandTrace;
use super::files::{DOWN, ExpertFiles, GATE_UP, scales_range, weights_range};
use super::prefetch_policy::{Costs, LayerStats, PrefetchPolicy};
use super::routing::{self, Recorder};
use super::slots::Slots;
use super::usage::Usage;
use super::{Lookahead, Ready, StreamError, Urgency};
use crate::quant::encode::NotFinite;
use crate::quant::{Activations, Matrix};

mod pins;
mod record;

/// How experts are kept and read.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Memory for experts.
    pub slots: Slots,
    /// Reads ahead of the router.
    pub lookahead: Lookahead,
    /// Device, windows, chunk size.
    pub engine: Options,
}

/// What the store did so far.
#[derive(Clone, Debug, Default)]
pub struct StreamStats {
    /// Demanded experts that were in memory.
    pub hits: u64,
    /// Demanded experts that had to be read, or were being read.
    pub misses: u64,
    /// Guessed experts that were read, or begun to be.
    pub speculative_reads: u64,
    /// Of these, how many were then demanded.
    pub speculative_used: u64,
    /// Experts that are kept, by what the runs before have used.
    pub pinned: u64,
    /// The early looks at routers, by layer.
    pub lookahead: Vec<LayerStats>,
}

/// How far the computation of a demanded expert is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Not in a slab yet, because none was free.
    NoSlab,
    /// Its gate and up have not been handed out.
    GateUp(SlabId),
    /// Gate and up have been handed out, down has not.
    Down(SlabId),
    /// Handed out whole.
    Done,
}

#[derive(Clone, Copy, Debug)]
struct Demand {
    expert: u32,
    stage: Stage,
}

/// Experts in slabs under a byte budget, read when they are demanded or prefetched.
#[derive(Debug)]
pub struct ExpertStore {
    engine: Engine,
    files: ExpertFiles,
    cache: Cache,
    policy: PrefetchPolicy,
    top_k: usize,
    layer: usize,
    demands: Vec<Demand>,
    /// The slab whose last piece was handed out: it is in use until the next call.
    borrowed: Option<SlabId>,
    /// Guesses that have no slab yet, most likely first.
    prefetches: VecDeque<Key>,
    /// Slabs that were read on a prediction and have not been demanded.
    prefetched: Vec<SlabId>,
    /// Slabs that are read for the next demand of the same layer.
    next_group: Vec<SlabId>,
    /// Pinned experts to read when the drives have nothing else to do, the hottest first.
    preloads: VecDeque<Key>,
    /// Slabs that are read for that.
    preloading: Vec<SlabId>,
    /// Of each class, how many slabs may be pinned, and how many experts a layer may keep.
    kept: Vec<usize>,
    share: usize,
    /// What routers chose in this run.
    usage: Usage,
    /// Scratch: experts to prediction.
    likely: Vec<u32>,
    /// What routers said, if somebody wants to keep it.
    recorder: Option<Recorder>,
    /// How the experts' products take activations.
    activations: Activations,
    /// What is read and demanded when, if somebody wants to see it.
    log: Option<DemandTrace>,
    stats: StreamStats,
}

impl ExpertStore {
    /// Makes the slabs and starts the engine. A token uses `top_k` experts of a layer.
    ///
    /// # Errors
    /// When the engine cannot run as asked.
    pub fn new(
        files: ExpertFiles,
        top_k: usize,
        mut options: StoreOptions,
    ) -> Result<ExpertStore, StreamError> {
        options.engine = options.engine.for_reads_of(files.mean_bytes() as u64);
        let engine = Engine::new(&files.files, &options.slots.classes, options.engine)?;
        Ok(ExpertStore::with_engine(engine, files, top_k, options))
    }

    /// A store whose drives are simulated on `clock`: `files` must be [`ExpertFiles::on_drives`] of as many as there are
    /// `drives`. What it hands out is zeros.
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
        let engine = Engine::simulated(&files.files, classes, options.engine, drives, clock)?;
        Ok(ExpertStore::with_engine(engine, files, top_k, options))
    }

    fn with_engine(
        engine: Engine,
        files: ExpertFiles,
        top_k: usize,
        options: StoreOptions,
    ) -> ExpertStore {
        let Slots { classes, share } = options.slots;
        let counts: Vec<usize> = classes.iter().map(|class| class.count).collect();
        tracing::debug!(?classes, share, align = files.align(), "expert cache");
        let footprints = files.footprints();
        let kept = (counts.iter().zip(&footprints))
            .map(|(count, f)| count.saturating_sub((top_k + 1).min(f.experts)))
            .collect();
        let layers: Vec<usize> = files.catalog.layers().collect();
        let usage = Usage::new(layers, files.catalog.experts(), top_k);
        let model_layers = files.catalog.layers().last().map_or(0, |last| last + 1);
        let costs = Costs {
            expert_bytes: files.mean_bytes(),
            at_drives_bytes: options.engine.prefetch_bytes() as f64 * files.files.drives() as f64,
            kept: share,
        };
        ExpertStore {
            engine,
            cache: Cache::new(&counts, model_layers, files.catalog.experts(), share),
            files,
            policy: PrefetchPolicy::new(options.lookahead, top_k, model_layers, costs),
            top_k,
            layer: 0,
            demands: Vec::new(),
            borrowed: None,
            prefetches: VecDeque::new(),
            prefetched: Vec::new(),
            next_group: Vec::new(),
            preloads: VecDeque::new(),
            preloading: Vec::new(),
            kept,
            share,
            usage,
            likely: Vec::new(),
            recorder: None,
            activations: Activations::Exact,
            log: (options.engine.record > 0).then(|| DemandTrace::new(options.engine.record)),
            stats: StreamStats::default(),
        }
    }

    /// From now on, hands out experts whose products take activations this way.
    pub fn set_activations(&mut self, activations: Activations) {
        self.activations = activations;
    }

    /// How the experts' products take activations.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// What routers chose so far.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// How many of the likeliest experts of a layer should be found out for each token, before its router decides; 0 when
    /// that is of no use.
    pub fn candidates(&mut self, layer: usize) -> usize {
        if self.recorder.is_some() {
            return 2 * self.top_k;
        }
        if self.cache.holds(layer) == self.files.catalog.experts() {
            return 0;
        }
        self.policy.candidates(layer)
    }

    /// An early look at the router of `layer`: `ranked` [tokens, ranks], the likeliest first. Those that pay are prefetched: read as far as
    /// the drives have nothing else to do. Replaces what an earlier look said.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub fn predict(
        &mut self,
        layer: usize,
        ranked: &[u32],
        ranks: usize,
    ) -> Result<(), StreamError> {
        if let Some(recorder) = &mut self.recorder {
            recorder.event(&routing::Event::Look {
                layer,
                ranks,
                experts: ranked.to_vec(),
            });
        }
        let mut likely = std::mem::take(&mut self.likely);
        self.policy.predict(layer, ranked, ranks, &mut likely);
        for slab in &self.prefetched {
            let key = self
                .cache
                .key(*slab)
                .expect("a prediction is forgotten when its slab is");
            let unlikely = key.layer == layer && !likely.contains(&key.expert);
            if unlikely && self.engine.state(*slab) != SlabState::Full {
                self.engine.abandon(*slab);
            }
        }
        let result = self.request(layer, &likely, Urgency::Prefetch);
        self.likely = likely;
        result
    }

    /// The router of `layer` has decided, for all tokens: `chosen` [tokens, top_k]. Guesses that came true are counted, the others
    /// make room. Comes before the first demand for the layer.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub fn routed(&mut self, layer: usize, chosen: &[u32]) -> Result<(), StreamError> {
        if let Some(recorder) = &mut self.recorder {
            recorder.event(&routing::Event::Routed {
                layer,
                experts: chosen.to_vec(),
            });
        }
        self.take_events()?;
        self.prefetches.clear();
        let tokens = chosen.len() / self.top_k;
        self.usage.record(layer, chosen);
        self.cache.begin_pass(layer, chosen, tokens);
        self.policy.routed(layer, chosen, tokens);
        self.settle_prefetches(layer, chosen);
        Ok(())
    }

    fn take_events(&mut self) -> Result<(), StreamError> {
        while let Some(event) = self.engine.poll()? {
            self.handle(event)?;
        }
        Ok(())
    }

    /// Asks for experts of `layer`, all different. `Demand`: they will be handed out by [`ExpertStore::next`], which must
    /// be called until it returns `None` before the next demand, unless the rest is given up; they may be more than there are slabs.
    /// `Prefetch`: they will probably be demanded next, the most likely first.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub fn request(
        &mut self,
        layer: usize,
        ids: &[u32],
        urgency: Urgency,
    ) -> Result<(), StreamError> {
        self.engine.begin_batch();
        match urgency {
            Urgency::Demand => self.demand(layer, ids)?,
            Urgency::Prefetch => {
                self.prefetches.clear();
                for key in ids.iter().map(|&expert| Key { layer, expert }) {
                    match self.cache.slab(key) {
                        // It should not make room for another prediction.
                        Some(slab) => self.cache.touch(slab),
                        None => self.prefetches.push_back(key),
                    }
                }
                self.start_prefetches()?;
            }
        }
        self.engine.flush();
        Ok(())
    }

    fn demand(&mut self, layer: usize, ids: &[u32]) -> Result<(), StreamError> {
        self.give_up_demands();
        self.take_events()?;
        self.layer = layer;
        self.prefetches.clear();
        let next_group = std::mem::take(&mut self.next_group);
        let before = self.stats.hits;
        for &expert in ids {
            let stage = match self.cache.slab(Key { layer, expert }) {
                Some(slab) => {
                    let full = self.engine.state(slab) == SlabState::Full;
                    self.count(full && !next_group.contains(&slab));
                    if !full {
                        self.engine.promote(slab);
                    }
                    self.cache.touch(slab);
                    self.cache.set_busy(slab, true);
                    Stage::GateUp(slab)
                }
                None => {
                    self.count(false);
                    Stage::NoSlab
                }
            };
            self.demands.push(Demand { expert, stage });
        }
        if let Some(log) = &mut self.log {
            log.demanded(layer, ids, self.stats.hits - before);
        }
        self.start_demands()
    }

    /// A demanded expert was in memory, or was not.
    fn count(&mut self, hit: bool) {
        self.policy.demanded(hit);
        if hit {
            self.stats.hits += 1;
        } else {
            self.stats.misses += 1;
        }
    }

    /// After an error or a stop, demands are left that nobody will compute: their slabs may be reused when they are full. A read of
    /// theirs that fails from now on is a failed prediction.
    fn give_up_demands(&mut self) {
        let unfinished = self.demands.drain(..).filter_map(|d| match d.stage {
            Stage::GateUp(slab) | Stage::Down(slab) => Some(slab),
            Stage::NoSlab | Stage::Done => None,
        });
        for slab in unfinished.chain(self.borrowed.take()) {
            if self.engine.state(slab) == SlabState::Full {
                self.cache.set_busy(slab, false);
            }
        }
    }

    /// The router of `layer` has decided: prefetches that came true are counted, the others make room.
    fn settle_prefetches(&mut self, layer: usize, ids: &[u32]) {
        let mut prefetched = std::mem::take(&mut self.prefetched);
        prefetched.retain(|&slab| {
            let key = self
                .cache
                .key(slab)
                .expect("a prediction is forgotten when its slab is");
            if key.layer == layer && ids.contains(&key.expert) {
                self.stats.speculative_used += 1;
                return false;
            }
            if key.layer > layer {
                return true;
            }
            self.cache.forget_use(slab);
            let late = self.engine.state(slab) != SlabState::Full;
            self.policy.wrong(late);
            if late {
                self.engine.abandon(slab);
            }
            false
        });
        self.prefetched = prefetched;
    }

    /// Starts the read of an expert if there is a slab for it.
    fn start(&mut self, key: Key, priority: Priority) -> Result<Option<SlabId>, StreamError> {
        let layout = self.files.layout(key)?;
        let class = self.files.class(key);
        let Some((slab, evicted)) = self.cache.make_room(class, key.layer) else {
            return Ok(None);
        };
        if evicted {
            self.engine.release(slab);
            self.prefetched.retain(|s| *s != slab);
            self.next_group.retain(|s| *s != slab);
        }
        self.cache.insert(key, slab);
        let number = self.engine.read(slab, priority, layout);
        if let Some(log) = &mut self.log {
            log.started(number, key);
        }
        Ok(Some(slab))
    }

    /// Starts the reads of demanded experts, as far as there are slabs.
    fn start_demands(&mut self) -> Result<(), StreamError> {
        for i in 0..self.demands.len() {
            if self.demands[i].stage == Stage::NoSlab {
                let key = Key {
                    layer: self.layer,
                    expert: self.demands[i].expert,
                };
                // Another class of slabs may have one.
                let Some(slab) = self.start(key, Priority::Demand)? else {
                    continue;
                };
                self.demands[i].stage = Stage::GateUp(slab);
            }
        }
        Ok(())
    }

    /// Starts the reads of prefetches in slabs that no demand waits for.
    fn start_prefetches(&mut self) -> Result<(), StreamError> {
        if self.demands.iter().any(|d| d.stage == Stage::NoSlab) {
            return Ok(());
        }
        while let Some(&key) = self.prefetches.front() {
            let Some(slab) = self.start(key, Priority::Prefetch)? else {
                break;
            };
            self.prefetches.pop_front();
            // What is certain to be demanded by the same layer a moment later is no prediction.
            if key.layer == self.layer {
                self.next_group.push(slab);
            } else {
                self.stats.speculative_reads += 1;
                self.prefetched.push(slab);
            }
        }
        self.start_preloads()
    }

    /// The next piece of the demanded experts that can be computed: what is begun is finished, then come experts that are in
    /// memory whole; sleeps until there is one; `None` when all have been handed out. The borrow ends before the next call, which also frees the slab of
    /// a finished expert for reuse.
    ///
    /// # Errors
    /// When a read failed on every copy: names tensor, file and offset.
    #[allow(
        clippy::should_implement_trait,
        reason = "it lends, and an iterator cannot"
    )]
    pub fn next(&mut self) -> Result<Option<Ready<'_>>, StreamError> {
        // Events first: the slab that is taken back must be known to be full.
        self.take_events()?;
        self.release_borrowed()?;
        let at = loop {
            if let Some(at) = self.computable() {
                break at;
            }
            if self.demands.iter().all(|d| d.stage == Stage::Done) {
                if let Some(recorder) = &mut self.recorder {
                    recorder.event(&routing::Event::Computed { layer: self.layer });
                }
                return Ok(None);
            }
            self.engine.flush();
            let event = self.engine.wait()?;
            self.handle(event)?;
        };
        // The drives work while the caller computes.
        self.engine.flush();
        let Demand { expert, stage } = self.demands[at];
        let locations = self.files.matrices(Key {
            layer: self.layer,
            expert,
        });
        let matrix = |slab, projection: Projection| {
            let Location {
                format, rows, cols, ..
            } = locations[projection as usize];
            let bytes = self.engine.payload(slab, weights_range(projection));
            let scales = self.engine.payload(slab, scales_range(projection));
            Matrix::with_scales(format, rows, cols, bytes, scales)
                .expect("the catalog has checked the sizes")
                .with_activations(self.activations)
        };
        Ok(Some(match stage {
            Stage::GateUp(slab) => {
                self.demands[at].stage = Stage::Down(slab);
                let (gate, up) = (matrix(slab, Projection::Gate), matrix(slab, Projection::Up));
                Ready::GateUp { expert, gate, up }
            }
            Stage::Down(slab) => {
                self.demands[at].stage = Stage::Done;
                self.borrowed = Some(slab);
                Ready::Down {
                    expert,
                    down: matrix(slab, Projection::Down),
                }
            }
            Stage::NoSlab | Stage::Done => unreachable!("not computable"),
        }))
    }

    /// The expert that was handed out whole at the last call has been computed: its slab may be reused, first for
    /// demands that had none.
    fn release_borrowed(&mut self) -> Result<(), StreamError> {
        let Some(slab) = self.borrowed.take() else {
            return Ok(());
        };
        self.cache.set_busy(slab, false);
        self.start_demands()?;
        self.start_prefetches()?;
        self.engine.flush();
        Ok(())
    }

    /// The demand to compute next: one that is begun and complete, so that its slab is free early; then one that is
    /// complete; then one whose gate and up are in.
    fn computable(&self) -> Option<usize> {
        let rank = |d: &Demand| match d.stage {
            Stage::Down(slab) if self.engine.ready(slab, DOWN) => Some(0),
            Stage::GateUp(slab) if self.engine.state(slab) == SlabState::Full => Some(1),
            Stage::GateUp(slab) if self.engine.ready(slab, GATE_UP) => Some(2),
            _ => None,
        };
        let ranked = self
            .demands
            .iter()
            .enumerate()
            .filter_map(|(i, d)| Some((rank(d)?, i)));
        ranked.min().map(|(_, i)| i)
    }

    fn handle(&mut self, event: Event) -> Result<(), StreamError> {
        match event {
            Event::Part(..) => return Ok(()),
            Event::Full(slab) => {
                self.preloading.retain(|s| *s != slab);
                if self.demand_on(slab).is_none() && self.borrowed != Some(slab) {
                    self.cache.set_busy(slab, false);
                }
            }
            Event::Dropped(slab) => {
                // It may have been demanded after all, too late for the ring thread to go on with it.
                if let Some(at) = self.demand_on(slab) {
                    self.demands[at].stage = Stage::NoSlab;
                }
                self.forget(slab);
            }
            Event::Failed(slab, source) => {
                let key = self
                    .cache
                    .key(slab)
                    .expect("the slab of a read holds an expert");
                let demand = self.demand_on(slab);
                self.forget(slab);
                if let Some(at) = demand {
                    self.demands[at].stage = Stage::Done;
                    let tensor =
                        self.files
                            .tensor_at(key, Some(source.file), source.offset, source.len);
                    return Err(StreamError::Read { tensor, source });
                }
                // If it is demanded later, it is read again, and that failure counts.
                tracing::warn!("{source}");
            }
        }
        // The slab may be what a demand waits for.
        self.start_demands()
    }

    /// The demand that is read into a slab and has not been handed out whole.
    fn demand_on(&self, slab: SlabId) -> Option<usize> {
        let on = |d: &Demand| matches!(d.stage, Stage::GateUp(s) | Stage::Down(s) if s == slab);
        self.demands.iter().position(on)
    }

    fn forget(&mut self, slab: SlabId) {
        self.cache.remove(slab);
        self.prefetched.retain(|s| *s != slab);
        self.preloading.retain(|s| *s != slab);
    }

    /// The error for a matrix whose scales turned out to be infinite or NaN.
    pub fn scale_error(&self, layer: usize, expert: u32, projection: Projection) -> StreamError {
        StreamError::Scale {
            tensor: self.files.catalog.scales_name(layer, expert, projection),
        }
    }

    /// The error for a matrix that has a weight that cannot be rounded.
    pub fn not_finite(
        &self,
        layer: usize,
        expert: u32,
        projection: Projection,
        found: NotFinite,
    ) -> StreamError {
        StreamError::NotFinite {
            tensor: self.files.catalog.tensor_name(layer, expert, projection),
            expert,
            found,
        }
    }

    /// What the store did so far.
    pub fn stats(&self) -> StreamStats {
        StreamStats {
            lookahead: self.policy.stats(),
            ..self.stats.clone()
        }
    }

    /// What the reads did so far; `None` when the engine has stopped.
    pub fn read_stats(&mut self) -> Option<colibri_ring::Stats> {
        self.engine.stats()
    }

    /// "uring" or "pread".
    pub fn device(&self) -> &'static str {
        self.engine.device()
    }
}
