//! Counts what the reads of an engine did.

use std::time::Duration;

use hdrhistogram::Histogram;

/// Reads and bytes of one source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceStats {
    /// Bytes read, alignment included.
    pub bytes: u64,
    /// Finished reads.
    pub reads: u64,
    /// Failed reads.
    pub errors: u64,
}

/// What the reads of an engine did so far.
#[derive(Clone, Debug)]
pub struct Stats {
    /// By [`Replica::source`](crate::Replica::source).
    pub sources: Vec<SourceStats>,
    /// Bytes read only to measure drives, which no source's bytes include.
    pub probe_bytes: u64,
    /// Time from submission to completion of each read, in microseconds.
    pub latency_us: Histogram<u64>,
    /// Calls of io_uring_enter, to submit or to wait.
    pub syscalls: u64,
    /// Whether every copy is read with O_DIRECT. A file system that refuses such a read clears it.
    pub direct: bool,
    /// Present window of each drive in bytes.
    pub windows: Vec<u64>,
}

/// A histogram of latencies up to a minute, in microseconds.
pub(crate) fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000, 3).expect("valid bounds")
}

impl Stats {
    pub(crate) fn new(sources: usize) -> Stats {
        Stats {
            sources: vec![SourceStats::default(); sources],
            probe_bytes: 0,
            latency_us: latencies(),
            syscalls: 0,
            direct: false,
            windows: Vec::new(),
        }
    }

    /// Bytes of all sources.
    pub fn bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.bytes).sum()
    }

    pub(crate) fn record_latency(&mut self, latency: Duration) {
        self.latency_us
            .saturating_record(latency.as_micros() as u64);
    }
}
