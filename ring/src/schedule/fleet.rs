//! Picks the drive that reads a chunk.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::job::Waiting;
use super::routes::{Route, usable};
use crate::drive::Drive;
use crate::event::Priority;
use crate::options::Options;
use crate::shares::WeightedShares;
use crate::speed::Line;

/// Bytes of a chunk by which drives are compared.
const CHUNK: u64 = 512 << 10;

/// The drives, and what waits for them.
#[derive(Debug)]
pub(super) struct Fleet {
    pub(super) drives: Vec<Drive>,
    /// Bytes that no device has, by [`Priority`].
    pub(super) waiting_bytes: [u64; 3],
    /// Prefetches and preloads may fill a `1 / prefetch_share` of a drive's window.
    pub(super) prefetch_share: u64,
    pub(super) shares: Option<WeightedShares>,
    /// Every drive has a copy of every file, and none has failed.
    pub(super) everywhere: bool,
    /// Probes measure every drive, so that none gets a read before.
    pub(super) probing: bool,
    /// By drive, at the time of the last [`Fleet::begin`].
    offers: Vec<Offer>,
    /// Bytes that each drive has read lately.
    served: Vec<u64>,
    /// How many drives read a fair part of that.
    pub(super) serving: Arc<AtomicUsize>,
}

/// What a drive offers for the next chunk.
#[derive(Clone, Copy, Debug)]
struct Offer {
    /// It may get a read of the present priority.
    capacity: bool,
    /// Its speed, or an assumption; `None` before its first probe has ended.
    line: Option<Line>,
    /// Bytes that it has.
    in_flight: u64,
}

impl Fleet {
    pub(super) fn new(
        mut drives: Vec<Drive>,
        files: &[Vec<Route>],
        weights: Option<Vec<u32>>,
    ) -> Fleet {
        for copies in files {
            for route in copies {
                let choice = copies.iter().any(|other| other.drive != route.drive);
                drives[route.drive].measured |= choice && weights.is_none();
            }
        }
        let holds = |copies: &[Route], drive| copies.iter().any(|copy| copy.drive == drive);
        let everywhere = |drive| files.iter().all(|copies| holds(copies, drive));
        Fleet {
            waiting_bytes: [0; 3],
            prefetch_share: Options::default().prefetch_share,
            shares: weights.map(WeightedShares::new),
            everywhere: (0..drives.len()).all(everywhere),
            probing: false,
            offers: Vec::with_capacity(drives.len()),
            served: vec![0; drives.len()],
            serving: Arc::new(AtomicUsize::new(drives.len())),
            drives,
        }
    }

    /// Whether a drive may get a read of this priority now. Nothing of lower priority overtakes demands that are held back.
    fn has_capacity(&self, drive: &Drive, priority: Priority) -> bool {
        let share = match priority {
            Priority::Demand => 1,
            Priority::Prefetch | Priority::Preload => self.prefetch_share,
        };
        drive.has_capacity(share) && !self.defer_tail(drive)
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

    /// Prepares [`Fleet::choose`] for chunks of a priority. Returns whether a drive may take one, with `in_front` bytes of higher
    /// priority left to drives without capacity.
    pub(super) fn begin(&mut self, priority: Priority, in_front: u64, now: Duration) -> bool {
        if let [drive] = &self.drives[..] {
            return self.has_capacity(drive, priority);
        }
        let mut offers = std::mem::take(&mut self.offers);
        offers.clear();
        offers.extend(self.drives.iter().map(|drive| Offer {
            capacity: self.has_capacity(drive, priority),
            line: drive.line(now, false),
            in_flight: drive.bytes_in_flight,
        }));
        let fastest = (offers.iter().enumerate())
            .filter_map(|(d, offer)| Some((offer.line?.seconds(CHUNK), d)))
            .min_by(|a, b| a.0.total_cmp(&b.0));
        match fastest {
            // Or a wrong estimate confirms itself: it would never get a longer queue, which tells latency and bandwidth apart.
            Some((_, d)) => offers[d].line = self.drives[d].line(now, true),
            None if self.probing => {}
            None => (offers.iter_mut()).for_each(|offer| offer.line = Some(Line::EQUAL)),
        }
        for (offer, drive) in offers.iter_mut().zip(&self.drives) {
            // One read until it ends.
            if offer.line.is_none() && !(self.probing && drive.measured) {
                offer.capacity &= drive.reads_in_flight == 0;
                offer.line = Some(Line::EQUAL);
            }
        }
        self.offers = offers;
        (self.offers.iter()).any(|offer| offer.capacity) && !self.is_futile(in_front)
    }

    /// Whether the drives without capacity will have read all that waits before another drive has read anything.
    fn is_futile(&self, in_front: u64) -> bool {
        if !self.everywhere || self.shares.is_some() {
            return false;
        }
        let waiting: u64 = self.waiting_bytes.iter().sum();
        let mut full = Full::default();
        let mut first = f64::INFINITY;
        for offer in &self.offers {
            match offer.line {
                Some(line) if offer.capacity => first = first.min(line.seconds(offer.in_flight)),
                Some(line) => full.add(line, offer.in_flight),
                None => {}
            }
        }
        full.reach(in_front + waiting) < first
    }

    /// Which copy of a chunk to read now: the one on the drive that finishes it first. While that drive has no capacity, another
    /// takes the chunk only if it finishes no later than the drives without capacity would, which first read the `in_front` bytes
    /// that wait before it. So a slow drive reads from the end of the queue.
    pub(super) fn choose(&self, copies: &[Route], waiting: &Waiting, in_front: u64) -> Option<u8> {
        let len = waiting.len();
        if let Some(shares) = &self.shares {
            let source = |copy: u8| copies[copy as usize].replica.source;
            let capacity = |copy: u8| self.capacity(copies[copy as usize].drive);
            let weighted =
                || usable(copies, waiting.failed).filter(|c| shares.weight(source(*c)) > 0);
            // Where only copies without a weight are left, the first to finish serves.
            if weighted().next().is_some() {
                return shares.choose(weighted().map(|c| (c, source(c), capacity(c))));
            }
        }
        if let [only] = copies {
            return self.capacity(only.drive).then_some(0);
        }
        let mut best: Option<(f64, u8)> = None;
        let mut full = Full::default();
        let mut left = 0;
        for copy in usable(copies, waiting.failed) {
            let drive = copies[copy as usize].drive;
            left += 1;
            // One drive: it has capacity.
            let Some(offer) = self.offers.get(drive) else {
                return Some(copy);
            };
            let Some(line) = offer.line else { continue };
            let end = line.seconds(offer.in_flight + len);
            if !offer.capacity {
                full.add(line, offer.in_flight);
            } else if best.is_none_or(|(other, _)| end < other) {
                best = Some((end, copy));
            }
        }
        if left == 1 && best.is_none() {
            // A drive that has not been measured reads what no other can.
            let copy = usable(copies, waiting.failed).next()?;
            return self.capacity(copies[copy as usize].drive).then_some(copy);
        }
        let (end, copy) = best?;
        (end <= full.reach(in_front + len)).then_some(copy)
    }

    fn capacity(&self, drive: usize) -> bool {
        // With one drive, there is capacity, or this would not be asked.
        self.offers.get(drive).is_none_or(|offer| offer.capacity)
    }

    /// Counts a read of `bytes` that a drive has ended, and that brought `delivered` bytes.
    pub(super) fn complete(&mut self, drive: usize, bytes: u64, delivered: u64, now: Duration) {
        /// Bytes after which what was read before has half of its weight.
        const LATELY: u64 = 64 << 20;
        /// A drive that reads less than this part of what the busiest reads is idle for most of the time.
        const PART: u64 = 8;
        self.drives[drive].complete(bytes, delivered, now);
        if self.drives.len() == 1 {
            return;
        }
        self.served[drive] += delivered;
        if self.served[drive] > LATELY {
            self.served.iter_mut().for_each(|served| *served /= 2);
        }
        let most = self.served.iter().max().copied().unwrap_or(0);
        let serving = self.served.iter().filter(|s| **s * PART >= most).count();
        self.serving.store(serving, Ordering::Relaxed);
    }
}

/// Drives without capacity: when they are done with what they have, and how fast they go on.
#[derive(Clone, Copy, Debug, Default)]
struct Full {
    latency: f64,
    in_flight: u64,
    rate: f64,
}

impl Full {
    fn add(&mut self, line: Line, in_flight: u64) {
        let first = self.rate == 0.0 || line.latency < self.latency;
        self.latency = if first { line.latency } else { self.latency };
        self.in_flight += in_flight;
        self.rate += 1.0 / line.per_byte.max(f64::MIN_POSITIVE);
    }

    /// Seconds until they have read `waiting` bytes, too; without a drive for ever.
    fn reach(&self, waiting: u64) -> f64 {
        self.latency + (self.in_flight + waiting) as f64 / self.rate
    }
}
