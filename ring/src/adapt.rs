//! The window of a drive, found while it reads: the smallest that keeps it busy.
//!
//! By Little's law what is at a drive is its speed times the time that a read takes. A drive that is kept busy by just enough
//! reads takes as long for each as if it had nothing else to do: more reads wait inside it, where nothing more urgent can
//! overtake them. So the window is the measured speed times the shortest time of a read, and a quarter more, which also lets it
//! grow: where it limits the speed, it limits it to itself over that time.

use std::time::Duration;

/// More than Little's law asks for: room to find out that more would be better.
const MARGIN: f64 = 1.25;

/// With less than this part of the window at work the drive is what limits the speed.
const LIMITED: f64 = 0.9;

/// A speed lower than this part of what it was is another drive, as it were: its times say nothing any more.
const SLOWED: f64 = 0.6;

/// It starts with a part of the most that it can become, which is enough for most drives.
const START: u64 = 4;

/// Reads after which the window is set anew, and times of a read that pass meanwhile: reads may end in step.
const READS: u32 = 32;
const TIMES: f64 = 8.0;

/// Finds a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adapt {
    /// At first, and whenever nothing better is known.
    start: u64,
    /// Bytes that end together when several reads are waited for at once: they are at the drive beside those that keep it busy.
    batch: u64,
    /// Length of the longest read so far; times of much shorter ones do not count.
    longest: u64,
    /// Shortest time of a long read in seconds.
    fastest: f64,
    /// Highest speed since then in bytes a second.
    speed: f64,
    /// What was read in how much time, and by how many reads, with a full window since the window was set.
    bytes: u64,
    took: f64,
    reads: u32,
    /// Whether the last read counted.
    counted: bool,
}

/// A read that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndedRead {
    pub(crate) bytes: u64,
    /// Since it was submitted.
    pub(crate) took: Duration,
    /// Since the read before it ended, or the drive got something to do.
    pub(crate) since_last: Duration,
    /// Whether the drive had a full window all that time.
    pub(crate) full: bool,
}

impl Adapt {
    /// At first the window is `start` bytes, and never more than four times as many. `batch` bytes may be waited for at once.
    pub(crate) fn new(start: u64, batch: u64) -> Adapt {
        Adapt {
            start,
            batch,
            longest: 0,
            fastest: f64::INFINITY,
            speed: 0.0,
            bytes: 0,
            took: 0.0,
            reads: 0,
            counted: false,
        }
    }

    /// A read has ended with a window of `window` bytes. Returns the new window in bytes, if there is one.
    pub(crate) fn ended(&mut self, read: EndedRead, window: u64) -> Option<u64> {
        if read.bytes > 2 * self.longest {
            self.fastest = f64::INFINITY;
        }
        self.longest = self.longest.max(read.bytes);
        if 2 * read.bytes > self.longest {
            self.fastest = self.fastest.min(read.took.as_secs_f64());
        }
        // Of reads that end at once, the first has emptied the window for the others.
        self.counted = read.full || (self.counted && read.since_last.is_zero());
        if !self.counted {
            return None;
        }
        self.bytes += read.bytes;
        self.took += read.since_last.as_secs_f64();
        self.reads += 1;
        if self.reads < READS || self.took < TIMES * self.fastest {
            return None;
        }
        let speed = self.bytes as f64 / self.took.max(f64::MIN_POSITIVE);
        (self.bytes, self.took, self.reads) = (0, 0.0, 0);
        if speed < SLOWED * self.speed {
            (self.fastest, self.speed) = (f64::INFINITY, speed);
            return Some(self.start);
        }
        self.speed = self.speed.max(speed);
        let most = self.start.saturating_mul(START);
        let busy = speed * self.fastest;
        // Every read takes the shortest time: the window is what limits the speed.
        let margin = if busy > LIMITED * window as f64 {
            2.0
        } else {
            MARGIN
        };
        let wanted = (margin * busy) as u64;
        Some(wanted.saturating_add(self.batch).min(most))
    }
}
