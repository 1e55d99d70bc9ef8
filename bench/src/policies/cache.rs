//! Replays routing through the program's cache under different eviction policies.

use std::cmp::Reverse;

use colibri_uring::stream::ExpertKey;
use colibri_uring::stream::cache::Cache;
use colibri_uring::stream::eviction::{Eviction, ProtectedLfu};
use colibri_uring::stream::pins::PinBudget;
use colibri_uring::stream::usage::Usage;

use super::trace::Trace;

/// Which expert is evicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Policy {
    /// The least recently used of the layer.
    Lru,
    /// The least recently used of all layers.
    PooledLru,
    /// The one whose last use but one is the longest ago.
    Lru2,
    /// The least frequently used. Uses begin with those of the history.
    Lfu {
        /// In tokens.
        half_life: f64,
    },
    /// The program's.
    Protected {
        /// In tokens.
        half_life: f64,
        /// Uses begin with those of the history.
        seeded: bool,
    },
    /// The one whose next use is the farthest away: the most that is possible.
    Optimal,
}

#[derive(Debug)]
struct Lru {
    pooled: bool,
}

impl Eviction for Lru {
    type Worth = u64;

    fn begin_pass(&mut self, _: usize, _: &[u32], _: usize, _: u64) {}

    fn worth(&self, _: ExpertKey, last_use: u64) -> u64 {
        last_use
    }

    fn is_pooled(&self) -> bool {
        self.pooled
    }
}

/// Of each expert, by layer: the last pass that used it, and the one before.
#[derive(Debug)]
struct Lru2(Vec<Vec<(u64, u64)>>);

impl Eviction for Lru2 {
    type Worth = (u64, u64);

    fn begin_pass(&mut self, layer: usize, chosen: &[u32], _: usize, tick: u64) {
        for id in chosen {
            let (last, before) = &mut self.0[layer][*id as usize];
            if *last != tick {
                *before = std::mem::replace(last, tick);
            }
        }
    }

    fn worth(&self, key: ExpertKey, last_use: u64) -> (u64, u64) {
        (self.0[key.layer][key.expert as usize].1, last_use)
    }
}

#[derive(Debug)]
struct Lfu(ProtectedLfu);

impl Eviction for Lfu {
    type Worth = (u32, u64);

    fn begin_pass(&mut self, layer: usize, chosen: &[u32], tokens: usize, tick: u64) {
        self.0.begin_pass(layer, chosen, tokens, tick);
    }

    fn worth(&self, key: ExpertKey, last_use: u64) -> (u32, u64) {
        (self.0.frequency(key), last_use)
    }
}

#[derive(Debug)]
struct Optimal {
    /// Of each pass to come, the last one first, when its experts are used next.
    passes: Vec<Vec<usize>>,
    /// Of each expert, by layer, the pass that uses it next.
    next: Vec<Vec<usize>>,
}

impl Optimal {
    fn new(trace: &Trace) -> Optimal {
        let mut next = vec![vec![usize::MAX; trace.experts]; trace.layers];
        let passes = trace.steps.iter().enumerate().rev().map(|(at, step)| {
            let of_layer = &mut next[step.layer];
            let used = step.used();
            let next_uses =
                (used.iter()).map(|id| std::mem::replace(&mut of_layer[*id as usize], at));
            next_uses.collect()
        });
        Optimal {
            passes: passes.collect(),
            next,
        }
    }
}

impl Eviction for Optimal {
    type Worth = Reverse<usize>;

    fn begin_pass(&mut self, layer: usize, chosen: &[u32], _: usize, _: u64) {
        let mut used = chosen.to_vec();
        used.sort_unstable();
        used.dedup();
        let next_uses = self.passes.pop().unwrap_or_default();
        for (id, next) in used.into_iter().zip(next_uses) {
            self.next[layer][id as usize] = next;
        }
    }

    fn worth(&self, key: ExpertKey, _: u64) -> Reverse<usize> {
        Reverse(self.next[key.layer][key.expert as usize])
    }
}

/// Counts the uses in a session.
pub fn history(trace: &Trace) -> Usage {
    let mut usage = Usage::new((0..trace.layers).collect(), trace.experts, trace.top_k);
    for step in &trace.steps {
        usage.record(step.layer, &step.chosen);
    }
    usage
}

/// Hits and uses of a session with `slots` for each layer, of which a share of `pinned` is pinned to experts of the history.
pub fn replay(
    trace: &Trace,
    (policy, pinned): (Policy, f64),
    slots: usize,
    history: Option<&Usage>,
) -> (u64, u64) {
    let (layers, experts) = (trace.layers, trace.experts);
    let counts = |half_life: f64, seeded: bool| {
        let mut lfu = ProtectedLfu::new(layers, experts, half_life);
        if let Some(history) = history.filter(|_| seeded) {
            for (layer, expert, _) in history.hottest() {
                let uses = history.count(layer, expert);
                lfu.add_uses(ExpertKey { layer, expert }, uses);
            }
        }
        lfu
    };
    let replay = Replay {
        trace,
        pinned,
        slots,
        history,
    };
    match policy {
        Policy::Lru => replay.run(Lru { pooled: false }),
        Policy::PooledLru => replay.run(Lru { pooled: true }),
        Policy::Lru2 => replay.run(Lru2(vec![vec![(0, 0); experts]; layers])),
        Policy::Lfu { half_life } => replay.run(Lfu(counts(half_life, true))),
        Policy::Protected { half_life, seeded } => replay.run(counts(half_life, seeded)),
        Policy::Optimal => replay.run(Optimal::new(trace)),
    }
}

struct Replay<'a> {
    trace: &'a Trace,
    pinned: f64,
    slots: usize,
    history: Option<&'a Usage>,
}

impl Replay<'_> {
    fn run<E: Eviction>(&self, eviction: E) -> (u64, u64) {
        let (trace, slots) = (self.trace, self.slots);
        let all = trace.layers * slots;
        // As the program, which has slabs for one token beyond the slots.
        let slabs = (all + trace.top_k + 1).min(trace.layers * trace.experts);
        let mut cache =
            Cache::with_eviction(&[slabs], trace.layers, trace.experts, slots, eviction);
        if let Some(history) = self.history.filter(|_| self.pinned > 0.0) {
            let budget = PinBudget {
                by_class: vec![all],
                layers: trace.layers,
                top_k: trace.top_k,
            };
            let pins = budget.select(history, self.pinned, |_| Some(0));
            cache.pin(&pins.keys, slots.min(pins.per_layer_quota));
            pins.keys.into_iter().for_each(|key| load(&mut cache, key));
        }
        let (mut hits, mut uses) = (0, 0);
        for step in &trace.steps {
            cache.begin_pass(step.layer, &step.chosen, step.tokens);
            let mut cached = Vec::new();
            let mut missed = Vec::new();
            for expert in step.used() {
                let layer = step.layer;
                let key = ExpertKey { layer, expert };
                match cache.slab(key) {
                    Some(slab) => cached.push(slab),
                    None => missed.push(key),
                }
            }
            hits += cached.len() as u64;
            uses += (cached.len() + missed.len()) as u64;
            for slab in &cached {
                cache.touch(*slab);
                cache.set_busy(*slab, true);
            }
            missed.into_iter().for_each(|key| load(&mut cache, key));
            (cached.into_iter()).for_each(|slab| cache.set_busy(slab, false));
        }
        (hits, uses)
    }
}

/// Reads an expert, unless every slab is busy.
fn load<E: Eviction>(cache: &mut Cache<E>, key: ExpertKey) {
    if let Some((slab, _)) = cache.make_room(0, key.layer, false) {
        cache.insert(key, slab);
        cache.set_busy(slab, false);
    }
}
