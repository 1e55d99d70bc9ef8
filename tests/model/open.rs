//! Models opened as a library user opens them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use colibri_uring::runtime::plan::PlanError;
use colibri_uring::{
    LoadProgress, LoadStage, Logits, Model, ModelOptions, OpenError, RunOptions, Sampling, Step,
    TokenizerError,
};

use crate::common::{Saved, all};
use crate::fixture::bits;

fn open(saved: &Saved, options: ModelOptions) -> Model {
    let options = ModelOptions {
        more_dirs: saved.dirs[1..].to_vec(),
        threads: Some(2),
        ..options
    };
    Model::open(&saved.dirs[0], &options).unwrap_or_else(|e| panic!("{}: {e}", saved.name))
}

fn small() -> RunOptions {
    RunOptions {
        context: Some(64),
        cache_slots: Some(2),
        ..RunOptions::default()
    }
}

#[test]
fn generated_ids_equal_the_reference() {
    for saved in all() {
        let model = open(&saved, ModelOptions::default());
        let mut runner = model.runner(&RunOptions::default()).unwrap();
        let (prompt, expected) = (saved.ids("/prompt_ids"), saved.ids("/token_ids"));
        let mut sequence = runner.sequence();
        let tokens = runner.generate(&mut sequence, &prompt, &Sampling::greedy(), expected.len());
        let ids: Vec<u32> = tokens.map(|token| token.unwrap().id).collect();
        assert_eq!(ids, expected, "{}", saved.name);
        // The last token is never fed, and no draft is left.
        assert_eq!(sequence.len(), prompt.len() + ids.len() - 1);
    }
}

#[test]
fn runners_share_weights_and_run_on_their_threads() {
    let saved = Saved::named("int4-grouped");
    let stages = Arc::new(Mutex::new(Vec::new()));
    let seen = stages.clone();
    let model = open(
        &saved,
        ModelOptions {
            progress: Some(LoadProgress::new(move |stage| {
                seen.lock().unwrap().push(stage)
            })),
            ..ModelOptions::default()
        },
    );
    let prompt = saved.ids("/prompt_ids");
    let mut one = model.runner(&small()).unwrap();
    let loaded = stages.lock().unwrap().len();
    let mut two = model.runner(&small()).unwrap();
    assert!(Arc::ptr_eq(one.weights(), two.weights()));
    let stages = stages.lock().unwrap().clone();
    let weights = |stage: &&LoadStage| matches!(stage, LoadStage::Weights { .. });
    assert_eq!(stages[loaded - 1..], [LoadStage::Complete; 2]);
    assert_eq!(stages.iter().filter(weights).count(), loaded - 1);
    let mut sequence = one.sequence();
    let expected = bits(one.prefill(&mut sequence, &prompt).unwrap());
    let other = thread::spawn(move || {
        let mut sequence = two.sequence();
        bits(two.prefill(&mut sequence, &prompt).unwrap())
    });
    assert_eq!(other.join().unwrap(), expected);
}

#[test]
fn a_runner_has_pages_for_every_sequence() {
    let saved = Saved::named("int4-grouped");
    let model = open(&saved, ModelOptions::default());
    let options = RunOptions {
        context: Some(40),
        sequences: 3,
        ..small()
    };
    let mut runner = model.runner(&options).unwrap();
    let prompts = [1, 2, 3].map(|id| vec![id; 40]);
    let mut sequences = [runner.sequence(), runner.sequence(), runner.sequence()];
    let steps = sequences.iter_mut().zip(&prompts);
    let mut steps: Vec<Step> = steps
        .map(|(sequence, ids)| Step {
            sequence,
            ids,
            logits: Logits::Last,
        })
        .collect();
    runner.forward(&mut steps).unwrap();
}

#[test]
fn a_stop_ends_the_text_without_an_error() {
    let saved = Saved::named("int4-grouped");
    let model = open(&saved, ModelOptions::default());
    let stop = Arc::new(AtomicBool::new(false));
    let options = RunOptions {
        stop: Some(stop.clone()),
        ..small()
    };
    let mut runner = model.runner(&options).unwrap();
    let mut sequence = runner.sequence();
    let prompt = saved.ids("/prompt_ids");
    let mut tokens = runner.generate(&mut sequence, &prompt, &Sampling::greedy(), 8);
    assert!(tokens.next().is_some_and(|token| token.is_ok()));
    stop.store(true, Ordering::SeqCst);
    assert!(tokens.next().is_none());
    drop(tokens);
    assert_eq!(sequence.ids(), prompt);
}

#[test]
fn impossible_options_are_refused_by_name() {
    let saved = Saved::named("int4-grouped");
    let weights = ModelOptions {
        mirror_weights: Some(vec![1, 2]),
        ..ModelOptions::default()
    };
    let error = Model::open(&saved.dirs[0], &weights).unwrap_err();
    assert!(matches!(
        error,
        OpenError::MirrorWeights {
            weights: 2,
            drives: 1
        }
    ));
    let model = open(&saved, ModelOptions::default());
    assert!(matches!(
        model.tokenizer().unwrap_err(),
        TokenizerError::Missing { .. }
    ));
    let run = |options: RunOptions| model.runner(&options).map(drop).unwrap_err();
    let nothing = RunOptions {
        context: Some(0),
        ..small()
    };
    assert!(matches!(run(nothing), OpenError::NoTokens));
    let tiny = RunOptions {
        ram: Some(1),
        ..small()
    };
    assert!(matches!(
        run(tiny),
        OpenError::Plan(PlanError::DoesNotFit { .. })
    ));
    let long = RunOptions {
        context: Some(usize::MAX),
        ..small()
    };
    assert!(matches!(run(long), OpenError::Model(_)));
}
