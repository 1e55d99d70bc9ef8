//! Requests in company against the same requests alone: the tokens are the same.
//!
//! `COLIBRI_REQUESTS=N` sends N requests instead of [`REQUESTS`] where clients go away at random.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use colibri_uring::model::draft::Mode;
use colibri_uring::runtime::sample::Adjustments;
use colibri_uring::serve::{
    Drawn, Engine, EngineOptions, Event, Finish, Refusal, Request, ServeError, Summary, Ticket,
};
use colibri_uring::{Model, ModelOptions, RunOptions, Sampling};

use crate::common::Saved;
use crate::rng::Rng;

const REQUESTS: usize = 300;

fn model(name: &str, drafts: Mode) -> Model {
    let saved = Saved::named(name);
    let options = ModelOptions {
        drafts,
        more_dirs: saved.dirs[1..].to_vec(),
        threads: Some(2),
        ..ModelOptions::default()
    };
    Model::open(&saved.dirs[0], &options).unwrap()
}

/// How an engine differs from the usual one.
struct Shape {
    parallel: usize,
    /// Sequences of a whole context that there are pages for.
    sequences: usize,
    context: usize,
    slice: usize,
    queue: usize,
    max_stall: Duration,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape {
            parallel: 8,
            sequences: 8,
            context: 512,
            slice: usize::MAX,
            queue: 1000,
            max_stall: Duration::from_millis(20),
        }
    }
}

fn engine(model: &Model, shape: &Shape) -> Engine {
    let stop = Arc::<AtomicBool>::default();
    let options = RunOptions {
        context: Some(shape.context),
        sequences: shape.sequences,
        slice: shape.slice,
        cache_slots: Some(1),
        usage: false,
        stop: Some(Arc::clone(&stop)),
        ..RunOptions::default()
    };
    let runner = model.runner(&options).unwrap();
    let options = EngineOptions {
        kept: None,
        parallel: shape.parallel,
        queue: shape.queue,
        context: shape.context,
        max_stall: shape.max_stall,
        sources: model.sources(),
    };
    Engine::start(runner, stop, options).unwrap()
}

/// Prompts of very different lengths, of which many begin alike, and ways to sample.
fn requests(vocabulary: usize, n: usize, context: usize) -> Vec<Request> {
    let mut rng = Rng(0x9E37_79B9_7F4A_7C15);
    let mut requests: Vec<Request> = Vec::new();
    for i in 0..n {
        let mut ids = match i % 3 {
            0 => Vec::new(),
            _ => {
                let other = &requests[rng.below(requests.len())].ids;
                other[..1 + rng.below(other.len())].to_vec()
            }
        };
        let tokens = 1 + rng.below(36);
        let most = context - tokens;
        let more = 1 + rng.pick(&[0, 5, 60, 130, 250]);
        let len = (ids.len() + 1 + rng.below(more)).min(most);
        ids.truncate(most);
        ids.extend((ids.len()..len).map(|_| rng.below(vocabulary) as u32));
        requests.push(Request {
            ids,
            sampling: Sampling {
                temperature: [0.0, 0.7, 1.5][i % 3],
                top_p: [1.0, 0.9][i % 2],
                repetition_penalty: [1.0, 1.1][i / 3 % 2],
                seed: i as u64,
                ..Sampling::default()
            },
            adjustments: match i % 4 {
                0 => Adjustments {
                    presence: 0.5,
                    frequency: 0.3,
                    bias: vec![(7, 2.0), (9, f32::NEG_INFINITY)],
                },
                _ => Adjustments::default(),
            },
            max_tokens: tokens,
            stop: vec![1],
            logprobs: (i % 5 == 0).then_some(3),
            ..Request::default()
        });
    }
    requests
}

/// The tokens of a request, and its end.
fn collect(mut ticket: Ticket) -> Result<(Vec<Drawn>, Finish, Summary), ServeError> {
    let mut drawn = Vec::new();
    while let Some(event) = ticket.wait() {
        match event {
            Event::Token(token) => drawn.push(token),
            Event::End(finish, summary) => return Ok((drawn, finish, summary)),
            Event::Failed(error) => return Err(error),
            Event::Prompt { .. } | Event::PromptLogprobs(_) => {}
        }
    }
    panic!("the last event is missing");
}

fn solo(model: &Model, request: &Request) -> Vec<Drawn> {
    let shape = Shape {
        parallel: 1,
        sequences: 1,
        ..Shape::default()
    };
    let engine = engine(model, &shape);
    collect(engine.submit(request.clone()).unwrap()).unwrap().0
}

/// The tokens of the library's plain loop.
fn plain(model: &Model, request: &Request) -> Vec<u32> {
    let options = RunOptions {
        context: Some(512),
        usage: false,
        ..RunOptions::default()
    };
    let mut runner = model.runner(&options).unwrap();
    let mut sequence = runner.sequence();
    let generated = runner.generate(
        &mut sequence,
        &request.ids,
        &request.sampling,
        request.max_tokens,
    );
    generated.map(|token| token.unwrap().id).collect()
}

#[test]
fn a_request_gives_the_tokens_of_decode() {
    for (name, drafts) in [("f16-long", Mode::Off), ("mtp-agrees", Mode::Drafts(2))] {
        let model = model(name, drafts);
        for mut request in requests(model.config().vocab_size, 9, 512) {
            request.adjustments = Adjustments::default();
            request.stop = model.config().eos_token_ids.clone();
            let ids: Vec<u32> = solo(&model, &request)
                .iter()
                .map(|drawn| drawn.id)
                .collect();
            assert_eq!(ids, plain(&model, &request));
        }
    }
}

#[test]
fn company_changes_no_token() {
    let shapes = [
        Shape::default(),
        Shape {
            parallel: 2,
            ..Shape::default()
        },
        // Pages for a fraction of them, so that sequences are swapped.
        Shape {
            parallel: 32,
            sequences: 2,
            slice: 64,
            ..Shape::default()
        },
        Shape {
            parallel: 12,
            sequences: 1,
            slice: 7,
            max_stall: Duration::ZERO,
            ..Shape::default()
        },
    ];
    for (name, drafts) in [
        ("f16-long", Mode::Off),
        ("int4-grouped", Mode::Off),
        ("mtp-agrees", Mode::Drafts(2)),
        ("mixed-mtp", Mode::Auto),
    ] {
        let model = model(name, drafts);
        let requests = requests(model.config().vocab_size, 32, 512);
        let alone: Vec<_> = requests
            .iter()
            .map(|request| solo(&model, request))
            .collect();
        for shape in &shapes {
            let engine = engine(&model, shape);
            let tickets: Vec<_> = (requests.iter())
                .map(|request| engine.submit(request.clone()).unwrap())
                .collect();
            for (i, (ticket, alone)) in tickets.into_iter().zip(&alone).enumerate() {
                let (drawn, ..) = collect(ticket).unwrap();
                assert_eq!(&drawn, alone, "{name}, request {i}");
            }
        }
    }
}

/// All begin small and grow, until there are pages for a third of them.
#[test]
fn swapped_sequences_go_on() {
    for (name, drafts) in [("f16-long", Mode::Off), ("mtp-agrees", Mode::Drafts(2))] {
        let model = model(name, drafts);
        let shape = Shape {
            parallel: 12,
            sequences: 1,
            ..Shape::default()
        };
        let engine = engine(&model, &shape);
        let request = |seed: u32| Request {
            ids: vec![3 + seed, 5, 7 + seed],
            sampling: Sampling {
                temperature: 1.0,
                seed: seed.into(),
                ..Sampling::default()
            },
            max_tokens: 150,
            ..Request::default()
        };
        let tickets: Vec<_> = (0..12)
            .map(|seed| engine.submit(request(seed)).unwrap())
            .collect();
        for (seed, ticket) in (0..).zip(tickets) {
            assert_eq!(collect(ticket).unwrap().0, solo(&model, &request(seed)));
        }
        assert!(engine.metrics().swaps.get() > 0, "{name}");
    }
}

#[test]
fn clients_that_go_away_leave_nothing_behind() {
    let wanted = std::env::var("COLIBRI_REQUESTS").ok();
    let n = wanted.map_or(REQUESTS, |n| n.parse().unwrap());
    let model = model("mtp-share", Mode::Auto);
    let shape = Shape {
        parallel: 6,
        sequences: 2,
        queue: usize::MAX,
        slice: 50,
        ..Shape::default()
    };
    let texts = requests(model.config().vocab_size, 24, shape.context);
    let alone: Vec<_> = texts.iter().map(|request| solo(&model, request)).collect();
    let engine = engine(&model, &shape);
    let next = std::sync::atomic::AtomicUsize::new(0);
    thread::scope(|scope| {
        for thread in 0..8 {
            let (engine, texts, alone, next) = (&engine, &texts, &alone, &next);
            scope.spawn(move || {
                let mut rng = Rng(1 + thread);
                while next.fetch_add(1, Ordering::Relaxed) < n {
                    let text = rng.below(texts.len());
                    let mut ticket = engine.submit(texts[text].clone()).unwrap();
                    if !rng.one_in(3) {
                        assert_eq!(collect(ticket).unwrap().0, alone[text]);
                        continue;
                    }
                    // Goes away at once, or after some tokens.
                    for _ in 0..rng.below(10) {
                        match ticket.wait() {
                            Some(Event::End(..)) | None => break,
                            Some(Event::Failed(error)) => panic!("{error}"),
                            Some(_) => {}
                        }
                    }
                }
            });
        }
    });
    engine.drain();
    engine.join();
    let metrics = engine.metrics();
    assert_eq!(metrics.free_pages.get(), metrics.pages.get());
    assert_eq!((engine.waiting(), metrics.running.get()), (0, 0));
}

#[test]
fn a_known_beginning_is_not_computed_again() {
    let model = model("f16-long", Mode::Off);
    let shape = Shape {
        sequences: 4,
        ..Shape::default()
    };
    let engine = engine(&model, &shape);
    let mut request = requests(model.config().vocab_size, 1, 512).remove(0);
    request.ids = (0..300).map(|i| i % 90 + 3).collect();
    request.max_tokens = 4;
    request.stop.clear();
    let first = collect(engine.submit(request.clone()).unwrap()).unwrap();
    assert_eq!((first.2.prompt_tokens, first.2.cached_tokens), (300, 0));
    let again = collect(engine.submit(request.clone()).unwrap()).unwrap();
    assert_eq!((again.0, again.2.cached_tokens), (first.0.clone(), 299));
    // The conversation goes on.
    request.ids.extend(first.0.iter().map(|drawn| drawn.id));
    request.ids.extend([5, 6, 7]);
    let next = collect(engine.submit(request.clone()).unwrap()).unwrap();
    assert!(next.2.cached_tokens >= 303, "{:?}", next.2);
    assert_eq!(next.0, solo(&model, &request));
}

#[test]
fn probabilities_of_a_prompt() {
    let model = model("f16-long", Mode::Off);
    let engine = engine(
        &model,
        &Shape {
            slice: 33,
            ..Shape::default()
        },
    );
    let mut request = requests(model.config().vocab_size, 1, 512).remove(0);
    request.ids = (0..100).map(|i| i * 7 % 90 + 3).collect();
    (
        request.prompt_logprobs,
        request.logprobs,
        request.max_tokens,
    ) = (true, Some(2), 0);
    // Others make no difference, nor that the beginning is known.
    for _ in 0..2 {
        let mut ticket = engine.submit(request.clone()).unwrap();
        let mut found = Vec::new();
        while let Some(event) = ticket.wait() {
            match event {
                Event::PromptLogprobs(drawn) => found.extend(drawn),
                Event::End(finish, summary) => {
                    assert_eq!((finish, summary.tokens), (Finish::Length, 0));
                }
                Event::Prompt { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        let ids: Vec<u32> = found.iter().map(|drawn| drawn.id).collect();
        assert_eq!(ids, request.ids[1..]);
        let options = RunOptions {
            context: Some(512),
            usage: false,
            ..RunOptions::default()
        };
        let mut runner = model.runner(&options).unwrap();
        let mut sequence = runner.sequence();
        let mut expected = Vec::new();
        let log = colibri_uring::runtime::sample::log_softmax_at;
        runner
            .score(&mut sequence, &request.ids, |i, logits| {
                if let Some(id) = request.ids.get(i + 1) {
                    expected.push(log(logits, *id as usize) as f32);
                }
            })
            .unwrap();
        let found_logprobs: Vec<f32> = found.iter().map(|drawn| drawn.logprob.unwrap()).collect();
        assert_eq!(found_logprobs, expected);
        assert!(
            found
                .iter()
                .all(|drawn| drawn.top.len() == 2 && drawn.top[0].1 >= drawn.top[1].1)
        );
    }
}

#[test]
fn requests_that_cannot_be_served_are_refused() {
    let model = model("f16-long", Mode::Off);
    let engine = engine(
        &model,
        &Shape {
            parallel: 1,
            queue: 1,
            ..Shape::default()
        },
    );
    let request = |ids: Vec<u32>, max_tokens| Request {
        ids,
        max_tokens,
        ..Request::default()
    };
    for (ids, max_tokens, says) in [
        (
            vec![3; 500],
            13,
            "the prompt has 500 tokens and max_tokens is 13: together more than the context of 512 tokens",
        ),
        (vec![3; 512], usize::MAX, "the prompt has 512 tokens"),
        (vec![], 1, "no token ids"),
        (
            vec![3, 1_000_000],
            1,
            "token id 1000000 is outside the vocabulary",
        ),
    ] {
        let error = engine.submit(request(ids, max_tokens)).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    // One runs, one waits.
    let long = || engine.submit(request(vec![3; 400], 100));
    let mut running = long().unwrap();
    while !matches!(running.wait(), Some(Event::Token(_))) {}
    let waiting = long().unwrap();
    assert!(matches!(long(), Err(Refusal::Full { waiting: 1 })));
    // A client that has gone makes room.
    drop(waiting);
    let waiting = long().unwrap();
    // What is accepted is finished, also while the engine ends.
    engine.drain();
    assert!(matches!(long(), Err(Refusal::Draining)));
    assert_eq!(collect(waiting).unwrap().0.len(), 100);
    engine.join();
}

#[test]
fn an_end_is_told_to_all() {
    let model = model("f16-long", Mode::Off);
    let engine = engine(
        &model,
        &Shape {
            parallel: 1,
            ..Shape::default()
        },
    );
    let request = Request {
        ids: vec![3; 100],
        max_tokens: 400,
        ..Request::default()
    };
    let tickets: Vec<_> = (0..3)
        .map(|_| engine.submit(request.clone()).unwrap())
        .collect();
    engine.stop();
    for ticket in tickets {
        assert!(matches!(collect(ticket), Err(ServeError::Stopped)));
    }
}
