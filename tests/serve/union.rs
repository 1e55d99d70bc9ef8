//! Streams at once read the union of their experts, each expert once.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use colibri_uring::serve::{Engine, EngineOptions, Event, Request};
use colibri_uring::stream::routing::{self, RoutingEvent, RoutingHeader, RoutingRecorder};
use colibri_uring::{Lookahead, Model, ModelOptions, RunOptions, Sampling};

use crate::common::Saved;

/// A file that others can read while it is written.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a run demanded and read.
struct Done {
    /// The routers' choices in each layer of each pass: [rows, top_k].
    routed: Vec<Vec<u32>>,
    demands: u64,
    misses: u64,
    bytes: u64,
}

fn run(model: &Model, requests: &[Request]) -> Done {
    let config = model.config();
    let stop = Arc::<AtomicBool>::default();
    let options = RunOptions {
        context: Some(200),
        sequences: 8,
        cache_slots: Some(0),
        lookahead: Lookahead::Off,
        usage: false,
        stop: Some(Arc::clone(&stop)),
        ..RunOptions::default()
    };
    let mut runner = model.runner(&options).unwrap();
    let record = Shared::default();
    let header = RoutingHeader {
        routing: routing::VERSION,
        top_k: config.router.top_k,
        experts: config.experts.count,
        layers: config.num_hidden_layers(),
    };
    let recorder = RoutingRecorder::new(Box::new(record.clone()), &header);
    runner.store_mut().record_routing(recorder);
    let options = EngineOptions {
        parallel: 8,
        queue: 100,
        context: 200,
        max_stall: Duration::from_secs(1),
        sources: model.sources(),
        kept: None,
    };
    let engine = Engine::start(runner, stop, options).unwrap();
    let tickets: Vec<_> = (requests.iter())
        .map(|request| engine.submit(request.clone()).unwrap())
        .collect();
    for mut ticket in tickets {
        while let Some(event) = ticket.wait() {
            assert!(!matches!(event, Event::Failed(_)), "{event:?}");
        }
    }
    engine.drain();
    engine.join();
    let (_, events) = routing::read(&record.0.lock().unwrap()[..]).unwrap();
    let routed = events.into_iter().filter_map(|event| match event {
        RoutingEvent::Routed { experts, .. } => Some(experts),
        _ => None,
    });
    let metrics = engine.metrics();
    Done {
        routed: routed.collect(),
        demands: metrics.hits.get() + metrics.misses.get(),
        misses: metrics.misses.get(),
        bytes: metrics.sources().iter().map(|source| source.bytes).sum(),
    }
}

#[test]
fn streams_at_once_read_the_union_of_their_experts() {
    let saved = Saved::named("f16-long");
    let options = ModelOptions {
        threads: Some(2),
        ..ModelOptions::default()
    };
    let model = Model::open(&saved.dirs[0], &options).unwrap();
    let config = model.config();
    let requests: Vec<Request> = (0..8)
        .map(|seed| Request {
            ids: (0..9).map(|i| (seed * 31 + i * 7) % 90 + 3).collect(),
            sampling: Sampling {
                temperature: 1.0,
                seed: seed.into(),
                ..Sampling::default()
            },
            max_tokens: 40,
            ..Request::default()
        })
        .collect();
    let together = run(&model, &requests);
    let union = |experts: &Vec<u32>| experts.iter().collect::<BTreeSet<_>>().len() as u64;
    let unions: u64 = together.routed.iter().map(union).sum();
    assert_eq!(together.demands, unions);
    // All of them were in the same passes, and chose as they do alone.
    let alone: Vec<Done> = requests
        .iter()
        .map(|request| run(&model, std::slice::from_ref(request)))
        .collect();
    let top_k = config.router.top_k;
    let rows = |done: &Done| {
        let rows = done.routed.iter().flat_map(|pass| pass.chunks(top_k));
        rows.map(<[u32]>::to_vec).collect::<Vec<_>>()
    };
    let mut choices = rows(&together);
    let mut separate: Vec<_> = alone.iter().flat_map(rows).collect();
    choices.sort();
    separate.sort();
    assert_eq!(choices, separate);
    let eight = together
        .routed
        .iter()
        .filter(|pass| pass.len() == 8 * top_k);
    assert!(eight.count() > together.routed.len() / 2);
    let demanded: u64 = alone.iter().map(|done| done.demands).sum();
    assert!(unions * 4 < demanded * 3, "{unions} of {demanded}");
    // A read has whole blocks: at most one more at each end of a tensor.
    let expert = (3 * config.hidden_size * config.experts.width * 2) as u64;
    let (least, most) = (expert, expert + 3 * 2 * 4096);
    let each = together.bytes / together.misses;
    assert!(
        (least..=most).contains(&each),
        "{each} of {least} to {most}"
    );
}
