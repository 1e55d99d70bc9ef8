//! Defines the statistics of `decode --json`. Scripts rely on these names.

use std::collections::BTreeMap;

use colibri_ring::Stats as ReadStats;
use colibri_uring::model::{Phase, Sparsity, draft};
use colibri_uring::quant::Activations;
use colibri_uring::runtime::{Model, Source, TextRunner};
use colibri_uring::stream::PrefetchAccuracy;
use serde::Serialize;

/// The `stats` object.
#[derive(Clone, Debug, Serialize)]
pub struct Stats {
    pub load_seconds: f64,
    pub prefill_seconds: f64,
    /// Tokens of the prompt that this run computed.
    pub prefilled_tokens: u64,
    /// Tokens of the prompt that came from the file of `--kv`.
    pub reused_tokens: u64,
    /// `null` without `--kv`.
    pub kv: Option<KvStats>,
    pub decode_seconds: f64,
    /// Decoded tokens per second, without the prompt; 0 if there are none.
    pub tokens_per_second: f64,
    /// Peak resident memory (VmHWM).
    pub peak_rss_bytes: u64,
    pub mtp: Mtp,
    #[serde(flatten)]
    pub engine: EngineStats,
}

/// The file of `--kv`.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct KvStats {
    /// Tokens of the file that the text no longer has.
    pub dropped_tokens: u64,
    /// Whether the file has the text of this run. An interrupted --kv-append that generated nothing is not saved.
    pub saved: bool,
    /// Bytes of the file after this run.
    pub file_bytes: u64,
    /// Time to read the file into memory.
    pub restore_seconds: f64,
    /// Time to write the new part and sync it.
    pub save_seconds: f64,
}

/// Drafts of the prediction layer.
#[derive(Clone, Debug, Serialize)]
pub struct Mtp {
    /// `auto`, `off`, or the requested number of drafts.
    pub mode: String,
    /// `on` or `off` at the end of the run; `absent` if the layer is missing, does not fit in memory, or failed to load.
    pub state: &'static str,
    /// Drafts for the next pass.
    pub depth: usize,
    pub drafted: u64,
    pub accepted: u64,
    /// Passes after the prompt.
    pub forwards: u64,
    pub tokens_per_forward: f64,
}

impl Mtp {
    /// `loaded` tells whether the prediction layer was loaded.
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

/// Statistics of the model and the expert store.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EngineStats {
    /// `uring` or `pread`.
    pub engine: String,
    /// `exact` or `int8`.
    pub activations: Activations,
    /// `active`, `off` (`--dsa off`), `absent` (no indexer tensors), or `none` (no indexer in the config).
    pub sparse_attention: &'static str,
    /// Whether all expert reads bypass the page cache.
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
    /// Experts pinned because earlier runs used them most.
    pub pinned: u64,
    /// Runs in the model's usage history.
    pub usage_runs: u64,
    /// Router predictions by layer.
    pub lookahead: Vec<PrefetchStats>,
    pub ring_enters: u64,
    /// Bytes in flight per drive at the end of the run; the engine tunes them.
    pub window_bytes: Vec<u64>,
    pub replicas: Vec<Replica>,
    pub latency_us: Latency,
}

impl EngineStats {
    /// Collects the statistics of `runner`.
    pub fn new(runner: &mut TextRunner, model: &Model) -> EngineStats {
        let phases = runner.stats().phases;
        let seconds = |waiting: bool| -> f64 {
            let of_kind = phases
                .iter()
                .filter(|(phase, ..)| (*phase == Phase::IoWait) == waiting);
            of_kind.map(|(_, _, spent)| spent.as_secs_f64()).sum()
        };
        let usage_runs = runner.usage_runs();
        let sparse_attention = match runner.weights().sparsity() {
            Sparsity::Active(_) => "active",
            Sparsity::Zero => "none",
            Sparsity::Off => "off",
            Sparsity::Absent => "absent",
        };
        let store = runner.store_mut();
        let stream = store.stats();
        let mut stats = EngineStats {
            engine: store.device().to_owned(),
            activations: store.activations(),
            sparse_attention,
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

/// The reads from each directory of the model and from each mirror.
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

/// How a layer's predictions compare with its router's choices. Prompts do not count.
#[derive(Clone, Debug, Serialize)]
pub struct PrefetchStats {
    pub layer: usize,
    /// Experts predicted per token, at the end of the run.
    pub width: usize,
    pub guessed: u64,
    /// Fraction of the predictions that were used; `null` without predictions.
    pub precision: Option<f64>,
    /// Fraction of the used experts that were predicted.
    pub recall: f64,
    /// Fraction of the used experts among the same number of top candidates.
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

/// Read latency in microseconds, from submission to completion.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Latency {
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub max: u64,
}

/// Peak resident memory in bytes; 0 if /proc cannot be read.
pub fn peak_rss_bytes() -> u64 {
    status_bytes("VmHWM:")
}

/// Resident memory in bytes; 0 if /proc cannot be read.
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
