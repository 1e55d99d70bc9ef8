//! Drafts against the reference, and that nothing but speed depends on them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use colibri_uring::model::draft::{Drafter, Mode};
use colibri_uring::model::{
    LoadOptions, ModelError, RunnerOptions, Sparsity, Weights, kv_bytes, prediction, resident_bytes,
};
use colibri_uring::pool::Pool;
use colibri_uring::runtime::generate::{Finish, Generation, SequenceFeed, Source};
use colibri_uring::runtime::sample::{Sampler, Sampling, argmax};
use colibri_uring::stream::Lookahead;

use crate::common::Saved;
use crate::fixture::{Fixture, Solo, bits, fixture, fixtures};

/// The fixtures with a prediction layer, which is used.
fn drafting() -> Vec<Fixture> {
    let mut fixtures = fixtures();
    fixtures.retain(|fixture| fixture.expected.get("mtp").is_some());
    fixtures.into_iter().map(Fixture::drafting).collect()
}

/// The same fixture as if it had no prediction layer.
fn plain(fixture: &Fixture) -> Fixture {
    let plain = Fixture::open(Saved::at(&fixture.home()));
    assert!(plain.config.prediction.is_none());
    plain
}

fn solo(fixture: &Fixture, model: &Arc<Weights>, pool: &Arc<Pool>) -> Solo {
    let options = RunnerOptions::default();
    Solo::new(model, fixture.store(), pool, options)
}

/// A sequence of `ids`.
fn with(fixture: &Fixture, model: &Arc<Weights>, pool: &Arc<Pool>, ids: &[u32]) -> Solo {
    let mut solo = solo(fixture, model, pool);
    solo.prefill(ids).unwrap();
    solo
}

#[test]
fn drafts_equal_the_reference() {
    let pool = Arc::new(Pool::new(2));
    for fixture in drafting() {
        let model = fixture.model();
        let ids = [fixture.ids("/prompt_ids"), fixture.ids("/token_ids")].concat();
        let first = fixture.ids("/mtp/first");
        // One token at a time.
        let mut solo = with(&fixture, &model, &pool, &ids[..1]);
        for (t, expected) in first.iter().enumerate() {
            let draft = solo.draft(ids[t + 1], 1).unwrap();
            assert_eq!(draft, [*expected], "{} at {t}", fixture.name);
            solo.decode(ids[t + 1]).unwrap();
        }
        // The prompt at once, and chains of drafts.
        let prompt = fixture.ids("/prompt_ids").len();
        let mut solo = with(&fixture, &model, &pool, &ids[..prompt]);
        for (t, id) in ids.iter().enumerate().skip(prompt) {
            let expected = fixture.ids(&format!("/mtp/drafts/{}", t - prompt));
            for n in [1, 2, 4] {
                let drafts = solo.draft(*id, n).unwrap();
                assert_eq!(drafts, expected[..n], "{} at {t}", fixture.name);
            }
            solo.decode(*id).unwrap();
        }
    }
}

#[test]
fn greedy_tokens_and_logits_are_those_without_drafts() {
    let pool = Arc::new(Pool::new(2));
    for fixture in drafting() {
        let without = plain(&fixture);
        let (prompt, tokens) = (fixture.ids("/prompt_ids"), fixture.ids("/token_ids"));
        let (model, plain_model) = (fixture.model(), without.model());
        let mut plain = solo(&without, &plain_model, &pool);
        let mut expected = vec![bits(plain.prefill(&prompt).unwrap())];
        let logits = tokens.iter().map(|id| bits(plain.decode(*id).unwrap()));
        expected.extend(logits);
        for n in [1, 2, 4] {
            let mut solo = solo(&fixture, &model, &pool);
            let limit = prompt.len() + tokens.len();
            let mut drafter = Drafter::new(&solo, Mode::Drafts(n), limit);
            let mut logits = drafter
                .feed(&mut solo.runner, &mut solo.sequence, &prompt)
                .unwrap()
                .to_vec();
            for (i, id) in tokens.iter().enumerate() {
                assert!(bits(&logits) == expected[i], "{} {n} at {i}", fixture.name);
                assert_eq!(argmax(&logits), Some(*id));
                logits = drafter
                    .feed(&mut solo.runner, &mut solo.sequence, &[*id])
                    .unwrap()
                    .to_vec();
            }
            assert!(Some(&bits(&logits)) == expected.last());
            let stats = drafter.finish(&mut solo);
            assert_eq!(solo.len(), limit);
            assert!(stats.drafted > 0 && stats.accepted <= stats.drafted);
            assert_eq!(stats.forwards + stats.accepted, tokens.len() as u64);
            if fixture.name == "mtp-agrees" {
                let each = stats.tokens_per_forward();
                println!("{n} drafts: {each:.2} tokens a pass");
                assert!(each > 1.5, "{each}");
            }
            // What was drafted has left no trace in the cache of the prediction layer.
            let ids = [&prompt[..], &tokens].concat();
            let next = argmax(&logits).unwrap();
            let mut straight = with(&fixture, &model, &pool, &ids);
            let drafts = straight.draft(next, 8).unwrap();
            assert_eq!(solo.draft(next, 8).unwrap(), drafts);
            let sparse = matches!(model.sparsity(), Sparsity::Active(_));
            let planned = kv_bytes(&fixture.config, sparse, ids.len());
            assert!(solo.runner.stats().kv_bytes <= planned);
            let resident = resident_bytes(&fixture.shards, &fixture.config, None);
            assert!(model.resident_bytes() <= resident);
        }
    }
}

#[test]
fn drafts_do_not_depend_on_how_the_work_is_cut() {
    for fixture in drafting() {
        let model = fixture.model();
        let ids = fixture.ids("/score/ids");
        let (next, ids) = ids.split_last().unwrap();
        let run = |threads, scratch_bytes, lookahead, cut: usize| {
            let pool = Arc::new(Pool::new(threads));
            let options = RunnerOptions {
                scratch_bytes,
                ..RunnerOptions::default()
            };
            let mut solo = Solo::new(&model, fixture.store_with(lookahead), &pool, options);
            for ids in ids.chunks(cut) {
                solo.prefill(ids).unwrap();
            }
            solo.draft(*next, 6).unwrap()
        };
        let expected = run(1, 16 << 20, Lookahead::Auto, usize::MAX);
        assert_eq!(expected.len(), 6);
        for (threads, scratch_bytes, lookahead, cut) in [
            (2, 16 << 20, Lookahead::Off, 1),
            (2, 0, Lookahead::Experts(4), 7),
            (1, 100_000, Lookahead::Experts(2), 3),
        ] {
            let drafts = run(threads, scratch_bytes, lookahead, cut);
            assert_eq!(drafts, expected, "{} cut {cut}", fixture.name);
        }
    }
}

/// A context that is cut anywhere, and goes on otherwise, drafts what a new one does.
#[test]
fn a_context_that_was_cut_drafts_the_same() {
    let pool = Arc::new(Pool::new(2));
    for fixture in drafting() {
        let model = fixture.model();
        let ids = fixture.ids("/score/ids");
        for keep in [1, 2, 9, ids.len() - 1] {
            for drafted in [false, true] {
                let mut solo = with(&fixture, &model, &pool, &ids);
                if drafted {
                    solo.speculate(5, 3).unwrap();
                }
                solo.truncate(keep);
                solo.prefill(&[7, 8]).unwrap();
                solo.draft(11, 2).unwrap();
                // Not what it was told would follow.
                solo.decode(12).unwrap();
                let context = [&ids[..keep], &[7, 8, 12]].concat();
                assert_eq!(solo.ids(), context);
                let mut straight = with(&fixture, &model, &pool, &context);
                let expected = straight.draft(4, 4).unwrap();
                assert_eq!(solo.draft(4, 4).unwrap(), expected, "{}", fixture.name);
                let logits = bits(straight.decode(4).unwrap());
                assert!(bits(solo.decode(4).unwrap()) == logits);
            }
        }
        let mut solo = solo(&fixture, &model, &pool);
        assert!(solo.draft(3, 4).unwrap().is_empty(), "nothing before it");
    }
}

/// More tokens than the prediction layer may be behind, one at a time and without drafts.
#[test]
fn a_long_time_without_drafts_is_caught_up_with() {
    let pool = Arc::new(Pool::new(2));
    let fixture = fixture("mtp-agrees").drafting();
    let model = fixture.model();
    let ids: Vec<u32> = (0..600).map(|i| 3 + i * 7 % 90).collect();
    let mut solo = with(&fixture, &model, &pool, &ids[..1]);
    for id in &ids[1..] {
        solo.decode(*id).unwrap();
    }
    let mut straight = with(&fixture, &model, &pool, &ids);
    let expected = straight.draft(4, 4).unwrap();
    solo.settle_drafts().unwrap();
    assert_eq!(solo.draft(4, 4).unwrap(), expected);
}

#[test]
fn an_interrupt_leaves_the_context_as_it_was() {
    let pool = Arc::new(Pool::new(1));
    for fixture in drafting() {
        let model = fixture.model();
        let prompt = fixture.ids("/prompt_ids");
        let stop = Arc::new(AtomicBool::new(false));
        let options = RunnerOptions {
            stop: Some(Arc::clone(&stop)),
            ..RunnerOptions::default()
        };
        let mut solo = Solo::new(&model, fixture.store(), &pool, options);
        let mut drafter = Drafter::new(&solo, Mode::Drafts(3), usize::MAX);
        drafter
            .feed(&mut solo.runner, &mut solo.sequence, &prompt)
            .unwrap();
        stop.store(true, Ordering::Relaxed);
        assert!(matches!(
            drafter.feed(&mut solo.runner, &mut solo.sequence, &[4]),
            Err(ModelError::Stopped)
        ));
        assert_eq!(solo.len(), prompt.len());
        stop.store(false, Ordering::Relaxed);
        let again = bits(
            drafter
                .feed(&mut solo.runner, &mut solo.sequence, &[4])
                .unwrap(),
        );
        drafter.finish(&mut solo);
        let ids = [&prompt[..], &[4]].concat();
        assert_eq!(solo.ids(), ids);
        let mut straight = self::solo(&fixture, &model, &pool);
        assert!(bits(straight.prefill(&ids).unwrap()) == again);
        assert_eq!(solo.draft(9, 4).unwrap(), straight.draft(9, 4).unwrap());
    }
}

/// The first two tokens of many texts are distributed as the model says, although most second tokens are drafts.
#[test]
fn sampled_tokens_have_the_models_distribution() {
    const TEXTS: usize = 1500;
    let pool = Arc::new(Pool::new(2));
    let fixture = fixture("mtp-agrees").drafting();
    let model = fixture.model();
    let prompt = fixture.ids("/prompt_ids");
    // Warm enough that drafts come true about half of the time.
    let sampling = Sampling {
        temperature: 3.0,
        seed: 9,
        ..Sampling::default()
    };
    let probabilities = |logits: &[f32]| -> Vec<f64> {
        let weights = logits
            .iter()
            .map(|l| (f64::from(*l) / f64::from(sampling.temperature)).exp());
        let weights: Vec<f64> = weights.collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|w| w / sum).collect()
    };
    let mut plain = solo(&fixture, &model, &pool);
    let first = probabilities(plain.prefill(&prompt).unwrap());
    let vocabulary = first.len();
    // Of the second token, whatever the first one is.
    let mut second = vec![0.0; vocabulary];
    for (id, p) in first.iter().enumerate() {
        let after = probabilities(plain.decode(id as u32).unwrap());
        plain.truncate(prompt.len());
        second.iter_mut().zip(after).for_each(|(s, q)| *s += p * q);
    }
    let mut solo = solo(&fixture, &model, &pool);
    solo.prefill(&prompt).unwrap();
    let start = solo.runner.logits().to_vec();
    let mut sampler = Sampler::new(sampling);
    let (mut counts, mut drafted, mut accepted) = (vec![0.0; vocabulary], 0, 0);
    for _ in 0..TEXTS {
        let mut drafter = Drafter::new(&solo, Mode::Drafts(2), usize::MAX);
        let id = sampler.sample(&start).unwrap();
        let logits = drafter
            .feed(&mut solo.runner, &mut solo.sequence, &[id])
            .unwrap();
        let next = sampler.sample(logits).unwrap();
        drafter
            .feed(&mut solo.runner, &mut solo.sequence, &[next])
            .unwrap();
        let stats = drafter.finish(&mut solo);
        (drafted, accepted) = (drafted + stats.drafted, accepted + stats.accepted);
        counts[next as usize] += 1.0;
        solo.truncate(prompt.len());
    }
    println!("{accepted} of {drafted} drafts came true");
    assert!(accepted > TEXTS as u64 / 4 && accepted < TEXTS as u64 * 3 / 4);
    // Rare tokens together are one cell.
    let (mut chi, mut cells, mut rest) = (0.0, 0, (0.0, 0.0));
    let mut add = |count: f64, expected: f64| {
        chi += (count - expected).powi(2) / expected;
        cells += 1;
    };
    for (count, p) in counts.iter().zip(&second) {
        let expected = p * TEXTS as f64;
        match expected < 8.0 {
            true => rest = (rest.0 + count, rest.1 + expected),
            false => add(*count, expected),
        }
    }
    add(rest.0, rest.1);
    let free = f64::from(cells - 1);
    println!("chi squared is {chi:.1} with {free} degrees of freedom");
    // Three standard deviations.
    assert!(cells > 5 && chi < free + 3.0 * (2.0 * free).sqrt());
}

/// Any mode, any seed, any length: the text is that of plain decoding.
#[test]
fn a_seed_draws_the_same_text() {
    let pool = Arc::new(Pool::new(2));
    for name in ["mtp-agrees", "mixed-mtp"] {
        let fixture = fixture(name).drafting();
        let model = fixture.model();
        let prompt = fixture.ids("/prompt_ids");
        let text = |mode: Mode, seed: u64, max: usize| {
            let mut solo = solo(&fixture, &model, &pool);
            let limit = prompt.len() + max - 1;
            let source = Source::Sample {
                sampler: Box::new(Sampler::new(Sampling {
                    temperature: 1.5,
                    seed,
                    ..Sampling::default()
                })),
                max,
                stop: vec![50, 60],
            };
            let feed = SequenceFeed {
                drafter: Drafter::new(&solo, mode, limit),
                runner: &mut solo.runner,
                sequence: &mut solo.sequence,
            };
            let mut generation = Generation::new(feed, &prompt, source);
            assert!(generation.by_ref().all(|token| token.is_ok()));
            let (generated, feed) = generation.finish();
            feed.finish();
            // The last token has not been fed.
            let fed = prompt.len() + generated.ids.len() - 1;
            assert_eq!(solo.len(), fed);
            assert!(solo.runner.stats().kv_bytes <= kv_bytes(&fixture.config, true, limit.max(1)));
            (generated.ids, generated.finish)
        };
        let mut stopped = 0;
        for seed in 0..6 {
            for max in [1, 2, 5, 40] {
                let expected = text(Mode::Off, seed, max);
                stopped += usize::from(expected.1 == Finish::Stop);
                for mode in [Mode::Drafts(1), Mode::Drafts(4), Mode::Auto] {
                    assert_eq!(text(mode, seed, max), expected, "{name} {mode:?} {seed}");
                }
            }
        }
        assert!(stopped > 0, "{name}");
    }
}

#[test]
fn what_is_missing_is_said() {
    let fixture = fixture("bf16-shared");
    let error = prediction(&fixture.shards, &fixture.config).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the model has no layer for multi-token prediction: tensor model.layers.5.eh_proj.weight is missing"
    );
    let drafting = drafting().remove(0);
    let mut config = plain(&drafting).config;
    config.experts.count += 1;
    let error = prediction(&drafting.shards, &config).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("is not complete: ") && error.contains(".safetensors: tensor "),
        "{error}"
    );
    // Without being asked for, it is not loaded.
    let plain = plain(&drafting);
    let options = LoadOptions::default();
    let model = plain.model_with(options);
    assert!(!model.can_draft());
    assert!(model.resident_bytes() < drafting.model().resident_bytes());
}
