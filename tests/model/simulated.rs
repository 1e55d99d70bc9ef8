//! Tests the expert store on simulated drives: correct for any drives and routing, and fast on healthy drives.

use std::collections::BTreeMap;
use std::time::Duration;

use colibri_ring::sim::{Clock, SimDrive};
use colibri_ring::{Options, Window};
use colibri_uring::arch::Architecture;
use colibri_uring::shards::Shards;
use colibri_uring::stream::slots::{Budget, slots};
use colibri_uring::stream::usage::Usage;
use colibri_uring::stream::{
    Catalog, ExpertFiles, ExpertStore, Lookahead, Ready, StoreOptions, StreamError, Urgency,
};
use proptest::prelude::*;

use crate::common::Saved;

/// Experts of this fixture: 12 in each of its sparse layers, some 10 KiB each.
const FIXTURE: &str = "f16-long";
const TOP_K: usize = 3;

struct Bench {
    store: ExpertStore,
    clock: Clock,
    layers: Vec<usize>,
    experts: usize,
    /// Bytes that reading one expert takes, rounded outwards.
    read_bytes: u64,
}

fn bench(drives: Vec<SimDrive>, per_layer: usize, lookahead: Lookahead) -> Bench {
    let saved = Saved::named(FIXTURE);
    let config = Architecture::load(&saved.dirs[0]).unwrap();
    let shards = Shards::open(&saved.dirs).unwrap();
    let catalog = Catalog::new(&shards, &config).unwrap();
    let layers = catalog.layers().collect();
    let experts = catalog.experts();
    let files = ExpertFiles::on_drives(&shards, catalog, drives.len()).unwrap();
    let layouts = files.layouts().unwrap();
    let footprint = |l: &colibri_ring::Layout| l.spans().iter().map(|s| s.len).sum::<u64>();
    let read_bytes = layouts.iter().map(footprint).max().unwrap();
    let budget = Budget::SlotsPerLayer(per_layer);
    let slots = slots(&files.footprints(), files.moe_layers(), TOP_K, budget).unwrap();
    let clock = Clock::default();
    let options = StoreOptions {
        slots,
        lookahead,
        // Everything as on a real drive, at a thousandth of the size: an expert is several chunks.
        engine: Options {
            window: Window {
                bytes: 4 * 4096,
                reads: 64,
            },
            chunk_bytes: 4096,
            batch_bytes: 0,
            ..Options::default()
        },
    };
    let store = ExpertStore::simulated(files, TOP_K, options, drives, clock.clone()).unwrap();
    Bench {
        store,
        clock,
        layers,
        experts,
        read_bytes,
    }
}

impl Bench {
    /// One layer of a token: decision, demands, then each piece as it comes, `compute` for an expert.
    fn layer(&mut self, layer: usize, ids: &[u32], compute: Duration) -> Result<(), StreamError> {
        self.store.routed(layer, ids)?;
        self.store.request(layer, ids, Urgency::Demand)?;
        self.compute(ids, compute)
    }

    fn compute(&mut self, ids: &[u32], compute: Duration) -> Result<(), StreamError> {
        let mut seen = BTreeMap::new();
        while let Some(ready) = self.store.next()? {
            let (thirds, expert) = match ready {
                Ready::GateUp { expert, .. } => {
                    assert_eq!(seen.insert(expert, false), None, "handed out twice");
                    (2, expert)
                }
                Ready::Down { expert, .. } => {
                    assert_eq!(seen.insert(expert, true), Some(false), "gate and up first");
                    (1, expert)
                }
            };
            assert!(ids.contains(&expert));
            self.clock.advance(compute * thirds / 3);
        }
        assert_eq!(seen.len(), ids.len(), "an expert is lost");
        assert!(seen.values().all(|done| *done));
        Ok(())
    }
}

/// A drive that reads an expert of the fixture in some milliseconds.
fn drive(kib_per_s: u64) -> SimDrive {
    SimDrive::new(kib_per_s * 1024, Duration::from_micros(20))
}

/// Some `count` experts, all different, from a number.
fn some(seed: u64, count: usize, experts: usize) -> Vec<u32> {
    let mut left: Vec<u32> = (0..experts as u32).collect();
    let mut seed = seed | 1;
    let mut picked = Vec::new();
    for _ in 0..count.min(experts) {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(99);
        picked.push(left.remove((seed >> 33) as usize % left.len()));
    }
    picked.sort_unstable();
    picked
}

fn any_drive() -> impl Strategy<Value = SimDrive> {
    let change =
        (0u64..400, 1u64..20_000).prop_map(|(ms, rate)| (Duration::from_millis(ms), rate * 1024));
    let fails = prop::option::weighted(0.25, (0u64..400).prop_map(Duration::from_millis));
    (
        1u64..20_000,
        0u64..2_000,
        prop::collection::vec(change, 0..3),
        fails,
        prop_oneof![Just(0u64), 2u64..12],
        any::<bool>(),
    )
        .prop_map(
            |(rate, latency, mut changes, fails_at, short_every, bursts)| {
                changes.sort();
                SimDrive {
                    changes,
                    fails_at,
                    short_every,
                    bursts,
                    ..SimDrive::new(rate * 1024, Duration::from_micros(latency))
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// For any routing, predictions and drives: every demanded expert is handed out once and the run ends; an
    /// error comes only when every drive has failed; without speculation and failures, nothing is read that was not missed.
    #[test]
    fn nothing_is_lost_or_stuck(
        drives in prop::collection::vec(any_drive(), 1..5),
        per_layer in 0usize..13,
        lookahead in prop_oneof![Just(Lookahead::Off), Just(Lookahead::Auto), (1usize..6).prop_map(Lookahead::Experts)],
        steps in prop::collection::vec((any::<u64>(), 0u8..4, 0u64..3_000, any::<bool>()), 1..60),
    ) {
        let all_fail = drives.iter().all(|d| d.fails_at.is_some());
        let clean = drives.iter().all(|d| d.fails_at.is_none() && d.short_every == 0);
        let mut b = bench(drives, per_layer, lookahead);
        for (i, (seed, predictions, micros, many)) in steps.into_iter().enumerate() {
            let (at, layers) = (i % b.layers.len(), b.layers.clone());
            let ids = some(seed, if many { 9 } else { TOP_K }, b.experts);
            let result = (|| {
                b.store.routed(layers[at], &ids)?;
                b.store.request(layers[at], &ids, Urgency::Demand)?;
                if let Some(&next) = layers.get(at + 1) {
                    for i in 0..predictions {
                        let predicted = some(seed ^ u64::from(i), 5, b.experts);
                        b.store.predict(next, &predicted, 5)?;
                    }
                }
                b.compute(&ids, Duration::from_micros(micros))
            })();
            match result {
                Ok(()) => {}
                Err(StreamError::Read { .. }) if all_fail => return Ok(()),
                Err(e) => prop_assert!(false, "{}", e),
            }
        }
        let stats = b.store.stats();
        prop_assert!(stats.speculative_used <= stats.speculative_reads);
        if clean && lookahead == Lookahead::Off {
            let read: u64 = b.store.read_stats().unwrap().sources.iter().map(|s| s.bytes).sum();
            prop_assert!(read <= stats.misses * b.read_bytes, "{} misses, {} bytes", stats.misses, read);
        }
    }

    /// A layer's experts, none in memory: as fast as any order of reading and computing, on equal or unequal drives,
    /// disk-bound or compute-bound.
    #[test]
    fn a_layer_is_within_5_percent_of_the_best_schedule(
        rates in prop::collection::vec(500u64..8_000, 1..4),
        micros in 0u64..20_000,
        seed in 0u64..1 << 40,
    ) {
        let sum: u64 = rates.iter().sum::<u64>() * 1024;
        let mut b = bench(rates.iter().map(|r| drive(*r)).collect(), 12, Lookahead::Off);
        let compute = Duration::from_micros(micros);
        // What the drives give is known by then.
        for (i, layer) in b.layers.clone().into_iter().skip(1).enumerate() {
            b.layer(layer, &some(seed + i as u64, 9, b.experts), Duration::ZERO).unwrap();
        }
        let start = b.clock.now();
        let (layer, ids) = (b.layers[0], some(seed, 6, b.experts));
        b.layer(layer, &ids, compute).unwrap();
        let took = (b.clock.now() - start).as_secs_f64();
        // No schedule ends before everything is read and the last piece is computed, or before the first part is read and
        // everything is computed. A part is read in whole chunks.
        let (n, c) = (ids.len() as f64, compute.as_secs_f64());
        let read = b.read_bytes as f64 / sum as f64;
        let best = (n * read + c / 3.0).max(read * 2.0 / 3.0 + n * c);
        let slowest = rates.iter().min().unwrap() * 1024;
        // A chunk is not divided: the last of each drive, and the latency.
        let grain = 2.0 * 4096.0 / slowest as f64 + 40e-6;
        prop_assert!(took <= 1.05 * best + grain, "{took} s, at best {best} s, grain {grain} s");
    }

    /// Guesses that are always right hide the shorter of reading and computing.
    #[test]
    fn perfect_predictions_overlap_layers(rate in 1_000u64..8_000, micros in 500u64..20_000, seed in any::<u64>()) {
        let mut b = bench(vec![drive(rate)], 0, Lookahead::Experts(TOP_K));
        let compute = Duration::from_micros(micros);
        let layers = b.layers.clone();
        let tokens = 20;
        let ids = |step: usize| some(seed.wrapping_add(step as u64 * 7919), TOP_K, 12);
        let steps = tokens * layers.len();
        for step in 0..steps {
            let layer = layers[step % layers.len()];
            let now = ids(step);
            b.store.routed(layer, &now).unwrap();
            b.store.request(layer, &now, Urgency::Demand).unwrap();
            b.store.predict(layers[(step + 1) % layers.len()], &ids(step + 1), TOP_K).unwrap();
            b.compute(&now, compute).unwrap();
        }
        let took = b.clock.now().as_secs_f64() / steps as f64;
        let read = TOP_K as f64 * b.read_bytes as f64 / (rate * 1024) as f64;
        let arithmetic = TOP_K as f64 * compute.as_secs_f64();
        let both = read + arithmetic;
        prop_assert!(took < 1.25 * read.max(arithmetic), "{took} s, {read} s reading, {arithmetic} s computing, {both} s in turns");
    }
}

/// What a run would have counted that used these experts of every layer.
fn used(b: &Bench, experts: &[u32]) -> Usage {
    let mut usage = Usage::new(b.layers.clone(), b.experts, TOP_K);
    for layer in &b.layers {
        (0..10).for_each(|_| usage.record(*layer, experts));
    }
    usage
}

#[test]
fn pinned_experts_are_read_behind_everything_else_and_stay() {
    let run = |pins: bool| {
        let mut b = bench(vec![drive(2_000)], 4, Lookahead::Off);
        let (layers, hot) = (b.layers.clone(), [9, 10, 11]);
        if pins {
            let history = used(&b, &hot);
            b.store.pin(&history, 1.0).unwrap();
        }
        // What the prompt needs comes as soon as without pins, but for what the drive has already begun.
        b.layer(layers[0], &[0, 1, 2], Duration::ZERO).unwrap();
        let first = b.clock.now();
        for step in 0..40u64 {
            let ids: Vec<u32> = some(step, TOP_K, 9);
            for layer in &layers {
                b.layer(*layer, &ids, Duration::from_millis(8)).unwrap();
            }
        }
        let before = b.store.stats();
        for layer in &layers {
            b.layer(*layer, &hot, Duration::ZERO).unwrap();
        }
        let after = b.store.stats();
        (first, after.pinned, after.hits - before.hits)
    };
    let (without, with) = (run(false), run(true));
    let experts = (3 * bench(vec![drive(2_000)], 4, Lookahead::Off).layers.len()) as u64;
    assert_eq!((without.1, without.2), (0, 0));
    assert_eq!((with.1, with.2), (experts, experts));
    let chunks = Duration::from_secs_f64(2.0 * 4096.0 / (2_000.0 * 1024.0));
    assert!(
        with.0 <= without.0 + chunks,
        "{:?} and {:?}",
        with.0,
        without.0
    );
}

#[test]
fn what_is_pinned_leaves_room_for_the_work() {
    for per_layer in [0, 1, 2, 12] {
        let mut b = bench(vec![drive(2_000)], per_layer, Lookahead::Auto);
        let all: Vec<u32> = (0..12).collect();
        let history = used(&b, &all[..]);
        b.store.pin(&history, 1.0).unwrap();
        for step in 0..30u64 {
            for layer in b.layers.clone() {
                let ids = some(step * 31 + layer as u64, 9, b.experts);
                b.layer(layer, &ids, Duration::from_millis(1)).unwrap();
            }
        }
        let pinned = b.store.stats().pinned as usize;
        assert!(pinned <= per_layer * b.layers.len());
    }
}

#[test]
fn the_same_run_takes_the_same_time() {
    let run = || {
        let mut b = bench(vec![drive(900), drive(300)], 2, Lookahead::Auto);
        for step in 0..60u64 {
            let layers = b.layers.clone();
            let at = step as usize % layers.len();
            let ids = some(step, TOP_K, b.experts);
            b.store.routed(layers[at], &ids).unwrap();
            b.store.request(layers[at], &ids, Urgency::Demand).unwrap();
            let predicted = some(step + 1, 5, b.experts);
            if let Some(&next) = layers.get(at + 1) {
                b.store.predict(next, &predicted, 5).unwrap();
            }
            b.compute(&ids, Duration::from_millis(3)).unwrap();
        }
        (b.clock.now(), b.store.read_stats().unwrap().sources)
    };
    assert_eq!(run(), run());
}
