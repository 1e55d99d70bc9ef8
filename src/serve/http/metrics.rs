//! Writes what the server and the engine have done in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::{ApiError, Shared};
use crate::memory::process_bytes;
use crate::serve::SourceReads;
use crate::serve::request::Summary;

/// Upper bounds of the histograms' buckets, in seconds.
const BOUNDS: [f64; 16] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
];

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Ok,
    Cancelled,
    Refused,
    Failed,
}

impl Outcome {
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Cancelled => "cancelled",
            Outcome::Refused => "refused",
            Outcome::Failed => "failed",
        }
    }
}

#[derive(Debug, Default)]
struct Histogram {
    counts: [u64; BOUNDS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let buckets = BOUNDS.iter().zip(&mut self.counts);
        buckets
            .filter(|(bound, _)| seconds <= **bound)
            .for_each(|(_, count)| *count += 1);
        self.count += 1;
        self.sum += seconds;
    }
}

#[derive(Debug, Default)]
struct Counts {
    requests: BTreeMap<(&'static str, Outcome), u64>,
    queue: Histogram,
    first: Histogram,
    between: Histogram,
}

/// Counts of requests.
#[derive(Debug, Default)]
pub struct Requests(Mutex<Counts>);

impl Requests {
    /// Counts a request that has ended, and its times if it has any.
    pub fn ended(&self, endpoint: &'static str, outcome: Outcome, summary: Option<&Summary>) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.requests.entry((endpoint, outcome)).or_default() += 1;
        let Some(summary) = summary else { return };
        counts.queue.add(summary.queue);
        counts.first.add(summary.queue + summary.prefill);
        if let Some(gaps) = u32::try_from(summary.tokens).ok().filter(|n| *n > 1) {
            counts.between.add(summary.decode / (gaps - 1));
        }
    }
}

/// Text that grows by metrics.
#[derive(Default)]
struct Text(String);

impl Text {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // A string takes everything.
        let _ = writeln!(
            self.0,
            "# HELP colibri_{name} {help}\n# TYPE colibri_{name} {kind}"
        );
    }

    fn value(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let mut label = |(key, text): &(&str, &str)| {
            let text = text
                .replace('\\', "\\\\")
                .replace('"', "\\\"")
                .replace('\n', "\\n");
            format!("{key}=\"{text}\"")
        };
        let labels: Vec<String> = labels.iter().map(&mut label).collect();
        let labels = match labels.is_empty() {
            true => String::new(),
            false => format!("{{{}}}", labels.join(",")),
        };
        let _ = writeln!(self.0, "colibri_{name}{labels} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.head(name, kind, help);
        self.value(name, &[], value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        for (bound, count) in BOUNDS.iter().zip(histogram.counts) {
            self.value(
                &format!("{name}_bucket"),
                &[("le", &bound.to_string())],
                count,
            );
        }
        self.value(
            &format!("{name}_bucket"),
            &[("le", "+Inf")],
            histogram.count,
        );
        self.value(&format!("{name}_sum"), &[], histogram.sum);
        self.value(&format!("{name}_count"), &[], histogram.count);
    }
}

pub async fn handle(State(app): Shared) -> Result<Response, ApiError> {
    // Also while the server drains.
    let served = app.served.get();
    let served = served.ok_or_else(|| ApiError::unavailable("the model is being loaded"))?;
    let (engine, mut text) = (served.engine.metrics(), Text::default());
    let version = env!("CARGO_PKG_VERSION");
    text.head("info", "gauge", "Version and model.");
    text.value("info", &[("version", version), ("model", &served.name)], 1);
    let running = engine.running.get();
    let swapped = engine.swapped.get();
    text.one(
        "requests_running",
        "gauge",
        "Requests that are computed.",
        running,
    );
    text.one(
        "requests_waiting",
        "gauge",
        "Requests that wait.",
        served.engine.waiting(),
    );
    text.one(
        "requests_swapped",
        "gauge",
        "Running requests whose KV pages are in files.",
        swapped,
    );
    let seconds = |nanoseconds: u64| nanoseconds as f64 / 1e9;
    for (name, help, value) in [
        (
            "prompt_tokens_total",
            "Tokens of prompts.",
            engine.prompt_tokens.get(),
        ),
        (
            "cached_tokens_total",
            "Tokens of prompts whose rows were in memory.",
            engine.cached_tokens.get(),
        ),
        (
            "generated_tokens_total",
            "New tokens.",
            engine.generated_tokens.get(),
        ),
        (
            "passes_total",
            "Passes through the model.",
            engine.passes.get(),
        ),
        ("rows_total", "Rows of all passes.", engine.rows.get()),
        (
            "swaps_total",
            "Sequences swapped to files.",
            engine.swaps.get(),
        ),
        (
            "expert_hits_total",
            "Demanded experts that were in memory.",
            engine.hits.get(),
        ),
        (
            "expert_misses_total",
            "Demanded experts that were read.",
            engine.misses.get(),
        ),
    ] {
        text.one(name, "counter", help, value);
    }
    for (name, help, value) in [
        (
            "io_wait_seconds_total",
            "Time that passes waited for drives.",
            engine.io_wait.get(),
        ),
        (
            "compute_seconds_total",
            "Time that passes computed.",
            engine.compute.get(),
        ),
    ] {
        text.one(name, "counter", help, seconds(value));
    }
    text.one(
        "kv_pages",
        "gauge",
        "KV pages of 64 tokens.",
        engine.pages.get(),
    );
    text.one(
        "kv_pages_free",
        "gauge",
        "KV pages that requests can be given.",
        engine.free_pages.get(),
    );
    let sources = engine.sources();
    for (name, help, value) in [
        (
            "read_bytes_total",
            "Bytes of experts read.",
            (|s| s.bytes) as fn(&SourceReads) -> u64,
        ),
        ("reads_total", "Reads of experts.", |s| s.reads),
        ("read_errors_total", "Reads that failed.", |s| s.errors),
    ] {
        text.head(name, "counter", help);
        for source in &sources {
            let dir = source.dir.display().to_string();
            text.value(name, &[("source", &dir)], value(source));
        }
    }
    text.one(
        "resident_memory_bytes",
        "gauge",
        "Memory of the process.",
        process_bytes(),
    );
    let counts = app.metrics.0.lock().unwrap_or_else(PoisonError::into_inner);
    text.head("requests_total", "counter", "Requests that have ended.");
    for ((endpoint, outcome), count) in &counts.requests {
        text.value(
            "requests_total",
            &[("endpoint", endpoint), ("outcome", outcome.name())],
            count,
        );
    }
    text.histogram(
        "queue_seconds",
        "Time until a request is taken up.",
        &counts.queue,
    );
    text.histogram(
        "time_to_first_token_seconds",
        "Time until the first token.",
        &counts.first,
    );
    text.histogram(
        "time_between_tokens_seconds",
        "Mean time between tokens of a request.",
        &counts.between,
    );
    drop(counts);
    let kind = [(
        header::CONTENT_TYPE,
        "text/plain; version=0.0.4; charset=utf-8",
    )];
    Ok((kind, text.0).into_response())
}
