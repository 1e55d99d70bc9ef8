//! Routing as the cache sees it: one session after the other, recorded or made up.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::Context;
use colibri_uring::stream::routing::{self, RoutingEvent};

/// The experts that the tokens of one pass use in a layer.
#[derive(Clone, Debug)]
pub struct Step {
    /// Counted over the layers that have experts.
    pub layer: usize,
    /// Tokens of the pass.
    pub tokens: u32,
    /// The experts, all different, and how many of the tokens use each.
    pub used: Vec<(u32, u32)>,
}

/// A session of a model.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Layers that have experts.
    pub layers: usize,
    /// Experts of each.
    pub experts: usize,
    /// In the order in which the model met them.
    pub steps: Vec<Step>,
}

fn step(layer: usize, chosen: &[u32], top_k: usize) -> Step {
    let mut ids = chosen.to_vec();
    ids.sort_unstable();
    let used = ids.chunk_by(|a, b| a == b);
    Step {
        layer,
        tokens: (chosen.len() / top_k) as u32,
        used: used.map(|run| (run[0], run.len() as u32)).collect(),
    }
}

/// What `decode --save-routing` wrote.
///
/// # Errors
/// When it is not that.
pub fn recorded(path: &Path) -> anyhow::Result<Trace> {
    let read = || anyhow::Ok(routing::read(BufReader::new(File::open(path)?))?);
    let (header, events) = read().with_context(|| format!("cannot use {}", path.display()))?;
    let mut layers: Vec<usize> = Vec::new();
    let mut steps = Vec::new();
    for event in events {
        if let RoutingEvent::Routed { layer, experts } = event {
            let at = layers.iter().position(|l| *l == layer);
            let at = at.unwrap_or_else(|| {
                layers.push(layer);
                layers.len() - 1
            });
            steps.push(step(at, &experts, header.top_k));
        }
    }
    Ok(Trace {
        layers: layers.len(),
        experts: header.experts,
        steps,
    })
}

/// Routing that nobody recorded.
#[derive(Clone, Copy, Debug)]
pub struct MadeUp {
    /// Popularity of the expert of rank r is 1 / (r + 1)^skew.
    pub skew: f64,
    /// Share of a token's experts that the token before used, too.
    pub repeated: f64,
    /// Topics, each with its own ranking of half of the experts; the others have one rank for all.
    pub topics: u64,
    /// Tokens until the topic changes, on average.
    pub topic_tokens: f64,
}

/// A reproducible source of chance.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() * n as f64) as usize
    }
}

impl MadeUp {
    /// Cumulated popularity of the experts of a layer in a topic.
    fn popularity(&self, layer: usize, topic: u64, experts: usize) -> Vec<f64> {
        let mut ranking: Vec<usize> = (0..experts).collect();
        shuffle(&mut ranking, 1 + layer as u64);
        // Every other rank goes to another expert in each topic.
        let own: Vec<usize> = (0..experts).step_by(2).collect();
        let mut ids: Vec<usize> = own.iter().map(|rank| ranking[*rank]).collect();
        shuffle(&mut ids, 1000 * (topic + 1) + layer as u64);
        own.iter()
            .zip(ids)
            .for_each(|(rank, id)| ranking[*rank] = id);
        let mut weight = vec![0.0; experts];
        for (rank, id) in ranking.into_iter().enumerate() {
            weight[id] = (rank as f64 + 1.0).powf(-self.skew);
        }
        let mut sum = 0.0;
        let sums = weight.into_iter().map(|w| {
            sum += w;
            sum
        });
        sums.collect()
    }

    /// A session of a model of 12 layers with 256 experts, of which a token uses 8. Sessions of the same `topic` begin with it.
    pub fn session(&self, tokens: usize, topic: u64, seed: u64) -> Trace {
        const LAYERS: usize = 12;
        const EXPERTS: usize = 256;
        const TOP_K: usize = 8;
        let mut rng = Rng(seed);
        let popularity: Vec<Vec<Vec<f64>>> = (0..self.topics)
            .map(|topic| {
                (0..LAYERS)
                    .map(|l| self.popularity(l, topic, EXPERTS))
                    .collect()
            })
            .collect();
        let mut topic = topic % self.topics;
        let mut chosen: Vec<Vec<u32>> = vec![Vec::new(); LAYERS];
        let mut steps = Vec::new();
        for _ in 0..tokens {
            if rng.next() < 1.0 / self.topic_tokens {
                topic = rng.below(self.topics as usize) as u64;
            }
            for (layer, ids) in chosen.iter_mut().enumerate() {
                ids.retain(|_| rng.next() < self.repeated);
                let sums = &popularity[topic as usize][layer];
                while ids.len() < TOP_K {
                    let x = rng.next() * sums[EXPERTS - 1];
                    let id = sums.partition_point(|sum| *sum <= x) as u32;
                    if !ids.contains(&id) {
                        ids.push(id);
                    }
                }
                steps.push(step(layer, ids, TOP_K));
            }
        }
        Trace {
            layers: LAYERS,
            experts: EXPERTS,
            steps,
        }
    }
}

fn shuffle(list: &mut [usize], seed: u64) {
    let mut rng = Rng(seed);
    for i in (1..list.len()).rev() {
        list.swap(i, rng.below(i + 1));
    }
}
