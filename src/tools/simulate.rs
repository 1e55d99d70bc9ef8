//! Simulates decoding on another machine: the real expert store on simulated drives, with a cost model for the
//! arithmetic, and recorded or synthetic routing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use colibri_ring::sim::Clock;

use crate::arch::{Architecture, Part, TensorId};
use crate::pool::Pool;
use crate::quant::Matrix;
use crate::shards::Shards;
use crate::stream::routing::RoutingEvent;
use crate::stream::{Catalog, ExpertStore, Ready, StreamError, Urgency};
use crate::weight;

mod routing;
pub use routing::{RoutingParams, synthetic_routing};

/// Compute times of one token.
#[derive(Clone, Debug, PartialEq)]
pub struct Compute {
    /// By layer: attention, which comes before the router. For a dense layer, all of it.
    pub layers: Vec<Duration>,
    /// A decision of a router, or a prediction of it.
    pub router: Duration,
    /// The shared expert of a layer.
    pub shared: Duration,
    /// A routed expert.
    pub expert: Duration,
    /// Everything after the last layer.
    pub head: Duration,
}

/// The decision of a layer's router and the two predictions of it.
const ROUTER_RUNS: f64 = 3.0;

impl Compute {
    /// From a measurement over `tokens` tokens: `seconds` by phase.
    pub fn measured(arch: &Architecture, seconds: &BTreeMap<String, f64>, tokens: u64) -> Compute {
        let layers = arch.num_hidden_layers();
        let sparse: Vec<usize> = arch.sparse_layers().collect();
        let each = |phases: &[&str], runs: f64| {
            let total: f64 = phases.iter().filter_map(|p| seconds.get(*p)).sum();
            Duration::from_secs_f64(total / (tokens as f64 * runs).max(1.0))
        };
        let attention = each(&["attention", "indexer"], layers as f64);
        let dense = each(&["dense"], (layers - sparse.len()) as f64);
        let layer = |layer| match sparse.contains(&layer) {
            true => attention,
            false => attention + dense,
        };
        let runs = sparse.len() as f64;
        Compute {
            layers: (0..layers).map(layer).collect(),
            router: each(&["router"], runs * ROUTER_RUNS),
            shared: each(&["shared"], runs),
            expert: each(&["experts"], runs * arch.router.top_k as f64),
            head: each(&["embed", "head"], 1.0),
        }
    }

    /// As if the kernels processed all weights that a token uses at `rate` bytes a second.
    pub fn at_rate(arch: &Architecture, shards: &Shards, catalog: &Catalog, rate: f64) -> Compute {
        let time = |bytes: u64| Duration::from_secs_f64(bytes as f64 / rate);
        let tensors = || {
            let tensors = shards.iter();
            tensors.filter_map(|t| Some((weight::id_of(arch, t.name)?, t.bytes)))
        };
        let per_layer = |counted: fn(Part) -> bool| -> Vec<u64> {
            let mut bytes = vec![0; arch.num_hidden_layers()];
            for (id, size) in tensors() {
                if let TensorId::Layer(layer, part) = id
                    && counted(part)
                    && let Some(bytes) = bytes.get_mut(layer)
                {
                    *bytes += size;
                }
            }
            bytes
        };
        let mean = |bytes: &[u64]| {
            let used = bytes.iter().filter(|b| **b > 0).count().max(1);
            bytes.iter().sum::<u64>() / used as u64
        };
        let experts: u64 = catalog
            .layers()
            .map(|layer| expert_bytes(catalog, layer))
            .sum();
        let rest = |part| !is_router(part) && !is_shared(part);
        let head = tensors().filter(|(id, _)| *id == TensorId::Head);
        Compute {
            layers: per_layer(rest).into_iter().map(time).collect(),
            router: time(mean(&per_layer(is_router))),
            shared: time(mean(&per_layer(is_shared))),
            expert: time(experts / catalog.layers().count().max(1) as u64),
            head: time(head.map(|(_, bytes)| bytes).sum()),
        }
    }

    /// The time of one token with `top_k` experts in each of `sparse` layers.
    pub fn token(&self, sparse: usize, top_k: usize) -> Duration {
        let layer = self.router.mul_f64(ROUTER_RUNS) + self.shared + self.expert * top_k as u32;
        self.layers.iter().sum::<Duration>() + layer * sparse as u32 + self.head
    }
}

fn is_router(part: Part) -> bool {
    matches!(
        part,
        Part::Router | Part::RouterBias | Part::RouterLogitBias
    )
}

fn is_shared(part: Part) -> bool {
    Part::SHARED.contains(&part)
}

/// Bytes of the first expert of a layer: the others are as large.
fn expert_bytes(catalog: &Catalog, layer: usize) -> u64 {
    let matrices = catalog.expert(layer, 0);
    matrices.map_or(0, |m| m.iter().map(|m| m.stored_bytes()).sum())
}

/// The result of a replay, in simulated time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// The prompt, which is the first pass.
    pub prompt: Duration,
    /// Everything after it.
    pub decode: Duration,
    /// Waiting for reads in that.
    pub waited: Duration,
    /// Tokens after the prompt.
    pub tokens: u64,
    /// Bytes read for them, mispredictions included.
    pub read: u64,
}

/// Replays recorded routing on a store with simulated drives.
#[derive(Debug)]
pub struct Replay<'a> {
    store: &'a mut ExpertStore,
    clock: &'a Clock,
    compute: &'a Compute,
    top_k: usize,
    /// Layers of the running pass whose part before the router is computed.
    done: usize,
    /// The last layer of the running pass whose experts are computed.
    computed: Option<usize>,
    /// The layer whose experts are computed next, and how many tokens use each.
    routed: Option<(usize, BTreeMap<u32, u32>)>,
    passes: u64,
    /// Tokens of the running pass.
    tokens: u32,
    /// When the prompt was computed.
    prompt: Option<Duration>,
    /// Bytes that were read by then.
    before: u64,
    waited: Duration,
}

/// Counts the passes: each goes once through the first layer that has a router.
pub fn passes(events: &[RoutingEvent]) -> u64 {
    let routed = |event: &RoutingEvent| match event {
        RoutingEvent::Routed { layer, .. } => Some(*layer),
        _ => None,
    };
    let first = events.iter().find_map(routed);
    let passes = events.iter().filter_map(routed);
    passes.filter(|layer| Some(*layer) == first).count() as u64
}

impl<'a> Replay<'a> {
    /// A replay for tokens that use `top_k` experts in a layer.
    pub fn new(
        store: &'a mut ExpertStore,
        clock: &'a Clock,
        compute: &'a Compute,
        top_k: usize,
    ) -> Replay<'a> {
        Replay {
            store,
            clock,
            compute,
            top_k,
            done: 0,
            computed: None,
            routed: None,
            passes: 0,
            tokens: 0,
            prompt: None,
            before: 0,
            waited: Duration::ZERO,
        }
    }

    /// Replays all events. Layers and experts must be the model's. `passed` is called often with the number of complete passes.
    ///
    /// # Errors
    /// When every drive with an expert has failed.
    pub fn run(
        mut self,
        events: &[RoutingEvent],
        mut passed: impl FnMut(u64),
    ) -> Result<Replayed, StreamError> {
        for (i, event) in events.iter().enumerate() {
            passed(self.passes);
            match event {
                RoutingEvent::Predicted {
                    layer,
                    ranks,
                    experts,
                } => {
                    // In the middle of a layer it is the early look at the next one. Of two looks at the first sparse layer the early
                    // one comes before the dense layers; the others come before the attention.
                    if self.routed.is_none() {
                        let again = |event: &RoutingEvent| matches!(event, RoutingEvent::Predicted { layer: l, .. } if l == layer);
                        let early = events.get(i + 1).is_some_and(again);
                        self.reach(
                            *layer,
                            if early { 0 } else { *layer },
                            experts.len() / ranks,
                        );
                    }
                    // Only a prediction that is made takes time.
                    if self.store.candidates(*layer) > 0 {
                        self.spend(self.compute.router, self.tokens);
                        self.store.predict(*layer, experts, *ranks)?;
                    }
                }
                RoutingEvent::Routed { layer, experts } => {
                    self.reach(*layer, layer + 1, experts.len() / self.top_k);
                    self.spend(self.compute.router, self.tokens);
                    let mut assignments = BTreeMap::new();
                    for id in experts {
                        *assignments.entry(*id).or_insert(0) += 1;
                    }
                    let ids: Vec<u32> = assignments.keys().copied().collect();
                    self.store.routed(*layer, experts)?;
                    self.store.request(*layer, &ids, Urgency::Demand)?;
                    self.routed = Some((*layer, assignments));
                }
                RoutingEvent::Computed { .. } => self.experts()?,
                RoutingEvent::Measured { .. } => {}
            }
        }
        self.end_pass();
        let prompt = self.prompt.unwrap_or_default();
        Ok(Replayed {
            prompt,
            decode: self.clock.now() - prompt,
            waited: self.waited,
            tokens: self.passes.saturating_sub(1),
            read: self.read() - self.before,
        })
    }

    /// Bytes that were read so far.
    fn read(&mut self) -> u64 {
        self.store.read_stats().map_or(0, |stats| stats.bytes())
    }

    fn spend(&self, time: Duration, times: u32) {
        self.clock.advance(time * times);
    }

    /// Computes the layers up to `end`, on the way to `layer`. A layer whose experts are computed already belongs to the next pass.
    fn reach(&mut self, layer: usize, end: usize, tokens: usize) {
        if self.computed.is_some_and(|computed| layer <= computed) {
            self.end_pass();
        }
        self.tokens = tokens as u32;
        for layer in self.done..end {
            self.spend(self.compute.layers[layer], self.tokens);
        }
        self.done = self.done.max(end);
    }

    /// Computes the layers that are left, and the head.
    fn end_pass(&mut self) {
        for layer in self.done..self.compute.layers.len() {
            self.spend(self.compute.layers[layer], self.tokens);
        }
        self.spend(self.compute.head, 1);
        (self.done, self.computed) = (0, None);
        self.passes += 1;
        if self.prompt.is_none() {
            self.prompt = Some(self.clock.now());
            self.before = self.read();
            self.waited = Duration::ZERO;
        }
    }

    /// Computes the shared expert, then the routed experts of a layer as they arrive.
    fn experts(&mut self) -> Result<(), StreamError> {
        let Some((layer, assignments)) = self.routed.take() else {
            return Ok(());
        };
        self.computed = Some(layer);
        self.spend(self.compute.shared, self.tokens);
        loop {
            let asked = self.clock.now();
            let ready = self.store.next()?;
            self.waited += self.clock.now() - asked;
            // Gate and up are two of an expert's three matrices of equal size.
            let (expert, thirds) = match ready {
                Some(Ready::GateUp { expert, .. }) => (expert, 2),
                Some(Ready::Down { expert, .. }) => (expert, 1),
                None => return Ok(()),
            };
            self.spend(self.compute.expert * thirds / 3, assignments[&expert]);
        }
    }
}

/// Bytes of expert weights per second that the kernels of this machine process from memory.
pub fn kernel_rate(catalog: &Catalog, pool: &Pool) -> f64 {
    /// More than any cache holds.
    const BYTES: u64 = 256 << 20;
    const RUNS: u32 = 3;
    let Some([gate, ..]) = catalog.layers().next().and_then(|l| catalog.expert(l, 0)) else {
        return 1.0;
    };
    // Any byte is a weight in every format, and 0x3C3C3C3C a harmless float.
    let bytes = vec![0x3C; gate.bytes as usize];
    let scales = vec![0x3C; gate.scales.bytes as usize];
    let copies = (BYTES / gate.stored_bytes().max(1)).clamp(1, 4096) as usize;
    let copies: Vec<_> = (0..copies)
        .map(|_| (bytes.clone(), scales.clone()))
        .collect();
    let (x, mut out) = (vec![0.5; gate.cols], vec![0.0; gate.rows]);
    let mut fastest = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Instant::now();
        for (bytes, scales) in &copies {
            let matrix = Matrix::with_scales(gate.format, gate.rows, gate.cols, bytes, scales)
                .expect("the catalog has checked the sizes");
            matrix.matmul(pool, &x, 1, &mut out);
        }
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    copies.len() as f64 * gate.stored_bytes() as f64 / fastest
}
