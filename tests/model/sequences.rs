//! Sequences that share a runner: experts and pages that are used once, drafts in one pass, swapping, threads.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use colibri_ring::Options;
use colibri_uring::model::draft::{Drafter, Mode};
use colibri_uring::model::{Logits, ModelError, Runner, RunnerOptions, Sequence, Step, kv_bytes};
use colibri_uring::pool::Pool;
use colibri_uring::runtime::sample::{Sampler, Sampling};
use colibri_uring::stream::Lookahead;
use colibri_uring::stream::slots::Budget;

use crate::fixture::{bits, fixture};
use crate::mixes::World;

/// Experts that a pass has demanded: its union over all layers.
fn demanded(runner: &Runner) -> u64 {
    let stats = runner.store().stats();
    stats.hits + stats.misses
}

#[test]
fn sequences_that_decode_together_read_the_union_of_their_experts_once() {
    let fixture = fixture("f16-long");
    let weights = fixture.model();
    let prompts: Vec<Vec<u32>> = (0..4u32).map(|i| vec![3 + i, 50 + 7 * i, 9]).collect();
    for n in [1, 2, 4] {
        let engine = Options::default();
        let store = fixture.store_of(Budget::SlotsPerLayer(0), Lookahead::Off, engine);
        let mut runner = Runner::new(
            Arc::clone(&weights),
            store,
            Pool::new(2),
            RunnerOptions::default(),
        );
        let mut sequences: Vec<Sequence> = (0..n).map(|_| runner.sequence()).collect();
        let (mut alone, mut alone_read, mut alone_bytes) = (0, 0, 0);
        // Experts read so far, and their bytes.
        let read = |runner: &mut Runner| {
            let bytes = runner.store_mut().read_stats().unwrap().bytes();
            (runner.store().stats().misses, bytes)
        };
        let layers: Vec<usize> = fixture.config.sparse_layers().collect();
        let experts = fixture.config.experts.count as u32;
        let mut union = BTreeSet::new();
        for (sequence, prompt) in sequences.iter_mut().zip(&prompts) {
            runner.prefill(sequence, prompt).unwrap();
            // What the next token uses when it is decoded alone.
            let counts = |runner: &Runner| -> Vec<f32> {
                let usage = runner.store().usage();
                let keys = layers.iter().flat_map(|l| (0..experts).map(|e| (*l, e)));
                keys.map(|(layer, expert)| usage.count(layer, expert))
                    .collect()
            };
            let (before, demands) = (counts(&runner), demanded(&runner));
            let (reads, bytes) = read(&mut runner);
            runner.decode(sequence, 11).unwrap();
            alone += demanded(&runner) - demands;
            let (reads_after, bytes_after) = read(&mut runner);
            alone_read += reads_after - reads;
            alone_bytes += bytes_after - bytes;
            let after = counts(&runner);
            // Counts only fall by age.
            let used = before
                .iter()
                .zip(&after)
                .enumerate()
                .filter(|(_, (b, a))| a > b);
            union.extend(used.map(|(key, _)| key));
            sequence.truncate(prompt.len());
        }
        let before = demanded(&runner);
        let (reads, bytes) = read(&mut runner);
        let mut steps: Vec<Step> = (sequences.iter_mut())
            .map(|sequence| Step {
                sequence,
                ids: &[11],
                logits: Logits::Last,
            })
            .collect();
        runner.forward(&mut steps).unwrap();
        let together = demanded(&runner) - before;
        assert_eq!(together, union.len() as u64, "{n} sequences");
        assert!(n == 1 || together < alone, "{together} of {alone}");
        // A slab or two may still hold an expert of the pass before; the others are read, each once.
        let (reads_after, bytes_after) = read(&mut runner);
        assert!(together - (reads_after - reads) <= 2);
        // Experts have the same size but for their alignment.
        let share = (reads_after - reads) as f64 / alone_read as f64;
        let of_bytes = (bytes_after - bytes) as f64 / alone_bytes as f64;
        assert!(
            (of_bytes - share).abs() < 0.05,
            "{of_bytes} of the bytes, {share} of the experts"
        );
    }
}

#[test]
fn equal_prompts_compute_their_common_beginning_once() {
    for (name, drafting) in [
        ("f16-long", false),
        ("qwen3-bf16", false),
        ("mtp-agrees", true),
    ] {
        let world = World::new(name, drafting);
        let vocab = world.fixture.config.vocab_size;
        let mut prompt: Vec<u32> = (0..150).map(|i| (i * i % 83 % vocab) as u32).collect();
        prompt.push(5);
        let pool = Pool::new(2);
        let options = RunnerOptions::default();
        let mut runner = Runner::new(world.weights, world.fixture.store(), pool, options);
        let mut first = runner.sequence();
        assert_eq!(runner.match_prefix(&mut first, &prompt).unwrap(), 0);
        let expected = bits(runner.prefill(&mut first, &prompt).unwrap());
        runner.publish(&mut first).unwrap();
        let pages = runner.free_pages();
        for i in 0..15 {
            let mut sequence = runner.sequence();
            let before = runner.stats().tokens;
            let reused = runner.match_prefix(&mut sequence, &prompt).unwrap();
            let logits = bits(runner.prefill(&mut sequence, &prompt[reused..]).unwrap());
            assert!(logits == expected, "{name} {i}");
            let computed = runner.stats().tokens - before;
            assert!(computed <= 2, "{name} {i}: {computed} tokens");
        }
        // Each had a copy of the last page, and only while it lived.
        assert_eq!(runner.free_pages(), pages);
    }
}

#[test]
fn a_runner_moves_between_threads_in_the_middle_of_a_text() {
    let world = World::new("mixed-mtp", true);
    let text = &world.texts[0];
    let options = RunnerOptions::default();
    let mut runner = Runner::new(
        Arc::clone(&world.weights),
        world.fixture.store(),
        Pool::new(2),
        options,
    );
    let mut sequence = runner.sequence();
    for (at, id) in text.ids.iter().enumerate().take(8) {
        (runner, sequence) = std::thread::scope(|scope| {
            let decoded = scope.spawn(move || {
                let logits = bits(runner.decode(&mut sequence, *id).unwrap());
                (runner, sequence, logits)
            });
            let (runner, sequence, logits) = decoded.join().unwrap();
            assert!(logits == text.logits[at]);
            (runner, sequence)
        });
    }
}

/// Each with a drafter and a sampler: the texts are those of plain decoding, alone.
#[test]
fn sequences_draft_in_one_pass() {
    const TOKENS: usize = 24;
    let world = World::new("mtp-agrees", true);
    let new = || {
        let (weights, options) = (Arc::clone(&world.weights), RunnerOptions::default());
        Runner::new(weights, world.fixture.store(), Pool::new(2), options)
    };
    let sampler = |seed| {
        Sampler::new(Sampling {
            temperature: if seed == 0 { 0.0 } else { 1.2 },
            seed,
            ..Sampling::default()
        })
    };
    let prompts: Vec<&[u32]> = world.texts[..5].iter().map(|text| &text.ids[..]).collect();
    let alone = prompts.iter().zip(0..).map(|(prompt, seed)| {
        let (mut runner, mut sampler, mut tokens) = (new(), sampler(seed), Vec::new());
        let mut sequence = runner.sequence();
        let mut next = sampler
            .sample(runner.prefill(&mut sequence, prompt).unwrap())
            .unwrap();
        while tokens.len() < TOKENS {
            tokens.push(next);
            next = sampler
                .sample(runner.decode(&mut sequence, next).unwrap())
                .unwrap();
        }
        tokens
    });
    let alone: Vec<Vec<u32>> = alone.collect();

    struct Drafting {
        sequence: Sequence,
        drafter: Drafter,
        sampler: Sampler,
        tokens: Vec<u32>,
    }
    let mut runner = new();
    let mut all: Vec<Drafting> = Vec::new();
    for (prompt, seed) in prompts.iter().zip(0..) {
        let (mut sequence, mut sampler) = (runner.sequence(), sampler(seed));
        let first = sampler
            .sample(runner.prefill(&mut sequence, prompt).unwrap())
            .unwrap();
        let mode = [Mode::Drafts(3), Mode::Auto, Mode::Off, Mode::Drafts(1)][seed as usize % 4];
        all.push(Drafting {
            drafter: Drafter::new(&sequence, mode, prompt.len() + TOKENS),
            tokens: vec![first],
            sequence,
            sampler,
        });
    }
    let mut passes = 0;
    while all.iter().any(|one| one.tokens.len() < TOKENS) {
        let mut runs = Vec::new();
        for one in &mut all {
            let id = one.tokens[one.tokens.len() - 1];
            one.drafter.settle(&mut one.sequence);
            let depth = one.drafter.depth(one.sequence.len() + 1);
            let drafts = runner.draft(&mut one.sequence, id, depth).unwrap();
            runs.push([vec![id], drafts].concat());
        }
        let steps = all.iter_mut().zip(&runs);
        let mut steps: Vec<Step> = steps
            .map(|(one, ids)| Step {
                sequence: &mut one.sequence,
                ids,
                logits: Logits::All,
            })
            .collect();
        let logits = runner.forward(&mut steps).unwrap();
        for (step, (one, run)) in all.iter_mut().zip(&runs).enumerate() {
            let len = one.sequence.len() - (run.len() - 1);
            one.drafter
                .verify(run[1..].to_vec(), len, Duration::from_millis(1));
            let mut row = Some(0);
            while let Some(at) = row {
                let next = one.sampler.sample(logits.row(step, at)).unwrap();
                one.tokens.push(next);
                row = one.drafter.accept(next);
            }
        }
        passes += 1;
    }
    assert!(passes < TOKENS + 1);
    for (one, expected) in all.into_iter().zip(&alone) {
        assert_eq!(one.tokens[..TOKENS], expected[..]);
        let mut sequence = one.sequence;
        let stats = one.drafter.finish(&mut sequence);
        assert!(stats.accepted <= stats.drafted);
    }
}

#[test]
fn drafts_survive_sharing_and_swapping() {
    for name in ["mtp-agrees", "mixed-mtp", "mtp-share", "mtp-container"] {
        let world = World::new(name, true);
        let vocab = world.fixture.config.vocab_size;
        let ids: Vec<u32> = (0..150).map(|i| (i * i % 83 % vocab) as u32).collect();
        let runner = || {
            let (weights, options) = (Arc::clone(&world.weights), RunnerOptions::default());
            Runner::new(weights, world.fixture.store(), Pool::new(2), options)
        };
        let mut solo = runner();
        let mut straight = solo.sequence();
        solo.prefill(&mut straight, &ids).unwrap();
        let expected = solo.draft(&mut straight, 9, 4).unwrap();
        assert_eq!(expected.len(), 4);
        let mut runner = runner();
        let mut first = runner.sequence();
        runner.prefill(&mut first, &ids).unwrap();
        runner.publish(&mut first).unwrap();
        let mut second = runner.sequence();
        let reused = runner.match_prefix(&mut second, &ids).unwrap();
        assert!(reused >= 148, "{name}: {reused}");
        runner.prefill(&mut second, &ids[reused..]).unwrap();
        for sequence in [&mut second, &mut first] {
            for swapped in [false, true, true] {
                if swapped {
                    runner.swap_out(sequence).unwrap();
                    runner.swap_in(sequence).unwrap();
                }
                let drafts = runner.draft(sequence, 9, 4).unwrap();
                assert_eq!(drafts, expected, "{name}");
            }
            let before = runner.stats().tokens;
            runner.decode(sequence, 9).unwrap();
            assert_eq!(runner.stats().tokens, before + 1);
        }
    }
}

#[test]
fn pages_are_what_the_plan_says() {
    for (name, drafting) in [
        ("f16-long", false),
        ("qwen3-bf16", false),
        ("mtp-container", true),
    ] {
        let world = World::new(name, drafting);
        let (pool, options) = (Pool::new(2), RunnerOptions::default());
        let store = world.fixture.store();
        let mut runner = Runner::new(Arc::clone(&world.weights), store, pool, options);
        let planned = |tokens| kv_bytes(&world.fixture.config, true, tokens);
        let ids: Vec<u32> = (0..130).map(|i| i % 61).collect();
        let [mut one, mut other] = [runner.sequence(), runner.sequence()];
        runner.prefill(&mut one, &ids).unwrap();
        runner.prefill(&mut other, &ids[1..71]).unwrap();
        for sequence in [&mut one, &mut other] {
            runner.settle_drafts(sequence).unwrap();
        }
        assert_eq!(
            runner.stats().kv_bytes,
            planned(130) + planned(70),
            "{name}"
        );
        // A shared page is stored once.
        let mut third = runner.sequence();
        assert!(runner.match_prefix(&mut third, &ids).unwrap() >= 127);
        assert_eq!(
            runner.stats().kv_bytes,
            planned(130) + planned(70),
            "{name}"
        );
    }
}

#[test]
fn a_full_disk_is_an_error_of_one_sequence() {
    let world = World::new("f32-smallest", false);
    let options = RunnerOptions {
        swap_dir: Some("/dev/null/no-such-directory".into()),
        ..RunnerOptions::default()
    };
    let store = world.fixture.store();
    let mut runner = Runner::new(Arc::clone(&world.weights), store, Pool::new(1), options);
    let text = &world.texts[0];
    let mut sequence = runner.sequence();
    runner.prefill(&mut sequence, &text.ids[..1]).unwrap();
    let error = runner.swap_out(&mut sequence).unwrap_err();
    assert!(
        error.to_string().contains("/dev/null/no-such-directory"),
        "{error}"
    );
    let logits = bits(runner.decode(&mut sequence, text.ids[1]).unwrap());
    assert!(logits == text.logits[1]);
}

#[test]
fn a_sequence_is_of_one_runner() {
    let world = World::new("f32-smallest", false);
    let runner = || {
        let (weights, options) = (Arc::clone(&world.weights), RunnerOptions::default());
        Runner::new(weights, world.fixture.store(), Pool::new(1), options)
    };
    let (mut one, mut other) = (runner(), runner());
    let mut sequence = one.sequence();
    let error = other.decode(&mut sequence, 1).unwrap_err();
    assert!(matches!(error, ModelError::ForeignSequence), "{error}");
    one.decode(&mut sequence, 1).unwrap();
}
