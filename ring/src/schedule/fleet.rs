//! Picks the drive that reads a chunk.

use std::time::Duration;

use super::job::Waiting;
use super::routes::{Route, usable};
use crate::drive::Drive;
use crate::event::Priority;
use crate::shares::WeightedShares;

/// The drives, and what waits for them.
#[derive(Debug)]
pub(super) struct Fleet {
    pub(super) drives: Vec<Drive>,
    /// Bytes that no device has, by [`Priority`].
    pub(super) waiting_bytes: [u64; 3],
    /// Prefetches and preloads may fill a `1 / prefetch_share` of a drive's window.
    pub(super) prefetch_share: u64,
    pub(super) shares: Option<WeightedShares>,
}

impl Fleet {
    /// Whether a drive may get a read of this priority now.
    pub(super) fn has_capacity(&self, drive: &Drive, priority: Priority) -> bool {
        match priority {
            Priority::Demand => drive.has_capacity(1) && !self.defer_tail(drive),
            Priority::Prefetch | Priority::Preload => drive.has_capacity(self.prefetch_share),
        }
    }

    /// Holds back the tail of a demand batch on burst-completing drives: such a drive completes its whole queue at once, and the
    /// caller computes what has come while the drive reads the tail. A drive that completes reads one by one loses nothing,
    /// because what it has left keeps it busy.
    fn defer_tail(&self, drive: &Drive) -> bool {
        /// The tail is at most this part of a window.
        const TAIL: u64 = 4;
        let tail = drive.window.bytes / TAIL;
        let (has, waiting) = (
            drive.bytes_in_flight,
            self.waiting_bytes[Priority::Demand as usize],
        );
        has >= tail && waiting <= tail && has + waiting > 2 * tail
    }

    /// Which copy of a chunk to read now: the one on the drive that finishes it first. While that drive has no capacity, another
    /// takes the chunk only if it finishes before the drives without capacity could be done with all that waits: the last chunks
    /// of a batch are not left to a slow drive.
    pub(super) fn choose(
        &self,
        copies: &[Route],
        waiting: &Waiting,
        priority: Priority,
        now: Duration,
    ) -> Option<u8> {
        let len = waiting.len();
        if let Some(shares) = &self.shares {
            let source = |copy: u8| copies[copy as usize].replica.source;
            let capacity =
                |copy: u8| self.has_capacity(&self.drives[copies[copy as usize].drive], priority);
            let weighted =
                || usable(copies, waiting.failed).filter(|c| shares.weight(source(*c)) > 0);
            // Where only copies without a weight are left, the first to finish serves.
            if weighted().next().is_some() {
                return shares.choose(weighted().map(|c| (c, source(c), capacity(c))));
            }
        }
        let mut best: Option<(f64, u8)> = None;
        let (mut full_bytes, mut full_speed, mut full_first) = (0.0, 0.0, f64::INFINITY);
        for copy in usable(copies, waiting.failed) {
            let drive = &self.drives[copies[copy as usize].drive];
            let speed = self.speed(drive, now);
            let end = (drive.bytes_in_flight + len) as f64 / speed;
            if !self.has_capacity(drive, priority) {
                full_bytes += drive.bytes_in_flight as f64;
                full_speed += speed;
                full_first = end.min(full_first);
            } else if best.is_none_or(|(other, _)| end < other) {
                best = Some((end, copy));
            }
        }
        let (end, copy) = best?;
        let waiting_bytes: u64 = self.waiting_bytes.iter().sum();
        let helps = end <= full_first || end <= (full_bytes + waiting_bytes as f64) / full_speed;
        helps.then_some(copy)
    }

    /// Bytes a second of a drive; the mean of the others until it was measured.
    fn speed(&self, drive: &Drive, now: Duration) -> f64 {
        drive.speed(now).unwrap_or_else(|| {
            let known: Vec<f64> = self.drives.iter().filter_map(|d| d.speed(now)).collect();
            match known.len() {
                0 => 1.0,
                n => known.iter().sum::<f64>() / n as f64,
            }
        })
    }
}
