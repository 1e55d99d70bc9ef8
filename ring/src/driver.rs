//! Scheduler and device together, driven by whichever thread owns them.

use std::io;

use crate::device::{Completion, Device};
use crate::schedule::{Event, Scheduler};

/// Moves chunks from the scheduler to the device and completions back.
#[derive(Debug)]
pub struct Driver<D> {
    device: D,
    /// What to read.
    pub scheduler: Scheduler,
    ended: Vec<Completion>,
    /// A wait that ends at every single read costs one entry into the kernel a read. Reads of this many bytes may be
    /// waited for at once without letting a drive run dry, since its window holds more.
    batch_bytes: u64,
    /// Bytes read when a wait last ended at the first completion.
    waited_early_at: Option<u64>,
}

impl<D: Device> Driver<D> {
    /// A driver of `device`, which must have room for [`Scheduler::max_in_flight`] reads. Reads of about `batch_bytes` bytes
    /// may be waited for at once.
    pub fn new(device: D, scheduler: Scheduler, batch_bytes: u64) -> Driver<D> {
        Driver {
            device,
            scheduler,
            ended: Vec::new(),
            batch_bytes,
            waited_early_at: None,
        }
    }

    /// Fills every drive's window, waits for completions if anything is at the device, and hands them to the scheduler.
    ///
    /// # Errors
    /// When the device's kernel interface fails.
    pub fn step(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        let idle = self.scheduler.in_flight() == 0;
        let now = self.device.now();
        while let Some(op) = self.scheduler.next(now) {
            self.device.submit(op);
        }
        if self.scheduler.in_flight() == 0 {
            return Ok(());
        }
        let min = self.completions_to_wait_for(idle);
        self.device.wait(min, &mut self.ended)?;
        let now = self.device.now();
        for ended in self.ended.drain(..) {
            self.scheduler.complete(ended, now, events);
        }
        self.scheduler.stats.enters = self.device.enters();
        Ok(())
    }

    /// One completion after an idle time and once every `batch_bytes`, otherwise as many as carry `batch_bytes` on
    /// average. That bounds the entries into the kernel however small the reads are: one per `batch_bytes`, and a few for
    /// each batch of requests. Never more than the drive with the fewest has, so that a drive that is slow, or has stalled,
    /// keeps no other waiting.
    fn completions_to_wait_for(&mut self, idle: bool) -> usize {
        let read: u64 = self.scheduler.stats.sources.iter().map(|s| s.bytes).sum();
        if idle
            || self
                .waited_early_at
                .is_none_or(|at| read - at >= self.batch_bytes)
        {
            self.waited_early_at = Some(read);
            return 1;
        }
        let in_flight = self.scheduler.in_flight();
        let mean = (self.scheduler.bytes_in_flight() / in_flight as u64).max(1);
        let fewest = self.scheduler.fewest_in_flight();
        (self.batch_bytes.div_ceil(mean) as usize).clamp(1, fewest)
    }
}
