//! Reads recorded routing, or generates synthetic routing, as a cache sees it.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::Context;
use colibri_uring::stream::routing::{self, RoutingEvent};
use colibri_uring::tools::measure::Rng;

/// The experts that the tokens of one pass use in a layer.
#[derive(Clone, Debug)]
pub struct Step {
    /// Counted over the layers that have experts.
    pub layer: usize,
    /// Tokens of the pass.
    pub tokens: usize,
    /// `[tokens, top_k]`.
    pub chosen: Vec<u32>,
}

impl Step {
    /// The experts in use, each once, ascending.
    pub fn used(&self) -> Vec<u32> {
        let mut ids = self.chosen.clone();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

/// A session of a model.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Layers that have experts.
    pub layers: usize,
    /// Experts of each.
    pub experts: usize,
    /// Experts that a token uses in a layer.
    pub top_k: usize,
    /// In the order in which the model met them.
    pub steps: Vec<Step>,
}

/// Reads a file of `decode --save-routing`.
///
/// # Errors
/// When it is not one.
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
            steps.push(Step {
                layer: at,
                tokens: experts.len() / header.top_k,
                chosen: experts,
            });
        }
    }
    Ok(Trace {
        layers: layers.len(),
        experts: header.experts,
        top_k: header.top_k,
        steps,
    })
}

/// How regular synthetic routing is.
#[derive(Clone, Copy, Debug)]
pub struct SyntheticRouting {
    /// Popularity of the expert of rank r is 1 / (r + 1)^skew.
    pub skew: f64,
    /// Share of a token's experts that the token before also used.
    pub repeated: f64,
    /// Topics. Each ranks half of the experts; the other half has the same ranks in all topics.
    pub topics: u64,
    /// Tokens until the topic changes, on average.
    pub topic_tokens: f64,
}

/// A number from 0 to below 1.
fn unit(rng: &mut Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

fn below(rng: &mut Rng, n: usize) -> usize {
    (unit(rng) * n as f64) as usize
}

impl SyntheticRouting {
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
            if unit(&mut rng) < 1.0 / self.topic_tokens {
                topic = below(&mut rng, self.topics as usize) as u64;
            }
            for (layer, ids) in chosen.iter_mut().enumerate() {
                ids.retain(|_| unit(&mut rng) < self.repeated);
                let sums = &popularity[topic as usize][layer];
                while ids.len() < TOP_K {
                    let x = unit(&mut rng) * sums[EXPERTS - 1];
                    let id = sums.partition_point(|sum| *sum <= x) as u32;
                    if !ids.contains(&id) {
                        ids.push(id);
                    }
                }
                steps.push(Step {
                    layer,
                    tokens: 1,
                    chosen: ids.clone(),
                });
            }
        }
        Trace {
            layers: LAYERS,
            experts: EXPERTS,
            top_k: TOP_K,
            steps,
        }
    }
}

fn shuffle(list: &mut [usize], seed: u64) {
    let mut rng = Rng(seed);
    for i in (1..list.len()).rev() {
        list.swap(i, below(&mut rng, i + 1));
    }
}
