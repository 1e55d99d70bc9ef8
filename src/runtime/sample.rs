//! Chooses the next token from logits.
//!
//! They apply in this order: repetition penalty, presence and frequency penalties and biases, grammar, temperature, top-k, top-p, min-p.

use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

mod adjust;
mod generation;
#[cfg(test)]
mod tests;

pub use crate::model::ops::argmax;
pub use adjust::Adjustments;
pub use generation::Generation;

use super::grammar::{Constraint, ConstraintError};
use adjust::Adjusted;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it. 0 is greedy: the largest logit, ties to the lowest id.
    pub temperature: f32,
    /// Keeps the most likely tokens until their probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps tokens with probability >= this factor times the most likely token's; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits of recent tokens, and multiplies negative ones; 1 changes nothing. Above 0.
    pub repetition_penalty: f32,
    /// Last tokens, prompt included, that count as recent; 0 is all.
    pub repetition_window: usize,
    /// The same seed draws the same tokens from the same logits.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            repetition_window: 64,
            seed: 0,
        }
    }
}

impl Sampling {
    /// The most likely token, always.
    pub fn greedy() -> Sampling {
        Sampling::default()
    }
}

/// Why no token could be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// Every logit is NaN or minus infinity.
    #[error("no token can be chosen: none of the {0} logits is a number")]
    NoLogit(usize),
    /// A logit is infinite: a number overflowed on the way to it.
    #[error("no token can be chosen: the logit of token {0} is infinite")]
    Infinite(u32),
    /// The text cannot go on within its grammar.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
}

/// Draws tokens from one random stream.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    // A specified stream: a seed means the same on every machine and in every version.
    random: ChaCha8Rng,
    recent: Recent,
    adjusted: Adjusted,
    constraint: Option<Constraint>,
    /// Logits `[vocabulary]` after the penalties; kept to reuse its memory.
    penalised: Vec<f32>,
}

impl Sampler {
    /// A sampler at the start of its random stream.
    pub fn new(sampling: Sampling) -> Sampler {
        Sampler {
            sampling,
            random: ChaCha8Rng::seed_from_u64(sampling.seed),
            recent: Recent::new(sampling.repetition_window),
            adjusted: Adjusted::default(),
            constraint: None,
            penalised: Vec::new(),
        }
    }

    /// The same sampler, with `adjustments` to all logits.
    #[must_use]
    pub fn adjusted(self, adjustments: Adjustments) -> Sampler {
        Sampler {
            adjusted: Adjusted::new(adjustments),
            ..self
        }
    }

    /// The same sampler, which draws only tokens that `constraint` allows. The text of the constraint starts with the next token.
    #[must_use]
    pub fn constrained(self, constraint: Constraint) -> Sampler {
        Sampler {
            constraint: Some(constraint),
            ..self
        }
    }

    /// Tokens that come next whatever the logits, at most `most`; none without a constraint. They count as sampled, and take nothing from the
    /// random stream. To be called before [`Sampler::sample`], which may get the logits after the last of them.
    ///
    /// # Errors
    /// [`SampleError::Constraint`].
    pub fn forced(&mut self, most: usize) -> Result<Vec<u32>, SampleError> {
        let Some(constraint) = &mut self.constraint else {
            return Ok(Vec::new());
        };
        let ids = constraint.forced(most)?;
        self.observe(&ids);
        ids.iter().for_each(|&id| self.adjusted.push(id));
        Ok(ids)
    }

    /// Counts tokens of the context that were not drawn here, like a prompt, for the repetition penalty. In order.
    pub fn observe(&mut self, ids: &[u32]) {
        // Without a penalty nothing reads the counts.
        if self.sampling.repetition_penalty != 1.0 {
            ids.iter().for_each(|&id| self.recent.push(id));
        }
    }

    /// Draws the next token from `logits` `[vocabulary]` and observes it. A NaN counts as impossible.
    ///
    /// # Errors
    /// [`SampleError::NoLogit`] when every token is impossible, and [`SampleError::Infinite`] for a logit of infinity.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        if let Some(best) = argmax(logits)
            && logits[best as usize].is_infinite()
        {
            return Err(SampleError::Infinite(best));
        }
        let penalty = self.sampling.repetition_penalty;
        if penalty == 1.0 && self.adjusted.by.is_none() && self.constraint.is_none() {
            return self.draw(logits);
        }
        let mut penalised = std::mem::take(&mut self.penalised);
        penalised.clear();
        penalised.extend_from_slice(logits);
        self.recent.penalise(penalty, &mut penalised);
        self.adjusted.apply(&mut penalised);
        let drawn = self.draw_allowed(&mut penalised);
        self.penalised = penalised;
        drawn.inspect(|&id| {
            self.observe(&[id]);
            self.adjusted.push(id);
        })
    }

    /// Draws from the tokens that the constraint allows.
    fn draw_allowed(&mut self, logits: &mut [f32]) -> Result<u32, SampleError> {
        if let Some(constraint) = &mut self.constraint {
            constraint.mask(logits)?;
        }
        let id = self.draw(logits)?;
        if let Some(constraint) = &mut self.constraint {
            let accepted = constraint.accept(id);
            // The mask has the token, so a limit refused it.
            accepted.map_err(|_| ConstraintError::TooComplex)?;
        }
        Ok(id)
    }

    /// Draws by temperature, top-k, top-p and min-p.
    fn draw(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let best = argmax(logits).ok_or(SampleError::NoLogit(logits.len()))?;
        let max = f64::from(logits[best as usize]);
        // No division by a temperature of 0. A penalty may have made a logit infinite, and infinity minus infinity is no weight.
        if self.sampling.temperature <= 0.0 || max.is_infinite() {
            return Ok(best);
        }
        let candidates = candidates(logits, max, &self.sampling);
        let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
        let mut left = self.unit() * total;
        for &(id, weight) in &candidates {
            left -= weight;
            if left < 0.0 {
                return Ok(id);
            }
        }
        // Additions and subtractions round differently, so `left` may stay above 0.
        Ok(candidates.last().map_or(best, |&(id, _)| id))
    }

    /// Uniform in [0, 1), with 53 random bits.
    fn unit(&mut self) -> f64 {
        (self.random.next_u64() >> 11) as f64 * (-53f64).exp2()
    }
}

/// Counts the last `window` tokens of a context, or all of them if that is 0.
#[derive(Clone, Debug)]
struct Recent {
    window: usize,
    /// Empty without a window.
    order: VecDeque<u32>,
    counts: HashMap<u32, usize>,
}

impl Recent {
    fn new(window: usize) -> Recent {
        Recent {
            window,
            order: VecDeque::new(),
            counts: HashMap::new(),
        }
    }

    fn push(&mut self, id: u32) {
        *self.counts.entry(id).or_default() += 1;
        if self.window == 0 {
            return;
        }
        self.order.push_back(id);
        if self.order.len() > self.window
            && let Some(old) = self.order.pop_front()
            && let Some(count) = self.counts.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&old);
            }
        }
    }

    /// Penalises each recent token once, however often it occurred.
    fn penalise(&self, penalty: f32, logits: &mut [f32]) {
        for &id in self.counts.keys() {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = if *logit > 0.0 {
                    *logit / penalty
                } else {
                    *logit * penalty
                };
            }
        }
    }
}

/// The natural logarithm of the probability of each of `logits` `[vocabulary]`, at temperature 1; computed in
/// f64 against overflow. NaN counts as impossible.
pub fn log_softmax_at(logits: &[f32], id: usize) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .filter(|logit| !logit.is_nan())
        .map(|&logit| (f64::from(logit) - f64::from(max)).exp())
        .sum();
    f64::from(logits[id]) - f64::from(max) - sum.ln()
}

/// The tokens that the filters keep, with weights that need not sum to 1.
fn candidates(logits: &[f32], max: f64, sampling: &Sampling) -> Vec<(u32, f64)> {
    let temperature = f64::from(sampling.temperature);
    let mut candidates: Vec<(u32, f64)> = logits
        .iter()
        .enumerate()
        .filter(|(_, logit)| **logit > f32::NEG_INFINITY)
        .map(|(id, &logit)| (id as u32, ((f64::from(logit) - max) / temperature).exp()))
        .collect();
    let most_likely_first =
        |a: &(u32, f64), b: &(u32, f64)| -> Ordering { b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)) };
    if sampling.top_k > 0 && sampling.top_k < candidates.len() {
        candidates.select_nth_unstable_by(sampling.top_k - 1, most_likely_first);
        candidates.truncate(sampling.top_k);
    }
    // The selection leaves any order; a seed needs the same one.
    candidates.sort_unstable_by(most_likely_first);
    if sampling.top_p < 1.0 {
        let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
        let wanted = f64::from(sampling.top_p) * total;
        let mut sum = 0.0;
        let kept = candidates.iter().position(|(_, weight)| {
            sum += weight;
            sum >= wanted
        });
        candidates.truncate(kept.map_or(candidates.len(), |last| last + 1));
    }
    if sampling.min_p > 0.0 {
        // The most likely token has weight 1, so it always stays.
        let least = f64::from(sampling.min_p.min(1.0));
        candidates.truncate(candidates.partition_point(|(_, weight)| *weight >= least));
    }
    candidates
}
