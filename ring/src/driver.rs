//! Moves chunks from the scheduler to the device and completions back.

use std::time::Instant;

use crate::device::{Completion, Device};
use crate::event::Event;
use crate::kernel::DeviceError;
use crate::schedule::Scheduler;

/// A wait that returns at every read costs one system call a read. So the number of such waits is limited: one for `batch_bytes`
/// that were read, and this many for each batch, because the caller waits for its first completions.
const SYSCALLS_PER_BATCH: u64 = 2;

/// Drives a device from the thread that owns it.
pub(crate) struct Driver {
    device: Box<dyn Device>,
    pub(crate) scheduler: Scheduler,
    /// Scratch.
    ended: Vec<Completion>,
    /// A wait may last until about this many bytes have been read; 0: it returns at the first completion.
    batch_bytes: u64,
    batches: u64,
    waits: u64,
}

impl Driver {
    /// A driver of `device`, which has capacity for [`Scheduler::max_in_flight`] reads.
    pub(crate) fn new(
        device: Box<dyn Device>,
        mut scheduler: Scheduler,
        batch_bytes: u64,
    ) -> Driver {
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

    /// Fills every drive's window, waits for completions if `wait` is set and the device has reads, and gives them to the
    /// scheduler.
    pub(crate) fn step(&mut self, wait: bool, events: &mut Vec<Event>) -> Result<(), DeviceError> {
        self.fill()?;
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
    pub(crate) fn fill(&mut self) -> Result<(), DeviceError> {
        let now = self.device.now();
        while let Some(op) = self.scheduler.next(now) {
            // SAFETY: a byte of a slab belongs to one chunk, and the scheduler gives that to one op at a time. The engine lends the
            // bytes of a part after the completions of all its chunks, and pushes chunks only into slabs that it does not lend. A
            // probe writes into a slab of its drive that is never lent, and a drive has one at a time.
            unsafe { self.device.submit(op)? };
        }
        Ok(())
    }

    /// Waits for `min` completions and gives them to the scheduler.
    pub(crate) fn wait(&mut self, min: usize, events: &mut Vec<Event>) -> Result<(), DeviceError> {
        self.device.wait(min, &mut self.ended)?;
        let now = self.device.now();
        for ended in self.ended.drain(..) {
            self.scheduler.complete(ended, now, events);
        }
        self.scheduler.stats.syscalls = self.device.syscalls();
        Ok(())
    }

    /// Whether the device's time is behind a clock that the caller advances.
    pub(crate) fn lags_clock(&self) -> bool {
        self.device.lags_clock()
    }

    /// Starts a batch: the reads that follow are needed together.
    pub(crate) fn begin_batch(&mut self) {
        self.batches += 1;
    }

    /// How many completions the next wait waits for; 0 if the device has no reads. One while the waits so far are within the limit.
    /// Beyond it, as many as carry `batch_bytes` on average, so that small reads cost no more system calls than large ones. Never
    /// more than the busy drive with the fewest reads has, so that a slow drive keeps no other waiting, and half of that while
    /// demands wait, so that none idles. Never more than there are demands in flight, so that no demand waits for the prefetches
    /// behind it.
    pub(crate) fn completions_to_wait_for(&mut self) -> usize {
        if self.scheduler.in_flight() == 0 {
            return 0;
        }
        let read = self.scheduler.stats.bytes();
        let limit = read
            .checked_div(self.batch_bytes)
            .map(|n| n + self.batches * SYSCALLS_PER_BATCH);
        self.waits += 1;
        if limit.is_none_or(|limit| self.waits <= limit) {
            return 1;
        }
        let in_flight = self.scheduler.in_flight();
        let mean = (self.scheduler.bytes_in_flight() / in_flight as u64).max(1);
        let fewest = self.scheduler.fewest_in_flight();
        let most = match (
            self.scheduler.demands_wait(),
            self.scheduler.demands_in_flight(),
        ) {
            (true, _) => fewest.div_ceil(2),
            (false, 0) => fewest,
            (false, demands) => fewest.min(demands),
        };
        (self.batch_bytes.div_ceil(mean) as usize).clamp(1, most)
    }
}
