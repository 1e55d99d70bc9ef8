//! Estimates how long demanded experts take to read: a latency, and seconds for each expert.

use std::time::Duration;

use super::averages::Mean;

/// Batches of demands that are kept.
const KEPT: usize = 64;

/// After so many batches that were not read alone, one is; the first ones earlier.
const MAX_INTERVAL: u32 = 128;
const MIN_INTERVAL: u32 = 8;

/// A batch of demands: how many experts it had to read, and in how many seconds.
type Batch = (f64, f64);

/// Measures batches of demands that the drives read alone. A prefetch that they already have delays a batch by an unknown time, and on
/// drives that complete their whole queue in one burst, so does one that they get meanwhile.
#[derive(Debug, Default)]
pub(super) struct ReadTimes {
    batches: Vec<Batch>,
    next: usize,
    /// Whether the batches were read alone; others count until the first that was.
    exact: bool,
    unmeasured: u32,
    /// Seconds that a batch takes longer than its experts.
    latency: f64,
    /// Seconds of an expert.
    expert: f64,
    /// When the running batch began, and how many experts it had to read.
    began: Duration,
    missing: f64,
    alone: bool,
    /// Whether a prefetch began meanwhile.
    joined: bool,
    /// Seconds by which prefetches that began meanwhile delayed a batch.
    delay: Mean,
    /// When its last read was complete; `None` while some are not.
    drained: Option<Duration>,
}

impl ReadTimes {
    /// Seconds that an expert adds to a batch; 0 before the first batch.
    pub(super) fn expert(&self) -> f64 {
        self.expert
    }

    /// Whether no demand is being read.
    pub(super) fn is_drained(&self) -> bool {
        self.drained.is_some()
    }

    /// Whether nothing should be prefetched now, so that the next or the running batch is read alone.
    pub(super) fn needs_batch(&self) -> bool {
        let doublings = self.batches.len().min(8) as u32;
        let interval = (MIN_INTERVAL << doublings).min(MAX_INTERVAL);
        let running = self.unmeasured > 0 && self.drained.is_none();
        match self.unmeasured % interval {
            0 => running,
            n => n == interval - 1,
        }
    }

    /// Since when the drives had capacity for other reads than demands; `None` while they have none. In the latency of the last
    /// demands they can already transfer other bytes, unless that delays the demands.
    pub(super) fn idle_since(&self) -> Option<Duration> {
        let free = (self.latency - self.delay.value).clamp(0.0, self.latency);
        let idle = self.drained?.saturating_sub(Duration::from_secs_f64(free));
        Some(idle.max(self.began))
    }

    /// A batch begins; `alone` if nothing else is being read.
    pub(super) fn demanded(&mut self, missing: f64, alone: bool, now: Duration) {
        self.began = now;
        self.missing = missing;
        self.alone = alone;
        self.joined = false;
        self.drained = (missing == 0.0).then_some(now);
        self.unmeasured += u32::from(missing > 0.0);
    }

    /// A prefetch begins.
    pub(super) fn prefetched(&mut self) {
        self.joined |= self.drained.is_none();
    }

    /// All experts of the batch are in memory; `waited` if the last was waited for, so that this is known exactly.
    pub(super) fn drained(&mut self, waited: bool, now: Duration) {
        if self.drained.is_some() {
            return;
        }
        self.drained = Some(now);
        let exact = self.alone && !self.joined;
        let seconds = (now - self.began).as_secs_f64();
        let expected = self.latency + self.missing * self.expert;
        if self.exact && !exact {
            if self.alone && waited {
                self.delay.record(seconds - expected);
            }
            return;
        }
        if exact && !self.exact {
            self.exact = true;
            self.batches.clear();
        }
        self.unmeasured = 0;
        // What was not waited for was read in less time than this.
        if waited || seconds < expected || self.batches.is_empty() {
            self.next %= KEPT;
            self.batches.truncate(KEPT);
            match self.batches.get_mut(self.next) {
                Some(oldest) => *oldest = (self.missing, seconds),
                None => self.batches.push((self.missing, seconds)),
            }
            self.next += 1;
            self.fit();
        }
    }

    /// Fits the line by least squares. Where all batches are equally large, nothing tells the latency from the experts: it is 0.
    fn fit(&mut self) {
        /// Weight of the assumption that there is no latency, relative to what was measured.
        const ASSUMED: f64 = 0.01;
        let sum = |of: fn(&Batch) -> f64| self.batches.iter().map(of).sum::<f64>();
        let number = self.batches.len() as f64;
        let (experts, seconds) = (sum(|b| b.0), sum(|b| b.1));
        let (squares, products) = (sum(|b| b.0 * b.0), sum(|b| b.0 * b.1));
        let latency = (seconds * squares - experts * products)
            / ((1.0 + ASSUMED) * number * squares - experts * experts);
        let least = self.batches.iter().map(|b| b.1).fold(f64::MAX, f64::min);
        self.latency = latency.clamp(0.0, least);
        self.expert = (seconds - self.latency * number) / experts;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: u64 = 100;

    /// Batches of so many experts, on drives that take 30 us for each. Returns latency and time of an expert in microseconds.
    fn measured(reads: &mut ReadTimes, batches: &[u64], alone: bool, delay: u64) -> (f64, f64) {
        for &experts in batches {
            let began = Duration::from_secs(1);
            let took = Duration::from_micros(LATENCY + 30 * experts + delay);
            reads.demanded(experts as f64, alone, began);
            reads.drained(true, began + took);
        }
        let rounded = |seconds: f64| (seconds * 1e6).round();
        (rounded(reads.latency), rounded(reads.expert))
    }

    #[test]
    fn latency_is_told_from_the_time_of_an_expert() {
        let mut reads = ReadTimes::default();
        let (latency, expert) = measured(&mut reads, &[8, 1, 5, 3, 7, 2], true, 0);
        assert!((95.0..=100.0).contains(&latency), "{latency}");
        assert!((30.0..=31.0).contains(&expert), "{expert}");
        let idle =
            Duration::from_secs(1) + Duration::from_micros(160) - reads.idle_since().unwrap();
        assert!(idle.as_micros() >= 95, "{idle:?}");
    }

    #[test]
    fn equal_batches_are_all_experts() {
        let mut reads = ReadTimes::default();
        assert_eq!(measured(&mut reads, &[4; 10], true, 0), (0.0, 55.0));
    }

    #[test]
    fn batches_behind_prefetches_count_only_before_the_first_alone() {
        let mut reads = ReadTimes::default();
        assert_eq!(measured(&mut reads, &[2, 2], false, 40), (0.0, 100.0));
        let alone = measured(&mut reads, &[8, 1, 5], true, 0);
        assert_eq!(measured(&mut reads, &[2; 100], false, 40), alone);
    }

    #[test]
    fn latency_in_which_a_prefetch_delays_demands_is_not_idle() {
        for (delay, idle) in [(0, LATENCY), (60, LATENCY - 60), (200, 0)] {
            let mut reads = ReadTimes::default();
            let line = measured(&mut reads, &[8, 1, 5, 3, 7, 2], true, 0);
            let began = Duration::from_secs(1);
            let end = began + Duration::from_micros(LATENCY + 30 * 4 + delay);
            for _ in 0..50 {
                reads.demanded(4.0, true, began);
                reads.prefetched();
                reads.drained(true, end);
            }
            let since = reads.idle_since().unwrap();
            let error = (end - since).as_micros().abs_diff(u128::from(idle));
            assert!(error <= 5, "delay {delay}: {error}");
            assert_eq!(measured(&mut reads, &[], true, 0), line);
        }
    }

    #[test]
    fn a_batch_is_due_after_many_that_were_not_alone() {
        let mut reads = ReadTimes::default();
        measured(&mut reads, &[8, 1, 5, 3], true, 0);
        let (began, mut due) = (Duration::from_secs(1), Vec::new());
        for i in 1..=300 {
            let is_due = reads.needs_batch();
            due.extend(is_due.then_some(i));
            reads.demanded(2.0, false, began);
            assert!(reads.needs_batch() || !is_due, "while it is read");
            reads.drained(true, began + Duration::from_micros(200));
        }
        assert_eq!(due, [128, 256]);
        measured(&mut reads, &[2], true, 0);
        assert!(!reads.needs_batch());
    }
}
