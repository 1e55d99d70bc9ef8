//! Counts what the engine does, for others to read while it runs.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A number that the engine sets or adds to.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }
}

/// Reads of one directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceReads {
    /// The directory.
    pub dir: PathBuf,
    /// Bytes read.
    pub bytes: u64,
    /// Reads.
    pub reads: u64,
    /// Reads that failed.
    pub errors: u64,
}

/// Counts since the engine was started.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Requests in passes.
    pub running: Count,
    /// Requests whose pages are in files.
    pub swapped: Count,
    /// Tokens of prompts.
    pub prompt_tokens: Count,
    /// Tokens of prompts whose rows were in memory.
    pub cached_tokens: Count,
    /// New tokens.
    pub generated_tokens: Count,
    /// Passes.
    pub passes: Count,
    /// Rows of all passes.
    pub rows: Count,
    /// Nanoseconds that passes waited for reads.
    pub io_wait: Count,
    /// Nanoseconds that passes computed.
    pub compute: Count,
    /// Demanded experts that were in memory.
    pub hits: Count,
    /// Demanded experts that had to be read.
    pub misses: Count,
    /// Sequences swapped to files so far.
    pub swaps: Count,
    /// KV pages.
    pub pages: Count,
    /// KV pages that can be given to sequences.
    pub free_pages: Count,
    sources: Mutex<Vec<SourceReads>>,
}

impl Metrics {
    /// The directories and mirrors that experts are read from.
    pub fn sources(&self) -> Vec<SourceReads> {
        let sources = self.sources.lock();
        sources.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_sources(&self, sources: Vec<SourceReads>) {
        *self.sources.lock().unwrap_or_else(PoisonError::into_inner) = sources;
    }

    pub(super) fn pass(&self, rows: usize, io_wait: Duration, compute: Duration) {
        self.passes.add(1);
        self.rows.add(rows as u64);
        self.io_wait.add(io_wait.as_nanos() as u64);
        self.compute.add(compute.as_nanos() as u64);
    }
}
