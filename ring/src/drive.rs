//! A drive: how much it may have at once, what it has, and how fast it is.

use std::time::Duration;

use crate::window::Search;

/// How much a drive may have at once. The smallest window that keeps it busy is the best: what is at the drive cannot be
/// overtaken by a more urgent read.
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

/// A drive: everything with the same [`Replica::drive`](crate::replica::Replica::drive).
#[derive(Debug, Default)]
pub(crate) struct Drive {
    pub(crate) id: u64,
    pub(crate) window: Window,
    pub(crate) reads_in_flight: usize,
    pub(crate) bytes_in_flight: u64,
    /// When it last had something to do for the first time, or ended a read.
    last: Duration,
    /// Bytes that it read and seconds that it took, the older the less.
    read: f64,
    took: f64,
    /// Where the window is sought.
    search: Option<Search>,
}

impl Drive {
    /// Seconds of work after which a measurement of its speed counts for half.
    const MEMORY: f64 = 0.5;

    pub(crate) fn new(id: u64, window: Window) -> Drive {
        Drive {
            id,
            window,
            ..Drive::default()
        }
    }

    /// From now on its window is sought within `bounds` (bytes, both included) while it works.
    pub(crate) fn search(&mut self, bounds: (u64, u64)) {
        self.search = Some(Search::new(self.window.bytes, bounds));
    }

    /// Whether it can take a read that may use a `1 / share` of the window.
    pub(crate) fn has_room(&self, share: u64) -> bool {
        let bytes = (self.window.bytes / share).max(1);
        let reads = (self.window.reads / share as usize).max(1);
        self.reads_in_flight < reads && self.bytes_in_flight < bytes
    }

    /// It gets a read.
    pub(crate) fn launch(&mut self, bytes: u64, now: Duration) {
        if self.reads_in_flight == 0 {
            self.last = now;
        }
        self.reads_in_flight += 1;
        self.bytes_in_flight += bytes;
    }

    /// It ended a read. Its speed is measured while it has enough to do: with little, every drive is slow.
    pub(crate) fn complete(&mut self, bytes: u64, now: Duration) {
        let took = now.saturating_sub(self.last).as_secs_f64();
        let full = !self.has_room(1);
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

    /// Bytes a second, if it was measured for a moment. Less if it has not ended a read for longer than that explains.
    pub(crate) fn speed(&self, now: Duration) -> Option<f64> {
        /// Seconds of work that say something.
        const MOMENT: f64 = 0.002;
        if self.took < MOMENT {
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
