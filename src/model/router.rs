//! Chooses the experts of a token and their weights.

use crate::arch::{Part, Scoring, TensorId};
use crate::model::ops;
use crate::model::scratch::resize_scratch;
use crate::model::topk::top_k;
use crate::pool::Pool;
use crate::weight::{Loader, Weight, WeightError};

/// One expert of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Expert id.
    pub expert: u32,
    /// Factor on the expert's output.
    pub weight: f32,
}

/// The router of a sparse layer.
#[derive(Debug)]
pub struct Router {
    weight: Weight,
    /// Added to the scores for the choice only, not to the weights.
    bias: Vec<f32>,
    top_k: usize,
    normalise: bool,
    scale: f32,
}

/// Scratch of a router.
#[derive(Debug, Default)]
pub struct RouterScratch {
    scores: Vec<f32>,
    biased: Vec<f32>,
    picked: Vec<u32>,
}

impl Router {
    /// Loads the router of a sparse layer.
    pub fn load(loader: &mut Loader, layer: usize) -> Result<Router, WeightError> {
        let router = &loader.arch().router;
        let Scoring::Sigmoid = router.scoring;
        Ok(Router {
            weight: loader.matrix(TensorId::Layer(layer, Part::Router))?,
            bias: loader.vector(TensorId::Layer(layer, Part::RouterBias))?,
            top_k: router.top_k,
            normalise: router.normalise,
            scale: router.scale,
        })
    }

    /// The experts of each of the n tokens `x` [n, hidden]: `choices` becomes [n, top_k], ascending by
    /// expert id within a token.
    pub fn route(
        &self,
        pool: &Pool,
        x: &[f32],
        n: usize,
        scratch: &mut RouterScratch,
        choices: &mut Vec<Choice>,
    ) {
        choices.clear();
        self.pick(pool, x, n, self.top_k, scratch, |picked, scores| {
            let start = choices.len();
            choices.extend(picked.iter().map(|&expert| Choice {
                expert,
                weight: scores[expert as usize],
            }));
            let chosen = &mut choices[start..];
            if self.normalise {
                let sum = chosen.iter().map(|c| c.weight).sum::<f32>() + 1e-20;
                chosen.iter_mut().for_each(|c| c.weight /= sum);
            }
            chosen.iter_mut().for_each(|c| c.weight *= self.scale);
        });
    }

    /// The `k` best experts (at most all) of each of the n tokens `x` [n, hidden], where `x` is an estimate of what the router will
    /// be given: `ids` becomes [n, k], best first within a token. Returns k.
    pub fn top_candidates(
        &self,
        pool: &Pool,
        x: &[f32],
        n: usize,
        k: usize,
        scratch: &mut RouterScratch,
        ids: &mut Vec<u32>,
    ) -> usize {
        let k = k.min(self.bias.len());
        ids.clear();
        self.pick(pool, x, n, k, scratch, |picked, scores| {
            let start = ids.len();
            ids.extend_from_slice(picked);
            let biased = |id: u32| scores[id as usize] + self.bias[id as usize];
            ids[start..].sort_by(|a, b| biased(*b).total_cmp(&biased(*a)));
        });
        k
    }

    /// Calls `each(picked, scores)` for every token.
    fn pick(
        &self,
        pool: &Pool,
        x: &[f32],
        n: usize,
        k: usize,
        scratch: &mut RouterScratch,
        mut each: impl FnMut(&[u32], &[f32]),
    ) {
        let experts = self.bias.len();
        let scores = resize_scratch(&mut scratch.scores, n * experts);
        self.weight.matrix().matmul(pool, x, n, scores);
        for scores in scores.chunks_mut(experts) {
            scores.iter_mut().for_each(|s| *s = ops::sigmoid(*s));
            scratch.biased.clear();
            let biased = scores.iter().zip(&self.bias).map(|(s, b)| s + b);
            scratch.biased.extend(biased);
            top_k(&scratch.biased, k, &mut scratch.picked);
            each(&scratch.picked, scores);
        }
    }
}
