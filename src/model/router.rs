//! Chooses the experts of a token and their weights.

use crate::arch::{Groups, Part, Scoring, TensorId};
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
    scoring: Scoring,
    /// Added to the logits; empty where the model has none.
    logit_bias: Vec<f32>,
    /// Added to the scores for the choice only, not to the weights; zeros where the model has none.
    bias: Vec<f32>,
    groups: Groups,
    top_k: usize,
    normalise: bool,
    scale: f32,
}

/// Scratch of a router.
#[derive(Debug, Default)]
pub struct RouterScratch {
    scores: Vec<f32>,
    biased: Vec<f32>,
    groups: GroupScratch,
    picked: Vec<u32>,
}

/// Scores of groups, and the groups that are kept.
#[derive(Debug, Default)]
struct GroupScratch {
    scores: Vec<f32>,
    kept: Vec<u32>,
}

impl Router {
    /// Loads the router of a sparse layer.
    pub fn load(loader: &mut Loader, layer: usize) -> Result<Router, WeightError> {
        let router = &loader.arch().router;
        let experts = loader.arch().experts.count;
        Ok(Router {
            weight: loader.matrix(TensorId::Layer(layer, Part::Router))?,
            scoring: router.scoring,
            logit_bias: match router.logit_bias {
                true => loader.vector(TensorId::Layer(layer, Part::RouterLogitBias))?,
                false => Vec::new(),
            },
            bias: match router.bias {
                true => loader.vector(TensorId::Layer(layer, Part::RouterBias))?,
                false => vec![0.0; experts],
            },
            groups: router.groups,
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
            if self.scoring == Scoring::Chosen {
                let mut weights: Vec<f32> = chosen.iter().map(|c| c.weight).collect();
                ops::softmax(&mut weights);
                chosen
                    .iter_mut()
                    .zip(weights)
                    .for_each(|(c, w)| c.weight = w);
            }
            if self.normalise {
                let sum = chosen.iter().map(|c| c.weight).sum::<f32>() + 1e-20;
                chosen.iter_mut().for_each(|c| c.weight /= sum);
            }
            chosen.iter_mut().for_each(|c| c.weight *= self.scale);
        });
    }

    /// The `k` best experts (at most all of the kept groups) of each of the n tokens `x` [n, hidden], where `x` is an estimate of what the router will
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
        let k = k.min(self.bias.len() / self.groups.count * self.groups.keep);
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
            scores
                .iter_mut()
                .zip(&self.logit_bias)
                .for_each(|(s, b)| *s += b);
            match self.scoring {
                Scoring::Chosen => {}
                Scoring::Sigmoid => scores.iter_mut().for_each(|s| *s = ops::sigmoid(*s)),
                Scoring::Softmax => ops::softmax(scores),
            }
            scratch.biased.clear();
            let biased = scores.iter().zip(&self.bias).map(|(s, b)| s + b);
            scratch.biased.extend(biased);
            if self.groups != Groups::ONE {
                leave_out(self.groups, &mut scratch.biased, &mut scratch.groups);
            }
            top_k(&scratch.biased, k, &mut scratch.picked);
            each(&scratch.picked, scores);
        }
    }
}

/// Makes the scores of experts negative infinity whose group is not kept.
fn leave_out(groups: Groups, biased: &mut [f32], scratch: &mut GroupScratch) {
    let size = biased.len() / groups.count;
    scratch.scores.clear();
    let scores = biased.chunks_exact(size).map(sum_of_two_best);
    scratch.scores.extend(scores);
    top_k(&scratch.scores, groups.keep, &mut scratch.kept);
    let mut kept = scratch.kept.iter().copied().peekable();
    for (group, experts) in (0..).zip(biased.chunks_exact_mut(size)) {
        if kept.next_if_eq(&group).is_none() {
            experts.fill(f32::NEG_INFINITY);
        }
    }
}

fn sum_of_two_best(scores: &[f32]) -> f32 {
    let mut best = [f32::NEG_INFINITY; 2];
    for &score in scores {
        if score > best[0] {
            best = [score, best[0]];
        } else if score > best[1] {
            best[1] = score;
        }
    }
    best[0] + best[1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_kept_by_the_sum_of_their_two_best() {
        let groups = Groups { count: 3, keep: 2 };
        let mut scores = [0.9, 0.0, 0.1, 0.6, 0.5, 0.0, 0.4, 0.4, 0.4];
        leave_out(groups, &mut scores, &mut GroupScratch::default());
        let out = f32::NEG_INFINITY;
        assert_eq!(scores, [0.9, 0.0, 0.1, 0.6, 0.5, 0.0, out, out, out]);
        let mut scores = [-0.2, -0.1, -0.3, -0.1];
        let groups = Groups { count: 2, keep: 1 };
        leave_out(groups, &mut scores, &mut GroupScratch::default());
        assert_eq!(scores, [-0.2, -0.1, out, out]);
    }

    #[test]
    fn a_score_that_is_no_number_does_not_end_the_program() {
        let mut scores = [f32::NAN; 4];
        let groups = Groups { count: 2, keep: 1 };
        leave_out(groups, &mut scores, &mut GroupScratch::default());
        assert!(scores[2..].iter().all(|s| *s == f32::NEG_INFINITY));
    }
}
