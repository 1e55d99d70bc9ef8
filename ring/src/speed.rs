//! Estimates how long a drive takes for its reads: a latency, and seconds for each byte.

use std::time::Duration;

/// Seconds of work after which a measurement has half of its weight in the line.
const MEMORY: f64 = 0.5;
/// The same for the slowdown, in seconds of work and in bytes.
const RECENT: (f64, f64) = (0.05, (4 << 20) as f64);

/// Sums over intervals between two completions of a busy drive, older ones with less weight.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    seconds: f64,
    bytes: f64,
    /// Intervals that began on an idle drive: only these include the latency.
    starts: f64,
    /// Of these intervals: 1 / bytes.
    starts_by_bytes: f64,
    /// Of these intervals: seconds / bytes.
    seconds_by_bytes: f64,
}

impl Sums {
    fn add(&mut self, keep: f64, interval: Interval) {
        let Interval {
            seconds,
            bytes,
            start,
        } = interval;
        let start = f64::from(u8::from(start));
        self.seconds = self.seconds * keep + seconds;
        self.bytes = self.bytes * keep + bytes;
        self.starts = self.starts * keep + start;
        self.starts_by_bytes = self.starts_by_bytes * keep + start / bytes;
        self.seconds_by_bytes = self.seconds_by_bytes * keep + start * seconds / bytes;
    }
}

/// The time between two completions, or from the first read of an idle drive to its completion.
#[derive(Clone, Copy, Debug)]
struct Interval {
    seconds: f64,
    bytes: f64,
    start: bool,
}

/// A latency in seconds, and seconds for each byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Line {
    pub(crate) latency: f64,
    pub(crate) per_byte: f64,
}

impl Line {
    /// An assumption that makes drives equal.
    pub(crate) const EQUAL: Line = Line {
        latency: 0.0,
        per_byte: 1.0,
    };

    pub(crate) fn seconds(&self, bytes: u64) -> f64 {
        self.latency + bytes as f64 * self.per_byte
    }
}

/// The measured speed of a drive.
///
/// The line is fitted so that it explains the whole time in which the drive was busy. So a throttle that works in slices, or a
/// drive that completes reads in bursts, is as fast as it is on average. The line forgets slowly, by seconds of work. A slowdown
/// shows at once in a factor, and while the drive is silent. A speedup shows after as many bytes as the drive was thought to read in
/// half a second: so the free start of a throttle's slice does not pass for speed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Speed {
    sums: Sums,
    /// Completions that are reported together are one interval.
    open: Option<Interval>,
    /// Seconds, bytes and starts of recent intervals.
    recent: Sums,
    /// The line if nothing distinguishes latency from bandwidth: all of it bandwidth, or most of it latency.
    lines: Option<[Line; 2]>,
    slowdown: f64,
}

impl Speed {
    /// Counts `bytes` that were read in `seconds` since the completion before; `start` if the drive was idle before.
    pub(crate) fn record(&mut self, bytes: u64, seconds: f64, start: bool) {
        match &mut self.open {
            Some(open) if seconds == 0.0 && !start => open.bytes += bytes as f64,
            open => {
                let next = Interval {
                    seconds: seconds.max(1e-9),
                    bytes: bytes as f64,
                    start,
                };
                if let Some(ended) = open.replace(next) {
                    Speed::add(&mut self.sums, &mut self.recent, ended);
                }
            }
        }
        self.fit();
    }

    /// Counts a drive as useless until it reads something.
    pub(crate) fn give_up(&mut self) {
        self.lines = Some([Line::EQUAL; 2]);
        self.slowdown = 1.0;
    }

    fn add(sums: &mut Sums, recent: &mut Sums, interval: Interval) {
        let Interval { seconds, bytes, .. } = interval;
        sums.add(MEMORY / (MEMORY + seconds), interval);
        recent.add(
            1.0 / (1.0 + seconds / RECENT.0 + bytes / RECENT.1),
            interval,
        );
    }

    /// Fits the line by least squares, each interval weighted by 1 / bytes: so the seconds of all intervals add up to those of the
    /// line.
    fn fit(&mut self) {
        /// Weight of the assumption, relative to what was measured.
        const ASSUMED: f64 = 0.01;
        /// How much of the time may be latency if nothing contradicts.
        const MOSTLY: f64 = 0.75;
        let (mut sums, mut recent) = (self.sums, self.recent);
        if let Some(open) = self.open {
            Speed::add(&mut sums, &mut recent, open);
        }
        let weight = sums.starts_by_bytes * sums.bytes;
        let line = |assumed: f64| {
            let most = sums.seconds / sums.starts;
            let latency = (sums.seconds_by_bytes * sums.bytes - sums.starts * sums.seconds
                + ASSUMED * weight * assumed * most)
                / ((1.0 + ASSUMED) * weight - sums.starts * sums.starts);
            let latency = if sums.starts > 0.0 && latency.is_finite() {
                latency.clamp(0.0, 0.95 * most)
            } else {
                0.0
            };
            Line {
                latency,
                per_byte: (sums.seconds - latency * sums.starts) / sums.bytes,
            }
        };
        let lines = [line(0.0), line(MOSTLY)];
        let explained = recent.starts * lines[0].latency + recent.bytes * lines[0].per_byte;
        self.slowdown = (recent.seconds / explained).max(1.0);
        self.lines = Some(lines);
    }

    pub(crate) fn is_known(&self) -> bool {
        self.lines.is_some()
    }

    /// The line of a drive that has had `in_flight` bytes for `silent` seconds without a completion. `hopeful`: where latency and
    /// bandwidth cannot be told apart, more bytes take hardly longer.
    pub(crate) fn line(&self, in_flight: u64, silent: Duration, hopeful: bool) -> Option<Line> {
        let line = self.lines?[usize::from(hopeful)];
        let factor = match in_flight {
            0 => self.slowdown,
            bytes => self
                .slowdown
                .max(silent.as_secs_f64() / line.seconds(bytes)),
        };
        Some(Line {
            latency: line.latency * factor,
            per_byte: line.per_byte * factor,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Batches of `sizes`, one after the other on an idle drive of 1e9 B/s and 100 us; completions one by one, or all at the end.
    fn batches(speed: &mut Speed, sizes: &[&[u64]], bursts: bool) {
        for batch in sizes {
            let all: u64 = batch.iter().sum();
            for (i, bytes) in batch.iter().enumerate() {
                let begun = if bursts { all } else { *bytes };
                let seconds = match (i, bursts) {
                    (0, _) => 1e-4 + begun as f64 / 1e9,
                    (_, true) => 0.0,
                    (_, false) => begun as f64 / 1e9,
                };
                speed.record(*bytes, seconds, i == 0);
            }
        }
    }

    #[test]
    fn latency_and_bandwidth_are_told_apart() {
        for bursts in [false, true] {
            let mut speed = Speed::default();
            batches(&mut speed, &[&[MIB / 8], &[MIB / 2, MIB / 4]], bursts);
            for hopeful in [false, true] {
                let line = speed.line(0, Duration::ZERO, hopeful).unwrap();
                for bytes in [MIB / 8, MIB, 8 * MIB] {
                    let real = 1e-4 + bytes as f64 / 1e9;
                    let ratio = line.seconds(bytes) / real;
                    assert!((0.9..1.1).contains(&ratio), "{bytes}: {ratio} {line:?}");
                }
            }
        }
    }

    #[test]
    fn reads_of_one_size_leave_latency_open() {
        let mut speed = Speed::default();
        batches(&mut speed, &[&[MIB / 8][..]; 20], false);
        let [careful, hopeful] =
            [false, true].map(|hopeful| speed.line(0, Duration::ZERO, hopeful).unwrap());
        let real = 1e-4 + (MIB / 8) as f64 / 1e9;
        for line in [careful, hopeful] {
            assert!((line.seconds(MIB / 8) / real - 1.0).abs() < 0.01);
        }
        assert!(careful.seconds(MIB) > 7.0 * real && hopeful.seconds(MIB) < 3.0 * real);
    }

    #[test]
    fn slowing_down_shows_at_once_and_speeding_up_soon() {
        let seconds = |speed: &Speed| speed.line(0, Duration::ZERO, false).unwrap().seconds(MIB);
        let mut speed = Speed::default();
        (0..1000).for_each(|_| speed.record(MIB, 1e-3, false));
        // A read of 50 ms, and a silence of 50 ms with a read that should take 1 ms.
        let mut slower = speed;
        slower.record(MIB, 0.05, false);
        assert!(seconds(&slower) > 0.015);
        let silent = speed.line(MIB, Duration::from_millis(50), false).unwrap();
        assert!(silent.seconds(MIB) > 0.04);
        // One slow read is forgotten after some more, of which each counts as work.
        (0..300).for_each(|_| slower.record(MIB, 1e-3, false));
        assert!(seconds(&slower) < 1.3e-3);
        // A drive that was slow for long needs half a second of its bytes to be thought twice as fast.
        (0..100).for_each(|_| slower.record(MIB, 0.05, false));
        assert!(seconds(&slower) > 0.045);
        (0..10).for_each(|_| slower.record(MIB, 1e-3, false));
        assert!((0.02..0.035).contains(&seconds(&slower)));
        (0..600).for_each(|_| slower.record(MIB, 1e-3, false));
        assert!(seconds(&slower) < 3e-3);
    }

    /// 100 MB/s in slices of 100 ms: 10 MB at once, then silence.
    #[test]
    fn a_throttle_in_slices_is_as_fast_as_its_mean() {
        let mut speed = Speed::default();
        for slice in 0..20 {
            for read in 0..10 {
                let seconds = if read == 0 && slice > 0 { 0.099 } else { 1e-4 };
                speed.record(1_000_000, seconds, false);
            }
        }
        let line = speed.line(0, Duration::ZERO, false).unwrap();
        let rate = 10e6 / (10.0 * line.seconds(1_000_000));
        assert!((80e6..120e6).contains(&rate), "{rate}");
    }
}
