//! Scheduler and device together, driven by whichever thread owns them.

use std::io;
use std::time::Instant;

use crate::device::{Completion, Device};
use crate::schedule::{Event, Scheduler};

/// A wait that ends at every single read costs one entry into the kernel a read, so it has to be earned: by some bytes
/// read, or by a batch of requests, whose first completions somebody waits for.
const ENTERS_PER_BATCH: u64 = 2;

/// Moves chunks from the scheduler to the device and completions back.
#[derive(Debug)]
pub struct Driver<D> {
    device: D,
    /// What to read.
    pub scheduler: Scheduler,
    ended: Vec<Completion>,
    /// Reads of about this many bytes may be waited for at once; 0: a wait ends at the first completion.
    batch_bytes: u64,
    batches: u64,
    waits: u64,
}

impl<D: Device> Driver<D> {
    /// A driver of `device`, which must have room for [`Scheduler::max_in_flight`] reads. Reads of about `batch_bytes` bytes
    /// may be waited for at once.
    pub fn new(device: D, mut scheduler: Scheduler, batch_bytes: u64) -> Driver<D> {
        if let Some(record) = &mut scheduler.record {
            let now = Instant::now();
            record.epoch = now.checked_sub(device.now()).unwrap_or(now);
        }
        Driver {
            device,
            scheduler,
            ended: Vec::new(),
            batch_bytes,
            batches: 0,
            waits: 0,
        }
    }

    /// Fills every drive's window, waits for completions if `wait` is set and anything is at the device, and hands them to
    /// the scheduler.
    ///
    /// # Errors
    /// When the device's kernel interface fails.
    pub fn step(&mut self, wait: bool, events: &mut Vec<Event>) -> io::Result<()> {
        self.fill();
        let min = if wait {
            self.completions_to_wait_for()
        } else {
            0
        };
        if wait && min == 0 {
            return Ok(());
        }
        self.wait(min, events)
    }

    /// Fills every drive's window.
    pub(crate) fn fill(&mut self) {
        let now = self.device.now();
        while let Some(op) = self.scheduler.next(now) {
            self.device.submit(op);
        }
    }

    /// Waits for `min` completions and hands them to the scheduler.
    pub(crate) fn wait(&mut self, min: usize, events: &mut Vec<Event>) -> io::Result<()> {
        self.device.wait(min, &mut self.ended)?;
        let now = self.device.now();
        for ended in self.ended.drain(..) {
            self.scheduler.complete(ended, now, events);
        }
        self.scheduler.stats.enters = self.device.enters();
        Ok(())
    }

    /// Whether the device has to catch up with a clock.
    pub(crate) fn behind(&self) -> bool {
        self.device.behind()
    }

    /// New requests are about to be pushed.
    pub fn begin_batch(&mut self) {
        self.batches += 1;
    }

    /// None if nothing is at the device. One, as long as the entries into the kernel stay below what has been earned; beyond that, as many as carry
    /// `batch_bytes` on average, so that every further entry earns itself, however small the reads are. Never more than the drive with
    /// the fewest has, so that a drive that is slow, or has stalled, keeps no other waiting, and half of that while demands wait, so that none idles.
    pub(crate) fn completions_to_wait_for(&mut self) -> usize {
        if self.scheduler.in_flight() == 0 {
            return 0;
        }
        let read = self.scheduler.stats.bytes();
        let earned = read
            .checked_div(self.batch_bytes)
            .map(|n| n + self.batches * ENTERS_PER_BATCH);
        self.waits += 1;
        if earned.is_none_or(|earned| self.waits <= earned) {
            return 1;
        }
        let in_flight = self.scheduler.in_flight();
        let mean = (self.scheduler.bytes_in_flight() / in_flight as u64).max(1);
        let fewest = self.scheduler.fewest_in_flight();
        let most = match self.scheduler.demands_wait() {
            true => fewest.div_ceil(2),
            false => fewest,
        };
        (self.batch_bytes.div_ceil(mean) as usize).clamp(1, most)
    }
}
