//! The measurements in `decode --json`. Scripts rely on these names.

use std::collections::BTreeMap;

use colibri_ring::Stats as ReadStats;
use colibri_uring::model::{Phase, draft};
use colibri_uring::quant::Activations;
use colibri_uring::runtime::{Model, Source, TextRunner};
use colibri_uring::stream::PrefetchAccuracy;
use serde::Serialize;

use crate::cli::commands::kv::KvStats;

/// The `stats` object.
#[derive(Clone, Debug, Serialize)]
pub struct Stats {
    pub load_seconds: f64,
    pub prefill_seconds: f64,
    /// Tokens of the prompt that were computed.
    pub prefilled_tokens: u64,
    /// Tokens of the prompt that the file of `--kv` had.
    pub reused_tokens: u64,
    /// What that file has cost; null without `--kv`.
    pub kv: Option<KvStats>,
    pub decode_seconds: f64,
    /// Tokens fed one at a time, by the second; 0 when there was none.
    pub tokens_per_second: f64,
    /// Most memory that was ever resident (VmHWM).
    pub peak_rss_bytes: u64,
    pub mtp: Mtp,
    #[serde(flatten)]
    pub engine: EngineStats,
}

/// What came of the drafts of the prediction layer.
#[derive(Clone, Debug, Serialize)]
pub struct Mtp {
    /// `auto`, `off`, or the number of drafts that was asked for.
    pub mode: String,
    /// `on` or `off`, at the end; `absent` where the model has no such layer, no memory for it, or one that fails.
    pub state: &'static str,
    /// Drafts that the next pass would have.
    pub depth: usize,
    pub drafted: u64,
    pub accepted: u64,
    /// Passes after the prompt.
    pub forwards: u64,
    pub tokens_per_forward: f64,
}

impl Mtp {
    /// In `mode`, where the layer was loaded or was not.
    pub fn new(mode: draft::Mode, loaded: bool, stats: &draft::DraftStats) -> Mtp {
        Mtp {
            mode: match mode {
                draft::Mode::Auto => "auto".to_owned(),
                draft::Mode::Off => "off".to_owned(),
                draft::Mode::Drafts(n) => n.to_string(),
            },
            state: match (mode, loaded, stats.depth) {
                (draft::Mode::Off, ..) => "off",
                (_, false, _) => "absent",
                (_, true, 0) => "off",
                (_, true, _) => "on",
            },
            depth: stats.depth,
            drafted: stats.drafted,
            accepted: stats.accepted,
            forwards: stats.forwards,
            tokens_per_forward: stats.tokens_per_forward(),
        }
    }
}

/// What the model and the stream measure.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EngineStats {
    /// `uring` or `pread`.
    pub engine: String,
    /// `exact` or `int8`.
    pub activations: Activations,
    /// Whether all expert reads go around the page cache.
    pub direct: bool,
    pub expert_hits: u64,
    pub expert_misses: u64,
    pub expert_bytes_read: u64,
    pub io_wait_seconds: f64,
    pub compute_seconds: f64,
    /// Attention, router, experts, shared, head, ...
    pub phase_seconds: BTreeMap<String, f64>,
    pub speculative_reads: u64,
    pub speculative_used: u64,
    /// Experts that are kept because earlier runs used them most.
    pub pinned: u64,
    /// Runs in the history of the model.
    pub usage_runs: u64,
    /// The early looks at routers, by layer.
    pub lookahead: Vec<PrefetchStats>,
    pub ring_enters: u64,
    /// The window of each drive at the end: it is sought while the drive works.
    pub window_bytes: Vec<u64>,
    pub replicas: Vec<Replica>,
    pub latency_us: Latency,
}

impl EngineStats {
    /// What reading and computing have cost so far.
    pub fn new(runner: &mut TextRunner, model: &Model) -> EngineStats {
        let phases = runner.stats().phases;
        let seconds = |waiting: bool| -> f64 {
            let of_kind = phases
                .iter()
                .filter(|(phase, ..)| (*phase == Phase::IoWait) == waiting);
            of_kind.map(|(_, _, spent)| spent.as_secs_f64()).sum()
        };
        let usage_runs = runner.usage_runs();
        let store = runner.store_mut();
        let stream = store.stats();
        let mut stats = EngineStats {
            engine: store.device().to_owned(),
            activations: store.activations(),
            expert_hits: stream.hits,
            expert_misses: stream.misses,
            speculative_reads: stream.speculative_reads,
            speculative_used: stream.speculative_used,
            pinned: stream.pinned,
            usage_runs,
            lookahead: stream.lookahead.iter().map(PrefetchStats::from).collect(),
            io_wait_seconds: seconds(true),
            compute_seconds: seconds(false),
            phase_seconds: phases
                .iter()
                .map(|(_, name, spent)| ((*name).to_owned(), spent.as_secs_f64()))
                .collect(),
            ..EngineStats::default()
        };
        if let Some(reads) = store.read_stats() {
            let latency = &reads.latency_us;
            stats.direct = reads.direct;
            stats.ring_enters = reads.syscalls;
            stats.window_bytes = reads.windows.clone();
            stats.expert_bytes_read = reads.bytes();
            stats.latency_us = Latency {
                p50: latency.value_at_quantile(0.5),
                p90: latency.value_at_quantile(0.9),
                p99: latency.value_at_quantile(0.99),
                max: latency.max(),
            };
            stats.replicas = replicas(model, &reads);
        }
        stats
    }
}

/// What was read from each directory of the model and from each mirror.
fn replicas(model: &Model, reads: &ReadStats) -> Vec<Replica> {
    let sources = model.sources().into_iter().enumerate();
    let replica = |(i, source): (usize, Source)| {
        // The last mirrors have no entry when they serve no file.
        let read = reads.sources.get(i).copied().unwrap_or_default();
        Replica {
            dir: source.dir.display().to_string(),
            files: source.files as u64,
            bytes: read.bytes,
            reads: read.reads,
            errors: read.errors,
        }
    };
    sources.map(replica).collect()
}

/// How the early looks at a layer's router compare with its decisions. Prompts are not counted.
#[derive(Clone, Debug, Serialize)]
pub struct PrefetchStats {
    pub layer: usize,
    /// Experts guessed for a token, at the end.
    pub width: usize,
    pub guessed: u64,
    /// Share of the guesses that came true; null without guesses.
    pub precision: Option<f64>,
    /// Share of the experts used that had been guessed.
    pub recall: f64,
    /// Share of the experts used that were among as many of the likeliest.
    pub top_k_recall: f64,
}

impl From<&PrefetchAccuracy> for PrefetchStats {
    fn from(layer: &PrefetchAccuracy) -> PrefetchStats {
        let share = |of: u64, all: u64| of as f64 / all.max(1) as f64;
        PrefetchStats {
            layer: layer.layer,
            width: layer.width,
            guessed: layer.prefetched,
            precision: (layer.prefetched > 0).then(|| share(layer.right, layer.prefetched)),
            recall: share(layer.right, layer.used),
            top_k_recall: share(layer.predicted, layer.used),
        }
    }
}

/// One directory that experts are read from.
#[derive(Clone, Debug, Serialize)]
pub struct Replica {
    pub dir: String,
    pub files: u64,
    pub bytes: u64,
    pub reads: u64,
    pub errors: u64,
}

/// Microseconds from submission to completion of a read.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Latency {
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub max: u64,
}

/// The most memory that was ever resident, in bytes; 0 where /proc does not say.
pub fn peak_rss_bytes() -> u64 {
    status_bytes("VmHWM:")
}

/// The memory that is resident, in bytes; 0 where /proc does not say.
pub fn rss_bytes() -> u64 {
    status_bytes("VmRSS:")
}

fn status_bytes(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let kib: u64 = line
        .and_then(|value| value.trim().trim_end_matches("kB").trim().parse().ok())
        .unwrap_or(0);
    kib.saturating_mul(1024)
}
