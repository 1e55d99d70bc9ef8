//! Tracks a drive: its window, its reads in flight and its measured speed.

use std::time::Duration;

use crate::speed::{Line, Speed};
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
    /// Its speed is measured: another drive has copies of the same files.
    pub(crate) measured: bool,
    /// When it last ended a read, or got one while it was idle.
    pub(crate) last: Duration,
    /// It has ended no read since it was idle.
    started: bool,
    speed: Speed,
    search: Option<Search>,
}

impl Drive {
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
            self.started = true;
        }
        self.reads_in_flight += 1;
        self.bytes_in_flight += bytes;
    }

    /// Counts a read of `bytes` that has ended, and that brought `delivered` bytes.
    pub(crate) fn complete(&mut self, bytes: u64, delivered: u64, now: Duration) {
        let took = now.saturating_sub(self.last).as_secs_f64();
        let full = !self.has_capacity(1);
        if self.measured && delivered > 0 {
            self.speed.record(delivered, took, self.started);
            self.started = false;
        }
        self.last = now;
        self.reads_in_flight -= 1;
        self.bytes_in_flight -= bytes;
        if let Some(search) = &mut self.search {
            search.ended(bytes, took, full);
            self.window.bytes = search.window();
        }
    }

    /// Whether it has ended a read.
    pub(crate) fn is_known(&self) -> bool {
        self.speed.is_known()
    }

    /// Counts it as useless until it delivers something.
    pub(crate) fn give_up(&mut self) {
        self.speed.give_up();
    }

    /// How long it takes for reads: see [`Speed::line`].
    pub(crate) fn line(&self, now: Duration, hopeful: bool) -> Option<Line> {
        let silent = now.saturating_sub(self.last);
        self.speed.line(self.bytes_in_flight, silent, hopeful)
    }
}
