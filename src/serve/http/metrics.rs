//! Tells what the server and the engine have done, in the OpenMetrics format of Prometheus.

use std::time::Duration;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::{ApiError, Served, Shared};
use crate::memory::process_bytes;
use crate::serve::SourceReads;
use crate::serve::request::Summary;

/// Upper bounds of the histograms' buckets, in seconds.
const BOUNDS: [f64; 16] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
];

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// One label for each name.
type Labels<const N: usize> = [(&'static str, String); N];

/// Counts of requests.
#[derive(Debug)]
pub struct Requests {
    ended: Family<Labels<2>, Counter>,
    queue: Histogram,
    first: Histogram,
    between: Histogram,
}

impl Default for Requests {
    fn default() -> Requests {
        Requests {
            ended: Family::default(),
            queue: Histogram::new(BOUNDS),
            first: Histogram::new(BOUNDS),
            between: Histogram::new(BOUNDS),
        }
    }
}

impl Requests {
    /// Counts a request that has ended, and its times if it has any.
    pub fn ended(&self, endpoint: &'static str, outcome: Outcome, summary: Option<&Summary>) {
        let labels = [
            ("endpoint", endpoint.to_owned()),
            ("outcome", outcome.name().to_owned()),
        ];
        self.ended.get_or_create(&labels).inc();
        let Some(summary) = summary else { return };
        let seconds = |time: Duration| time.as_secs_f64();
        self.queue.observe(seconds(summary.queue));
        self.first.observe(seconds(summary.queue + summary.prefill));
        if let Some(gaps) = u32::try_from(summary.tokens).ok().filter(|n| *n > 1) {
            self.between.observe(seconds(summary.decode / (gaps - 1)));
        }
    }

    fn register(&self, all: &mut Registry) {
        let help = "Requests that have ended";
        all.register("colibri_requests", help, self.ended.clone());
        for (name, help, histogram) in [
            ("queue", "Time until a request is taken up", &self.queue),
            (
                "time_to_first_token",
                "Time until the first token",
                &self.first,
            ),
            (
                "time_between_tokens",
                "Mean time between tokens of a request",
                &self.between,
            ),
        ] {
            all.register(format!("colibri_{name}_seconds"), help, histogram.clone());
        }
    }
}

/// Adds what the engine has done.
fn register_engine(served: &Served, all: &mut Registry) {
    let engine = served.engine.metrics();
    let about = [
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("model", served.name.clone()),
    ];
    all.register("colibri", "Version and model", Info::new(about));
    let waiting = served.engine.waiting() as u64;
    for (name, help, value) in [
        (
            "requests_running",
            "Requests that are computed",
            engine.running.get(),
        ),
        ("requests_waiting", "Requests that wait", waiting),
        (
            "requests_swapped",
            "Running requests whose KV pages are in files",
            engine.swapped.get(),
        ),
        ("kv_pages", "KV pages of 64 tokens", engine.pages.get()),
        (
            "kv_pages_free",
            "KV pages that requests can be given",
            engine.free_pages.get(),
        ),
        (
            "resident_memory_bytes",
            "Memory of the process",
            process_bytes(),
        ),
    ] {
        all.register(
            format!("colibri_{name}"),
            help,
            ConstGauge::new(value as i64),
        );
    }
    for (name, help, value) in [
        (
            "prompt_tokens",
            "Tokens of prompts",
            engine.prompt_tokens.get(),
        ),
        (
            "cached_tokens",
            "Tokens of prompts whose rows were in memory",
            engine.cached_tokens.get(),
        ),
        (
            "generated_tokens",
            "New tokens",
            engine.generated_tokens.get(),
        ),
        ("passes", "Passes through the model", engine.passes.get()),
        ("rows", "Rows of all passes", engine.rows.get()),
        ("swaps", "Sequences swapped to files", engine.swaps.get()),
        (
            "expert_hits",
            "Demanded experts that were in memory",
            engine.hits.get(),
        ),
        (
            "expert_misses",
            "Demanded experts that were read",
            engine.misses.get(),
        ),
    ] {
        all.register(format!("colibri_{name}"), help, ConstCounter::new(value));
    }
    for (name, help, nanoseconds) in [
        (
            "io_wait",
            "Time that passes waited for drives",
            engine.io_wait.get(),
        ),
        ("compute", "Time that passes computed", engine.compute.get()),
    ] {
        let seconds = ConstCounter::new(nanoseconds as f64 / 1e9);
        all.register(format!("colibri_{name}_seconds"), help, seconds);
    }
    let sources = engine.sources();
    for (name, help, value) in [
        (
            "read_bytes",
            "Bytes of experts read",
            (|s| s.bytes) as fn(&SourceReads) -> u64,
        ),
        ("reads", "Reads of experts", |s| s.reads),
        ("read_errors", "Reads that failed", |s| s.errors),
    ] {
        let family = Family::<Labels<1>, Counter>::default();
        for source in &sources {
            let labels = [("source", source.dir.display().to_string())];
            family.get_or_create(&labels).inc_by(value(source));
        }
        all.register(format!("colibri_{name}"), help, family);
    }
}

pub async fn handle(State(app): Shared) -> Result<Response, ApiError> {
    // Also while the server drains.
    let served = app.served.get();
    let served = served.ok_or_else(|| ApiError::unavailable("the model is being loaded"))?;
    let mut all = Registry::default();
    register_engine(served, &mut all);
    app.metrics.register(&mut all);
    let mut text = String::new();
    encode(&mut text, &all).map_err(ApiError::internal)?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}
