//! A device on a virtual clock: drives of given bandwidth and latency that may slow down or fail. It reads nothing.
//!
//! Everything happens on the caller's thread and depends on nothing but the requests and the [`Clock`], so
//! that a run can be repeated exactly. It answers two questions: whether scheduler and store are right whatever
//! drives do, and how fast a machine would be that one does not have.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::device::{Completion, Device, Op, Waker};

/// A simulated drive. It serves one read after the other at its bandwidth; the latency is added to each and overlaps.
#[derive(Clone, Debug)]
pub struct SimDrive {
    /// Bytes per second; changes take effect for reads that begin later.
    pub bandwidth: u64,
    /// From the end of a read's transfer to its completion.
    pub latency: Duration,
    /// From this time on, another bandwidth.
    pub changes: Vec<(Duration, u64)>,
    /// From this time on, every read fails with EIO.
    pub fails_at: Option<Duration>,
    /// Every so many reads, one comes short; 0 for never.
    pub short_every: u64,
    /// It ends nothing before it has done all that it was given: what virtual drives do that serve their queue in one go.
    pub at_once: bool,
}

impl SimDrive {
    /// A drive that never changes or fails.
    pub fn new(bandwidth: u64, latency: Duration) -> SimDrive {
        SimDrive {
            bandwidth,
            latency,
            changes: Vec::new(),
            fails_at: None,
            short_every: 0,
            at_once: false,
        }
    }

    fn bandwidth_at(&self, time: Duration) -> u64 {
        let changed = self.changes.iter().rfind(|(from, _)| *from <= time);
        changed
            .map_or(self.bandwidth, |(_, bandwidth)| *bandwidth)
            .max(1)
    }
}

/// The time of a simulation. Whoever computes advances it; waiting for a read does, too.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    /// Time since the start.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    /// Lets time pass.
    pub fn advance(&self, by: Duration) {
        self.0
            .store(nanos(self.now().saturating_add(by)), Ordering::Relaxed);
    }

    fn reach(&self, time: Duration) {
        self.0.fetch_max(nanos(time), Ordering::Relaxed);
    }
}

/// At most what can be counted: some 584 years.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A read under way.
#[derive(Debug)]
struct Flight {
    drive: usize,
    end: Duration,
    completion: Completion,
}

/// The device.
#[derive(Debug)]
pub(crate) struct Sim {
    drives: Vec<SimDrive>,
    /// When each drive has served what it was given.
    free_at: Vec<Duration>,
    reads: Vec<u64>,
    /// For each file and copy, its drive.
    drive_of: Vec<Vec<usize>>,
    /// By end.
    flights: VecDeque<Flight>,
    clock: Clock,
    /// Where the device is in time: never ahead of the clock.
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

impl Device for Sim {
    fn submit(&mut self, op: Op) {
        let d = self.drive_of[op.file as usize][op.copy as usize];
        let drive = &self.drives[d];
        let start = self.free_at[d].max(self.now);
        let seconds = op.len as f64 / drive.bandwidth_at(start) as f64;
        self.free_at[d] = start + Duration::from_secs_f64(seconds);
        self.reads[d] += 1;
        let end = self.free_at[d] + drive.latency;
        let failed = drive.fails_at.is_some_and(|from| from <= end);
        let short = drive.short_every > 0 && self.reads[d].is_multiple_of(drive.short_every);
        let result = match (failed, short) {
            (true, _) => Err(io::Error::from_raw_os_error(libc::EIO)),
            (false, true) => Ok(op.len / 2),
            (false, false) => Ok(op.len),
        };
        if drive.at_once {
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
    }

    fn wait(&mut self, min: usize, ended: &mut Vec<Completion>) -> io::Result<()> {
        self.waits += 1;
        let mut left = min;
        while let Some(next) = self.flights.front() {
            // Of what ends before the clock's time, one moment is taken at a time: the windows are refilled at that
            // moment, as a ring thread would.
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

    fn enters(&self) -> u64 {
        self.waits
    }

    fn behind(&self) -> bool {
        self.now < self.clock.now()
    }
}
