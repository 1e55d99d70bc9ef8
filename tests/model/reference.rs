//! The model against the reference: greedy tokens, the argmax at every position and the last logits of every
//! fixture, and the invariants that the logits are bit-identical for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use colibri_uring::model::{
    LoadOptions, ModelError, Progress, RunnerOptions, Sparsity, Weights, kv_bytes, resident_bytes,
};
use colibri_uring::pool::Pool;
use colibri_uring::stream::Lookahead;

use crate::fixture::{Fixture, Solo, fixtures};

fn argmax(logits: &[f32]) -> u32 {
    let better = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, better) as u32
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .fold(0.0, |max, (a, b)| (a - b).abs().max(max))
}

#[test]
fn greedy_tokens_equal_the_reference() {
    let pool = Arc::new(Pool::new(2));
    for fixture in fixtures() {
        let (model, store) = (fixture.model(), fixture.store());
        let options = RunnerOptions::default();
        let mut solo = Solo::new(&model, store, &pool, options);
        let expected = fixture.ids("/token_ids");
        let mut tokens = Vec::new();
        let mut id = argmax(solo.prefill(&fixture.ids("/prompt_ids")).unwrap());
        while tokens.len() < expected.len() {
            tokens.push(id);
            if tokens.len() < expected.len() {
                assert!(
                    !fixture.config.eos_token_ids.contains(&id),
                    "{}",
                    fixture.name
                );
            }
            id = argmax(solo.decode(id).unwrap());
        }
        assert_eq!(tokens, expected, "{}", fixture.name);
    }
}

/// Compares a score with the record `expected` of the fixture; the largest error of the last logits.
fn check_score(fixture: &Fixture, model: &Arc<Weights>, expected: &str) -> f32 {
    let pool = Arc::new(Pool::new(2));
    let options = RunnerOptions::default();
    let mut solo = Solo::new(model, fixture.store(), &pool, options);
    let ids = fixture.ids("/score/ids");
    let (mut best, mut last, mut logprobs) = (Vec::new(), Vec::new(), Vec::new());
    let each = |i: usize, logits: &[f32]| {
        best.push(argmax(logits));
        last = logits.to_vec();
        if let Some(next) = ids.get(i + 1) {
            let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
            logprobs.push((f64::from(logits[*next as usize]) - sum.ln()) as f32);
        }
    };
    solo.score(&ids, each).unwrap();
    let name = &fixture.name;
    assert_eq!(best, fixture.ids(&format!("/{expected}/argmax")), "{name}");
    if !logprobs.is_empty() {
        let nll = -logprobs.iter().sum::<f32>() / logprobs.len() as f32;
        let expected = fixture.expected[expected]["nll"].as_f64().unwrap() as f32;
        assert!(
            (nll - expected).abs() < 1e-3,
            "{name}: nll {nll}, not {expected}"
        );
    }
    let error = difference(&last, &fixture.floats(&format!("/{expected}/last_logits")));
    assert!(error < 1e-3, "{name}: logits differ by {error}");
    let sparse = matches!(model.sparsity(), Sparsity::Active(_));
    let planned = kv_bytes(model.config(), sparse, ids.len());
    assert_eq!(solo.runner.stats().kv_bytes, planned);
    assert!(model.resident_bytes() <= resident_bytes(&fixture.shards, &fixture.config, None));
    error
}

#[test]
fn scores_equal_the_reference() {
    for fixture in fixtures() {
        if fixture.expected.get("score").is_none() {
            continue;
        }
        let error = check_score(&fixture, &fixture.model(), "score");
        println!("{}: largest logit error {error:e}", fixture.name);
        if fixture.expected.get("dense_score").is_some() {
            let options = LoadOptions {
                dsa: false,
                ..LoadOptions::default()
            };
            let model = fixture.model_with(options);
            assert_eq!(model.sparsity(), Sparsity::Off);
            let error = check_score(&fixture, &model, "dense_score");
            println!(
                "{}: largest logit error without DSA {error:e}",
                fixture.name
            );
        }
    }
}

#[test]
fn a_stop_forgets_only_what_was_interrupted() {
    let pool = Arc::new(Pool::new(1));
    let fixture = fixtures().remove(0);
    let model = fixture.model();
    let stop = Arc::new(AtomicBool::new(false));
    let options = RunnerOptions {
        stop: Some(Arc::clone(&stop)),
        ..RunnerOptions::default()
    };
    let mut solo = Solo::new(&model, fixture.store(), &pool, options);
    solo.prefill(&[1, 2, 3]).unwrap();
    stop.store(true, Ordering::Relaxed);
    assert!(matches!(solo.decode(4), Err(ModelError::Stopped)));
    assert_eq!(solo.len(), 3);
    stop.store(false, Ordering::Relaxed);
    let again = solo.decode(4).unwrap().to_vec();
    let mut straight = Solo::new(&model, fixture.store(), &pool, RunnerOptions::default());
    assert!(straight.prefill(&[1, 2, 3, 4]).unwrap() == again);
}

/// A long prompt reports progress: in every layer, in its attention and at every expert.
#[test]
fn a_prompt_says_how_far_it_is() {
    let pool = Arc::new(Pool::new(1));
    for fixture in fixtures() {
        let model = fixture.model();
        let ids = fixture.ids("/score/ids");
        for slice in [usize::MAX, 3] {
            let options = RunnerOptions {
                slice,
                ..RunnerOptions::default()
            };
            let mut solo = Solo::new(&model, fixture.store(), &pool, options);
            let (send, told) = channel();
            solo.runner
                .observe(move |progress| send.send(progress).unwrap());
            solo.prefill(&ids).unwrap();
            let all: Vec<Progress> = told.try_iter().collect();
            let least = 2 * fixture.config.num_hidden_layers();
            assert!(all.len() >= least, "{}: {}", fixture.name, all.len());
            assert!(all.is_sorted_by(|a, b| a.done <= b.done && a.all == b.all));
            let end = all[all.len() - 1];
            assert_eq!(end.done, end.all, "{}", fixture.name);
            solo.decode(ids[0]).unwrap();
            assert_eq!(told.try_iter().count(), 0, "a token is no prompt");
        }
    }
}

#[test]
fn ids_are_checked() {
    let pool = Arc::new(Pool::new(1));
    let fixture = fixtures().remove(0);
    let model = fixture.model();
    let mut solo = Solo::new(&model, fixture.store(), &pool, RunnerOptions::default());
    let beyond = model.config().vocab_size as u32;
    let error = solo.prefill(&[0, beyond]).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "token id {beyond} is outside the vocabulary (0 to {})",
            beyond - 1
        )
    );
    assert!(matches!(solo.prefill(&[]), Err(ModelError::NoTokens)));
    assert!(solo.is_empty());
}

#[test]
fn logits_are_bit_identical_however_the_work_is_cut() {
    for fixture in fixtures() {
        let model = fixture.model();
        let ids = fixture.ids("/score/ids");
        let run = |threads, scratch_bytes, lookahead, cut: usize| {
            let pool = Arc::new(Pool::new(threads));
            let options = RunnerOptions {
                scratch_bytes,
                ..RunnerOptions::default()
            };
            let mut solo = Solo::new(&model, fixture.store_with(lookahead), &pool, options);
            let mut bits = Vec::new();
            for ids in ids.chunks(cut) {
                let take = |_, logits: &[f32]| bits.extend(logits.iter().map(|x| x.to_bits()));
                solo.score(ids, take).unwrap();
            }
            bits
        };
        let reference = run(1, 16 << 20, Lookahead::Auto, usize::MAX);
        for (threads, scratch_bytes, lookahead, cut) in [
            (2, 16 << 20, Lookahead::Off, 1),
            (2, 0, Lookahead::Experts(4), 7),
            (3, 20_000, Lookahead::Experts(1), usize::MAX),
            (1, 100_000, Lookahead::Experts(2), 3),
        ] {
            assert!(
                run(threads, scratch_bytes, lookahead, cut) == reference,
                "{}: {threads} threads, {scratch_bytes} bytes, cut {cut}",
                fixture.name
            );
        }
    }
}

#[test]
fn truncated_tokens_leave_no_trace() {
    let pool = Arc::new(Pool::new(2));
    for fixture in fixtures() {
        let model = fixture.model();
        let ids = fixture.ids("/score/ids");
        let new = || {
            let options = RunnerOptions::default();
            Solo::new(&model, fixture.store(), &pool, options)
        };
        let keep = ids.len() / 2;
        let mut straight = new();
        let expected = straight.prefill(&ids).unwrap();
        let mut solo = new();
        solo.prefill(&ids).unwrap();
        solo.truncate(keep);
        solo.prefill(&[1, 2, 3]).unwrap();
        solo.truncate(keep);
        assert_eq!(solo.len(), keep);
        let logits = solo.prefill(&ids[keep..]).unwrap();
        assert!(logits == expected, "{}", fixture.name);
    }
}
