//! Choosing the next token from logits.
//!
//! In this order: repetition penalty, temperature, top-k, top-p, min-p. Each later one sees what the earlier ones left.

use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it. 0 is greedy: the largest logit, ties to the lowest id.
    pub temperature: f32,
    /// Only the likeliest tokens whose probabilities reach this sum are drawn from; 1 is all.
    pub top_p: f32,
    /// Only this many of the likeliest tokens are drawn from; 0 is all.
    pub top_k: usize,
    /// Only tokens at least this share as likely as the likeliest are drawn from; 0 is all.
    pub min_p: f32,
    /// Positive logits of tokens that were there already are divided by it, others multiplied; 1 changes nothing. Above 0.
    pub repetition_penalty: f32,
    /// How many of the last tokens, prompt included, count as being there already; 0 is all.
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

/// Why no token could be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// Every logit is NaN or minus infinity, or there is none.
    #[error("no token can be chosen: none of the {0} logits is a number")]
    NoLogit(usize),
}

/// Draws tokens one after the other from one random stream.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    // Its stream is specified, so a seed means the same on every machine and in every later version.
    random: ChaCha8Rng,
    recent: Recent,
    /// Logits [vocabulary] after the penalty; kept for its memory.
    penalised: Vec<f32>,
}

impl Sampler {
    /// A sampler at the start of its random stream.
    pub fn new(sampling: Sampling) -> Sampler {
        Sampler {
            sampling,
            random: ChaCha8Rng::seed_from_u64(sampling.seed),
            recent: Recent::new(sampling.repetition_window),
            penalised: Vec::new(),
        }
    }

    /// Takes note of tokens that are in the context and were not drawn here: a prompt. In the order of the context.
    pub fn observe(&mut self, ids: &[u32]) {
        // What nobody looks at is not kept.
        if self.sampling.repetition_penalty != 1.0 {
            ids.iter().for_each(|&id| self.recent.push(id));
        }
    }

    /// The next token for `logits` [vocabulary], of which note is taken. A NaN counts as impossible.
    ///
    /// # Errors
    /// [`SampleError::NoLogit`] when every token is impossible.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let penalty = self.sampling.repetition_penalty;
        if penalty == 1.0 {
            return self.draw(logits);
        }
        let mut penalised = std::mem::take(&mut self.penalised);
        penalised.clear();
        penalised.extend_from_slice(logits);
        self.recent.penalise(penalty, &mut penalised);
        let drawn = self.draw(&penalised);
        self.penalised = penalised;
        drawn.inspect(|&id| self.recent.push(id))
    }

    /// By temperature, top-k, top-p and min-p.
    fn draw(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let best = argmax(logits).ok_or(SampleError::NoLogit(logits.len()))?;
        let max = f64::from(logits[best as usize]);
        // No division by a temperature of 0, and infinity minus infinity is no weight.
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
        // Rounding may leave a rest: the sum's order of additions is not that of the subtractions.
        Ok(candidates.last().map_or(best, |&(id, _)| id))
    }

    /// Uniform in [0, 1), with 53 random bits.
    fn unit(&mut self) -> f64 {
        (self.random.next_u64() >> 11) as f64 * (-53f64).exp2()
    }
}

/// The tokens that a repetition penalty is for: the last `window` of a context, or all of them if that is 0.
#[derive(Clone, Debug)]
struct Recent {
    window: usize,
    /// Empty without a window: then nothing is ever forgotten.
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

    /// However often a token was there, it is penalised once.
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

/// The index of the largest value, ties to the lowest; NaN and minus infinity never win. `None` when
/// nothing else is there.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = None;
    let mut max = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > max {
            (best, max) = (Some(id as u32), logit);
        }
    }
    best
}

/// The natural logarithm of the probability of each of `logits` [vocabulary], at temperature 1; computed in
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

/// The tokens that may be drawn, with weights that need not sum to 1.
fn candidates(logits: &[f32], max: f64, sampling: &Sampling) -> Vec<(u32, f64)> {
    let temperature = f64::from(sampling.temperature);
    let mut candidates: Vec<(u32, f64)> = logits
        .iter()
        .enumerate()
        .filter(|(_, logit)| **logit > f32::NEG_INFINITY)
        .map(|(id, &logit)| (id as u32, ((f64::from(logit) - max) / temperature).exp()))
        .collect();
    let likeliest_first =
        |a: &(u32, f64), b: &(u32, f64)| -> Ordering { b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)) };
    if sampling.top_k > 0 && sampling.top_k < candidates.len() {
        candidates.select_nth_unstable_by(sampling.top_k - 1, likeliest_first);
        candidates.truncate(sampling.top_k);
    }
    // One order whatever was selected before it, so that a seed draws the same tokens.
    candidates.sort_unstable_by(likeliest_first);
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
        // The likeliest has the weight 1 and is the first, so that it always stays.
        let least = f64::from(sampling.min_p.min(1.0));
        candidates.truncate(candidates.partition_point(|(_, weight)| *weight >= least));
    }
    candidates
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampler(temperature: f32, top_p: f32, top_k: usize, seed: u64) -> Sampler {
        Sampler::new(Sampling {
            temperature,
            top_p,
            top_k,
            seed,
            ..Sampling::default()
        })
    }

    /// How often each of `logits` is drawn in `draws`, as a fraction.
    fn frequencies(mut sampler: Sampler, logits: &[f32], draws: usize) -> Vec<f64> {
        let mut counts = vec![0usize; logits.len()];
        for _ in 0..draws {
            counts[sampler.sample(logits).unwrap() as usize] += 1;
        }
        counts.iter().map(|&n| n as f64 / draws as f64).collect()
    }

    /// Five standard deviations of a binomial frequency: the seed is fixed, so this cannot flake.
    fn close(frequency: f64, probability: f64, draws: usize) -> bool {
        (frequency - probability).abs()
            <= 5.0 * (probability * (1.0 - probability) / draws as f64).sqrt() + 1e-12
    }

    #[test]
    fn greedy_ties_go_to_the_lowest_id() {
        let mut greedy = sampler(0.0, 1.0, 0, 7);
        assert_eq!(greedy.sample(&[1.0, 3.0, 3.0, 2.0]), Ok(1));
        assert_eq!(greedy.sample(&[-0.0, 0.0]), Ok(0));
        assert_eq!(greedy.sample(&[f32::NAN, -5.0, f32::NAN]), Ok(1));
        assert_eq!(greedy.sample(&[f32::NEG_INFINITY, f32::MIN]), Ok(1));
    }

    #[test]
    fn nothing_to_choose_is_an_error() {
        for temperature in [0.0, 1.0] {
            let mut sampler = sampler(temperature, 0.9, 2, 0);
            assert_eq!(sampler.sample(&[]), Err(SampleError::NoLogit(0)));
            let hopeless = [f32::NAN, f32::NEG_INFINITY];
            assert_eq!(sampler.sample(&hopeless), Err(SampleError::NoLogit(2)));
        }
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0f32, 1.0, 2.0, -1.0, f32::NEG_INFINITY, f32::NAN];
        let draws = 40_000;
        for temperature in [0.5, 1.0, 2.0] {
            let seen = frequencies(sampler(temperature, 1.0, 0, 1), &logits, draws);
            let weights: Vec<f64> = logits[..4]
                .iter()
                .map(|&l| f64::from(l / temperature).exp())
                .collect();
            let total: f64 = weights.iter().sum();
            for (seen, weight) in seen.iter().zip(&weights) {
                assert!(
                    close(*seen, weight / total, draws),
                    "{seen} for {}",
                    weight / total
                );
            }
            assert_eq!(seen[4..], [0.0, 0.0]);
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        // Probabilities 0.5, 0.25, 0.125, 0.125.
        let logits = [2f32.ln(), 0.0, -(2f32.ln()), -(2f32.ln())].map(|l| l + 3.0);
        let draws = 20_000;
        let top_2 = frequencies(sampler(1.0, 1.0, 2, 5), &logits, draws);
        assert!(close(top_2[0], 2.0 / 3.0, draws) && close(top_2[1], 1.0 / 3.0, draws));
        assert_eq!(top_2[2..], [0.0, 0.0]);
        // 0.5 + 0.25 is not yet 0.8: the first of the two equal ones still belongs to it.
        let top_p = frequencies(sampler(1.0, 0.8, 0, 5), &logits, draws);
        assert!(close(top_p[2], 0.125 / 0.875, draws));
        assert_eq!(top_p[3], 0.0);
        let smallest = frequencies(sampler(1.0, 1e-9, 0, 5), &logits, 100);
        assert_eq!(smallest, [1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn min_p_cuts_relative_to_the_likeliest() {
        // Probabilities 0.5, 0.25, 0.125, 0.125.
        let logits = [2f32.ln(), 0.0, -(2f32.ln()), -(2f32.ln())].map(|l| l - 7.0);
        let draws = 20_000;
        let seen = |sampling: Sampling| frequencies(Sampler::new(sampling), &logits, draws);
        let sampling = Sampling {
            temperature: 1.0,
            min_p: 0.4,
            ..Sampling::default()
        };
        let cut = seen(sampling);
        assert!(close(cut[0], 2.0 / 3.0, draws) && close(cut[1], 1.0 / 3.0, draws));
        assert_eq!(cut[2..], [0.0, 0.0]);
        // 0.125 is a quarter of 0.5, and stays.
        let all = seen(Sampling {
            min_p: 0.24,
            ..sampling
        });
        assert!(close(all[3], 0.125, draws));
        let only = seen(Sampling {
            min_p: 1.0,
            ..sampling
        });
        assert_eq!(only, [1.0, 0.0, 0.0, 0.0]);
        // At temperature 2 the ratios are roots: 0.125 is half as likely as 0.5.
        let warm = seen(Sampling {
            temperature: 2.0,
            min_p: 0.49,
            ..sampling
        });
        assert!(warm[3] > 0.0);
        // Top-p leaves the first two, and then 0.25 is half as likely as 0.5.
        let both = seen(Sampling {
            top_p: 0.7,
            min_p: 0.51,
            ..sampling
        });
        assert_eq!(both, [1.0, 0.0, 0.0, 0.0]);
    }

    fn penalised(penalty: f32, window: usize) -> Sampler {
        Sampler::new(Sampling {
            repetition_penalty: penalty,
            repetition_window: window,
            ..Sampling::default()
        })
    }

    #[test]
    fn a_penalty_divides_positive_logits_and_multiplies_others() {
        let logits = [3.0f32, 2.0, 1.0, -1.0];
        let mut sampler = penalised(2.0, 0);
        // 3, then 2 against 3 / 2, then 3 / 2 against 2 / 2 and 1: greedy, and each token is penalised once.
        let drawn: Vec<u32> = (0..5).map(|_| sampler.sample(&logits).unwrap()).collect();
        assert_eq!(drawn, [0, 1, 0, 0, 0]);
        let mut sampler = penalised(4.0, 0);
        let drawn: Vec<u32> = (0..4).map(|_| sampler.sample(&logits).unwrap()).collect();
        assert_eq!(drawn, [0, 1, 2, 0]);
        // A negative logit moves away from 0.
        let mut sampler = penalised(2.0, 0);
        sampler.observe(&[0]);
        assert_eq!(sampler.sample(&[-1.0, -1.5]), Ok(1));
        // A penalty below 1 rewards.
        let mut sampler = penalised(0.5, 0);
        sampler.observe(&[1]);
        assert_eq!(sampler.sample(&logits), Ok(1));
    }

    #[test]
    fn a_penalty_scales_probabilities_as_the_definition_says() {
        // ln 4 and ln 2 become ln 2 and ln 1.41: weights 2 and 1.41 beside 1.
        let logits = [4f32.ln(), 2f32.ln(), 0.0];
        let draws = 20_000;
        let mut counts = [0usize; 3];
        let mut sampler = Sampler::new(Sampling {
            temperature: 1.0,
            repetition_penalty: 2.0,
            repetition_window: 0,
            seed: 3,
            ..Sampling::default()
        });
        sampler.observe(&[0, 1, 2, 0]);
        for _ in 0..draws {
            counts[sampler.sample(&logits).unwrap() as usize] += 1;
        }
        let total = 2.0 + 2f64.sqrt() + 1.0;
        for (count, weight) in counts.iter().zip([2.0, 2f64.sqrt(), 1.0]) {
            assert!(close(*count as f64 / draws as f64, weight / total, draws));
        }
    }

    #[test]
    fn a_window_forgets() {
        let logits = [3.0f32, 2.0, 1.0];
        let mut sampler = penalised(10.0, 1);
        // Only the token before is penalised.
        let drawn: Vec<u32> = (0..4).map(|_| sampler.sample(&logits).unwrap()).collect();
        assert_eq!(drawn, [0, 1, 0, 1]);
        let mut sampler = penalised(10.0, 2);
        sampler.observe(&[0, 0, 1, 2]);
        assert_eq!(sampler.sample(&logits), Ok(0));
        // Ids outside the vocabulary have no logit to change.
        sampler.observe(&[u32::MAX]);
        assert!(sampler.sample(&logits).is_ok());
    }

    #[test]
    fn a_penalty_that_makes_infinities_is_safe() {
        for penalty in [f32::MIN_POSITIVE, f32::MAX] {
            for temperature in [0.0, 1.0] {
                let mut sampler = Sampler::new(Sampling {
                    temperature,
                    repetition_penalty: penalty,
                    ..Sampling::default()
                });
                for _ in 0..8 {
                    assert!(sampler.sample(&[1e30, -1e30, 0.0]).is_ok());
                }
            }
        }
    }

    #[test]
    fn a_seed_repeats_and_another_differs() {
        let logits: Vec<f32> = (0..100).map(|i| (i % 7) as f32 * 0.1).collect();
        let draw = |seed| -> Vec<u32> {
            let mut sampler = sampler(1.0, 0.95, 50, seed);
            (0..32).map(|_| sampler.sample(&logits).unwrap()).collect()
        };
        assert_eq!(draw(42), draw(42));
        assert_ne!(draw(42), draw(43));
    }

    #[test]
    fn extreme_temperatures_and_logits_are_safe() {
        let logits = [1.0f32, f32::MAX, f32::MIN];
        assert_eq!(sampler(f32::MIN_POSITIVE, 0.5, 2, 0).sample(&logits), Ok(1));
        assert!(sampler(f32::MAX, 1.0, 0, 0).sample(&logits).is_ok());
        assert_eq!(sampler(1.0, 1.0, 0, 0).sample(&[0.0, f32::INFINITY]), Ok(1));
    }

    #[test]
    fn log_softmax_is_normalised_and_survives_large_logits() {
        let logits = [1000.0f32, 999.0, 998.0, f32::NEG_INFINITY];
        let sum: f64 = (0..4).map(|id| log_softmax_at(&logits, id).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-12);
        assert_eq!(log_softmax_at(&logits, 3), f64::NEG_INFINITY);
    }

    proptest! {
        #[test]
        fn a_drawn_token_is_always_possible_and_among_the_top_k(
            logits in prop::collection::vec(prop_oneof![
                4 => -30f32..30.0, 1 => Just(f32::NAN), 1 => Just(f32::NEG_INFINITY), 1 => Just(5.0)], 1..200),
            temperature in 0f32..3.0,
            top_p in 0.01f32..=1.0,
            top_k in 0usize..20,
            min_p in 0f32..=1.0,
            seed: u64,
        ) {
            let mut sampler = Sampler::new(Sampling { temperature, top_p, top_k, min_p, seed, ..Sampling::default() });
            match sampler.sample(&logits) {
                Ok(id) => {
                    let chosen = logits[id as usize];
                    prop_assert!(chosen > f32::NEG_INFINITY);
                    let better = logits.iter().filter(|l| **l > chosen).count();
                    prop_assert!(top_k == 0 || better < top_k);
                }
                Err(_) => prop_assert!(argmax(&logits).is_none()),
            }
        }
    }
}
