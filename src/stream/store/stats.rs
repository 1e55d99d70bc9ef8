//! Counts the requests of a store.

use crate::stream::prefetch_policy::PrefetchAccuracy;

/// Counts of the requests since the store was made.
#[derive(Clone, Debug, Default)]
pub struct StoreStats {
    /// Demanded experts that were in memory.
    pub hits: u64,
    /// Demanded experts that had to be read, or were being read.
    pub misses: u64,
    /// Prefetches whose reads were started.
    pub speculative_reads: u64,
    /// Of these, how many were then demanded.
    pub speculative_used: u64,
    /// Experts that are pinned.
    pub pinned: u64,
    /// Accuracy of the predictions, by layer.
    pub lookahead: Vec<PrefetchAccuracy>,
}
