//! The expert store against the fixtures: whatever is demanded and prefetched, in any order, on every
//! device and with any number of slabs, every expert is handed out once, with the file's bytes.

use std::path::PathBuf;

use colibri_ring::{DirectMode, EngineKind, Options};
use colibri_uring::arch::Architecture;
use colibri_uring::quant::Matrix;
use colibri_uring::shards::{Cache, Shards};
use colibri_uring::stream::catalog::Projection;
use colibri_uring::stream::slots::{Budget, slots};
use colibri_uring::stream::{
    Catalog, ExpertFiles, ExpertStore, Lookahead, Ready, StoreOptions, Urgency,
};

use crate::common::Saved;

const TOP_K: usize = 3;

/// A small deterministic source of numbers.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }

    fn experts(&mut self, count: usize, experts: usize) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..experts as u32).collect();
        while ids.len() > count.min(experts) {
            ids.remove(self.below(ids.len()));
        }
        ids
    }
}

fn model(fixture: &str) -> (Vec<PathBuf>, Architecture) {
    let dirs = Saved::named(fixture).dirs;
    let config = Architecture::load(&dirs[0]).unwrap();
    (dirs, config)
}

/// The bytes that the store should hand out, read by pread: weights, and scales if there are any.
type Bytes = (Vec<u8>, Vec<u8>);

fn on_disk(shards: &Shards, catalog: &Catalog, layer: usize, expert: u32) -> [Bytes; 3] {
    let locations = catalog.expert(layer, expert).unwrap();
    Projection::ALL.map(|projection| {
        let at = locations[projection as usize];
        let name = catalog.tensor_name(layer, expert, projection);
        let tensor = shards.get(&name).unwrap();
        let raw = shards.read_raw(&name, Cache::Drop).unwrap();
        let start = (at.offset - tensor.offset) as usize;
        let scales = match at.scales.bytes {
            0 => Vec::new(),
            _ => {
                let name = catalog.scales_name(layer, expert, projection);
                shards.read_raw(&name, Cache::Drop).unwrap()
            }
        };
        (raw[start..start + at.bytes as usize].to_vec(), scales)
    })
}

fn same(matrix: Matrix<'_>, (weights, scales): &Bytes) -> bool {
    matrix.bytes() == weights && matrix.scales() == scales
}

fn run(
    fixture: &str,
    (budget, lookahead): (Budget, Lookahead),
    direct: DirectMode,
    engine: Options,
    seed: u64,
) {
    let (dirs, config) = model(fixture);
    let shards = Shards::open(&dirs).unwrap();
    let catalog = Catalog::new(&shards, &config).unwrap();
    let layers: Vec<usize> = catalog.layers().collect();
    let experts = catalog.experts();
    let truth: Vec<Vec<[Bytes; 3]>> = layers
        .iter()
        .map(|&l| {
            (0..experts as u32)
                .map(|e| on_disk(&shards, &catalog, l, e))
                .collect()
        })
        .collect();
    let files = ExpertFiles::new(&shards, catalog, direct).unwrap();
    let slots = slots(&files.footprints(), files.moe_layers(), TOP_K, budget).unwrap();
    let options = StoreOptions {
        slots,
        lookahead,
        engine,
    };
    let mut store = ExpertStore::new(files, TOP_K, options).unwrap();
    let mut rng = Rng(seed);
    let mut demanded = 0;
    for _ in 0..60 {
        for (l, &layer) in layers.iter().enumerate() {
            // Sometimes one token's experts, sometimes the union of many tokens'.
            let count = if rng.below(4) == 0 {
                1 + rng.below(experts)
            } else {
                TOP_K
            };
            let ids = rng.experts(count, experts);
            store.routed(layer, &ids).unwrap();
            store.request(layer, &ids, Urgency::Demand).unwrap();
            if let Some(&next) = layers.get(l + 1) {
                for _ in 0..rng.below(3) {
                    let ranks = store.candidates(next).min(experts);
                    let ids = rng.experts(ranks, experts);
                    if ranks > 0 {
                        store.predict(next, &ids, ranks).unwrap();
                    }
                }
            }
            let mut seen = std::collections::BTreeMap::new();
            while let Some(ready) = store.next().unwrap() {
                match ready {
                    Ready::GateUp { expert, gate, up } => {
                        let [gate_, up_, _] = &truth[l][expert as usize];
                        assert!(same(gate, gate_) && same(up, up_));
                        assert_eq!(seen.insert(expert, false), None, "handed out twice");
                    }
                    Ready::Down { expert, down } => {
                        assert!(same(down, &truth[l][expert as usize][2]));
                        assert_eq!(
                            seen.insert(expert, true),
                            Some(false),
                            "gate and up come first"
                        );
                    }
                }
            }
            assert!(seen.values().all(|done| *done));
            assert_eq!(seen.into_keys().collect::<Vec<_>>(), ids);
            demanded += ids.len() as u64;
        }
    }
    let stats = store.stats();
    assert_eq!(stats.hits + stats.misses, demanded);
    assert!(stats.speculative_used <= stats.speculative_reads);
    if lookahead == Lookahead::Off {
        assert_eq!(stats.speculative_reads, 0);
        if budget == Budget::SlotsPerLayer(usize::MAX) {
            assert!(
                stats.misses <= (layers.len() * experts) as u64,
                "each expert is read once"
            );
        }
    }
}

#[test]
fn every_expert_is_handed_out_once_with_the_files_bytes() {
    let mut seed = 0x9E37_79B9_7F4A_7C15;
    for fixture in [
        "bf16-shared",
        "bf16-split",
        "f16-crossing",
        "bf16-fused-bias",
        "tiny-text",
        "container-mixed",
        "fp8-block",
    ] {
        for kind in [EngineKind::Auto, EngineKind::Pread] {
            for budget in [
                Budget::SlotsPerLayer(0),
                Budget::SlotsPerLayer(1),
                Budget::SlotsPerLayer(usize::MAX),
            ] {
                for lookahead in [Lookahead::Off, Lookahead::Auto] {
                    for direct in [DirectMode::Auto, DirectMode::Off] {
                        seed += 1;
                        // Small chunks, so that an expert is several reads even in a fixture.
                        let engine = Options {
                            kind,
                            chunk_bytes: 4096,
                            ..Options::default()
                        };
                        run(fixture, (budget, lookahead), direct, engine, seed);
                    }
                }
            }
        }
    }
}
