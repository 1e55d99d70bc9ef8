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
fn an_infinite_logit_wins_nothing() {
    for temperature in [0.0, 1.0] {
        let mut sampler = sampler(temperature, 0.9, 2, 0);
        let logits = [0.0, f32::INFINITY, f32::NAN];
        assert_eq!(sampler.sample(&logits), Err(SampleError::Infinite(1)));
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
