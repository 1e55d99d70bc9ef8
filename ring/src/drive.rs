//! Tracks a drive: its window, its reads in flight and its measured speed.

use std::time::Duration;

use crate::window::Search;

/// How much a drive gets at once. The smallest window that keeps it busy is the best, because a more urgent read cannot overtake
/// those that the drive has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Bytes, unless a single read is larger.
    pub bytes: u64,
    /// Reads; fewer than the drive has tags, beyond which submission blocks.
    pub reads: usize,
}

impl Default for Window {
    fn default() -> Window {
        Window {
            bytes: 8 << 20,
            reads: 64,
        }
    }
}

/// A drive: all copies with the same [`Replica::drive`](crate::Replica::drive).
#[derive(Debug, Default)]
pub(crate) struct Drive {
    pub(crate) id: u64,
    pub(crate) window: Window,
    pub(crate) reads_in_flight: usize,
    pub(crate) bytes_in_flight: u64,
    /// When it last ended a read, or got one while it was idle.
    last: Duration,
    /// Bytes that it read and the seconds that they took, older ones with less weight.
    read: f64,
    took: f64,
    search: Option<Search>,
}

impl Drive {
    /// Seconds of work after which a measurement of its speed has half of its weight.
    const MEMORY: f64 = 0.5;

    pub(crate) fn new(id: u64, window: Window) -> Drive {
        Drive {
            id,
            window,
            ..Drive::default()
        }
    }

    /// Starts the search for its window within `bounds` (bytes, both included).
    pub(crate) fn search(&mut self, bounds: (u64, u64)) {
        self.search = Some(Search::new(self.window.bytes, bounds));
    }

    /// Whether a `1 / share` of its window has capacity for a read.
    pub(crate) fn has_capacity(&self, share: u64) -> bool {
        let bytes = (self.window.bytes / share).max(1);
        let reads = (self.window.reads / share as usize).max(1);
        self.reads_in_flight < reads && self.bytes_in_flight < bytes
    }

    /// Counts a read that it gets.
    pub(crate) fn launch(&mut self, bytes: u64, now: Duration) {
        if self.reads_in_flight == 0 {
            self.last = now;
        }
        self.reads_in_flight += 1;
        self.bytes_in_flight += bytes;
    }

    /// Counts a read that it ended. Its speed is measured while it is busy: with few reads at once, every drive is slow.
    pub(crate) fn complete(&mut self, bytes: u64, now: Duration) {
        let took = now.saturating_sub(self.last).as_secs_f64();
        let full = !self.has_capacity(1);
        let busy = self.bytes_in_flight >= self.window.bytes / 4
            || self.reads_in_flight >= self.window.reads.div_ceil(4);
        if busy {
            let keep = Drive::MEMORY / (Drive::MEMORY + took);
            self.read = self.read * keep + bytes as f64;
            self.took = self.took * keep + took;
        }
        self.last = now;
        self.reads_in_flight -= 1;
        self.bytes_in_flight -= bytes;
        if let Some(search) = &mut self.search {
            search.ended(bytes, took, full);
            self.window.bytes = search.window();
        }
    }

    /// Bytes a second, once measured; less if it has been silent for longer than that speed explains.
    pub(crate) fn speed(&self, now: Duration) -> Option<f64> {
        /// Seconds of work below which a measurement says nothing.
        const LEAST: f64 = 0.002;
        if self.took < LEAST {
            return None;
        }
        let measured = self.read / self.took;
        let silent = now.saturating_sub(self.last).as_secs_f64();
        let explained = self.bytes_in_flight as f64 / silent.max(f64::MIN_POSITIVE);
        let speed = if self.reads_in_flight > 0 {
            measured.min(explained)
        } else {
            measured
        };
        Some(speed.max(1.0))
    }
}
