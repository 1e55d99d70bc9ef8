//! Simulates drives of given bandwidth and latency, which may slow down or fail, on a virtual clock. It reads nothing.
//!
//! A simulation runs on the caller's thread and depends only on the requests and the [`Clock`], so that it can be repeated
//! exactly. It tests scheduler and store on drives that misbehave, and it estimates the speed of machines that you do not have.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::device::{Completion, Device, Op, Waker};
use crate::kernel::DeviceError;

/// A simulated drive. It serves one read after the other at its bandwidth; latencies overlap.
#[derive(Clone, Debug)]
pub struct SimDrive {
    /// Bytes per second.
    pub bandwidth: u64,
    /// From the end of a read's transfer to its completion.
    pub latency: Duration,
    /// Times from which it has another bandwidth, also for the read that it serves then; ascending.
    pub changes: Vec<(Duration, u64)>,
    /// From this time on, every read fails with EIO.
    pub fails_at: Option<Duration>,
    /// Each read whose number is a multiple of it comes short; 0: none.
    pub short_every: u64,
    /// It completes its whole queue in one burst, as some virtual drives do.
    pub bursts: bool,
    /// A read takes up to this part longer or shorter, evenly distributed.
    pub jitter: f64,
}

/// Bytes that a read cannot be cut within.
const BLOCK: u64 = 4096;

impl SimDrive {
    /// A drive that never changes or fails.
    pub fn new(bandwidth: u64, latency: Duration) -> SimDrive {
        SimDrive {
            bandwidth,
            latency,
            changes: Vec::new(),
            fails_at: None,
            short_every: 0,
            bursts: false,
            jitter: 0.0,
        }
    }

    /// When it has transferred `bytes` if it begins at `start`.
    fn transferred(&self, bytes: f64, start: Duration) -> Duration {
        let later = self.changes.iter().position(|(from, _)| *from > start);
        let later = later.unwrap_or(self.changes.len());
        let now = later.checked_sub(1).map(|i| self.changes[i].1);
        let mut rate = now.unwrap_or(self.bandwidth).max(1) as f64;
        let (mut time, mut left) = (start, bytes);
        for (from, next) in &self.changes[later..] {
            let until_then = (*from - time).as_secs_f64() * rate;
            if until_then >= left {
                break;
            }
            left -= until_then;
            (time, rate) = (*from, (*next).max(1) as f64);
        }
        time + Duration::from_secs_f64(left / rate)
    }

    /// How much longer its read number `read` takes.
    fn stretch(&self, read: u64) -> f64 {
        let hash = read.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let hash = (hash ^ (hash >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let even = (hash >> 11) as f64 * (-53f64).exp2();
        (1.0 + self.jitter * (2.0 * even - 1.0)).max(0.0)
    }
}

/// The time of a simulation. The caller advances it for its own work; waiting for a read advances it, too.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    /// Time since the start.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    /// Advances it by the time that the caller's work takes.
    pub fn advance(&self, by: Duration) {
        self.0
            .store(nanos(self.now().saturating_add(by)), Ordering::Relaxed);
    }

    fn reach(&self, time: Duration) {
        self.0.fetch_max(nanos(time), Ordering::Relaxed);
    }
}

/// Saturates after 584 years.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A read that a drive has.
#[derive(Debug)]
struct Flight {
    drive: usize,
    end: Duration,
    completion: Completion,
}

/// The simulated device.
#[derive(Debug)]
pub(crate) struct Sim {
    drives: Vec<SimDrive>,
    /// When each drive has served its queue.
    free_at: Vec<Duration>,
    reads: Vec<u64>,
    /// For each file and copy, its drive.
    drive_of: Vec<Vec<usize>>,
    /// Sorted by end.
    flights: VecDeque<Flight>,
    clock: Clock,
    /// The device's own time, never ahead of the clock.
    now: Duration,
    waits: u64,
}

impl Sim {
    pub(crate) fn new(drives: Vec<SimDrive>, drive_of: Vec<Vec<usize>>, clock: Clock) -> Sim {
        Sim {
            free_at: vec![Duration::ZERO; drives.len()],
            reads: vec![0; drives.len()],
            drives,
            drive_of,
            flights: VecDeque::new(),
            now: clock.now(),
            clock,
            waits: 0,
        }
    }
}

// SAFETY: it writes nothing.
unsafe impl Device for Sim {
    unsafe fn submit(&mut self, op: Op) -> Result<(), DeviceError> {
        let d = self.drive_of[op.file as usize][op.copy as usize];
        let drive = &self.drives[d];
        let start = self.free_at[d].max(self.now);
        self.reads[d] += 1;
        let stretch = drive.stretch(self.reads[d]);
        self.free_at[d] = drive.transferred(op.len as f64 * stretch, start);
        let end = self.free_at[d] + drive.latency.mul_f64(stretch);
        let failed = drive.fails_at.is_some_and(|from| from <= end);
        let short = drive.short_every > 0 && self.reads[d].is_multiple_of(drive.short_every);
        let result = match (failed, short) {
            (true, _) => Err(io::Error::from_raw_os_error(libc::EIO)),
            // Whole blocks, as drives do: a retry of the last one ends it, also where every retry comes short.
            (false, true) => Ok((op.len / 2).next_multiple_of(BLOCK).min(op.len)),
            (false, false) => Ok(op.len),
        };
        if drive.bursts {
            let others = self.flights.iter_mut().filter(|f| f.drive == d);
            others.for_each(|f| f.end = end);
            self.flights.make_contiguous().sort_by_key(|f| f.end);
        }
        let flight = Flight {
            drive: d,
            end,
            completion: Completion { id: op.id, result },
        };
        let at = self.flights.partition_point(|f| f.end <= end);
        self.flights.insert(at, flight);
        Ok(())
    }

    fn wait(&mut self, min: usize, ended: &mut Vec<Completion>) -> Result<(), DeviceError> {
        self.waits += 1;
        let mut left = min;
        while let Some(next) = self.flights.front() {
            // Completions before the clock's time come one moment at a time, so that the windows are refilled at that moment, as
            // a ring thread does.
            let due = next.end <= self.now || (ended.is_empty() && next.end <= self.clock.now());
            if !due && left == 0 {
                break;
            }
            self.now = self.now.max(next.end);
            self.clock.reach(self.now);
            ended.extend(self.flights.pop_front().map(|f| f.completion));
            left = left.saturating_sub(1);
        }
        if ended.is_empty() {
            self.now = self.now.max(self.clock.now());
        }
        Ok(())
    }

    fn now(&self) -> Duration {
        self.now
    }

    fn waker(&self) -> Waker {
        Arc::new(|| {})
    }

    fn syscalls(&self) -> u64 {
        self.waits
    }

    fn lags_clock(&self) -> bool {
        self.now < self.clock.now()
    }
}
