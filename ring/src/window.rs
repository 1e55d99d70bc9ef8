//! Searches the smallest window that keeps a drive busy, while the drive works.
//!
//! A more urgent read cannot overtake the reads that a drive has, so its window should be no larger than its bandwidth needs. Two
//! windows alternate in turns of a quarter of a second of full windows, because a drive's speed drifts and throttles work in slices
//! of a tenth of a second. After five turns each, the median of the ratios decides. Halving is tried before doubling; the
//! search starts again after 64 GiB.

/// Seconds of full windows in a turn.
const TURN_SECONDS: f64 = 0.25;
/// Least number of windows of bytes in a turn.
const TURN_WINDOWS: u64 = 8;
/// Turns of each window, odd.
const TURNS: usize = 5;
/// The smaller window wins if it has this part of the larger one's bandwidth.
const ENOUGH: f64 = 0.97;
/// Bytes after which the search starts again.
const REST: u64 = 64 << 30;

/// What the turns compare.
#[derive(Debug)]
enum State {
    /// The window with half of it.
    Half,
    /// The window with twice as much.
    Double,
    /// Nothing, for this many bytes.
    Rest(u64),
}

/// The search for the window of one drive.
#[derive(Debug)]
pub(crate) struct Search {
    /// The least and the most bytes of a window.
    bounds: (u64, u64),
    best: u64,
    state: State,
    /// Whether this turn is the other window's.
    other: bool,
    /// Bytes since the window became full. Those up to the size of the window came while it filled and do not count.
    stretch: u64,
    /// Bytes and seconds of the present turn.
    bytes: u64,
    seconds: f64,
    /// Bytes a second of the first turn of a pair.
    first: Option<f64>,
    /// The other window's bandwidth divided by the best one's, for each pair of turns.
    ratios: Vec<f64>,
}

impl Search {
    /// A search that starts with `window` and stays within `bounds`.
    pub(crate) fn new(window: u64, bounds: (u64, u64)) -> Search {
        let mut search = Search {
            bounds,
            best: window,
            state: State::Rest(0),
            other: false,
            stretch: 0,
            bytes: 0,
            seconds: 0.0,
            first: None,
            ratios: Vec::with_capacity(TURNS),
        };
        search.begin(State::Half);
        search
    }

    /// The window to use now.
    pub(crate) fn window(&self) -> u64 {
        if self.other {
            self.candidate()
        } else {
            self.best
        }
    }

    /// Counts a read of `bytes` that ended `took` seconds after the one before it (0 for those that end together), and until which the
    /// window was `full`.
    pub(crate) fn ended(&mut self, bytes: u64, took: f64, full: bool) {
        if let State::Rest(left) = &mut self.state {
            *left = left.saturating_sub(bytes);
            if *left == 0 {
                self.begin(State::Half);
            }
            return;
        }
        // Of reads that end together, the first has left the window not full.
        if !full && (took > 0.0 || self.stretch == 0) {
            self.stretch = 0;
            return;
        }
        self.stretch += bytes;
        if self.stretch <= self.window() {
            return;
        }
        self.bytes += bytes;
        self.seconds += took;
        if self.seconds >= TURN_SECONDS && self.bytes >= TURN_WINDOWS * self.window() {
            self.turn_over(self.bytes as f64 / self.seconds);
        }
    }

    fn candidate(&self) -> u64 {
        match self.state {
            State::Half => self.best / 2,
            State::Double => self.best.saturating_mul(2),
            State::Rest(_) => self.best,
        }
    }

    fn begin(&mut self, state: State) {
        self.state = state;
        self.ratios.clear();
        self.first = None;
        self.other = false;
        (self.stretch, self.bytes, self.seconds) = (0, 0, 0.0);
        let (least, most) = self.bounds;
        if !(least..=most).contains(&self.candidate()) {
            match self.state {
                State::Half => self.begin(State::Double),
                State::Double => self.begin(State::Rest(REST)),
                State::Rest(_) => {}
            }
        }
    }

    fn turn_over(&mut self, speed: f64) {
        (self.stretch, self.bytes, self.seconds) = (0, 0, 0.0);
        let Some(first) = self.first.take() else {
            self.first = Some(speed);
            self.other = !self.other;
            return;
        };
        // The second turn of a pair is the first of the next one, so that a drift affects both windows alike.
        let ratio = if self.other {
            speed / first
        } else {
            first / speed
        };
        self.ratios.push(ratio);
        if self.ratios.len() == TURNS {
            self.ratios.sort_by(f64::total_cmp);
            self.decide(self.ratios[TURNS / 2]);
        }
    }

    fn decide(&mut self, ratio: f64) {
        let candidate = self.candidate();
        match self.state {
            State::Half if ratio >= ENOUGH => {
                self.best = candidate;
                self.begin(State::Half);
            }
            State::Double if ratio * ENOUGH > 1.0 => {
                self.best = candidate;
                self.begin(State::Double);
            }
            // Half is too small, and the window itself may be, too.
            State::Half => self.begin(State::Double),
            State::Double | State::Rest(_) => self.begin(State::Rest(REST)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Keeps a drive busy that reaches `speed(window)` bytes a second, in chunks of 2 MiB, for `bytes` bytes, with a pause after every
    /// `batch` bytes; each chunk takes up to `noise` longer or shorter.
    fn settle(
        speed: impl Fn(u64) -> f64,
        bytes: u64,
        batch: u64,
        noise: f64,
        random: &mut dyn FnMut() -> f64,
    ) -> u64 {
        let mut search = Search::new(8 * MIB, (4 * MIB, 16 * MIB));
        let mut done = 0;
        while done < bytes {
            let window = search.window();
            let mut left = batch;
            while left > 0 {
                let factor = 1.0 + noise * (2.0 * random() - 1.0);
                let took = 2.0 * MIB as f64 / speed(window) * factor;
                // The rest, with which the window is not full, does not count.
                search.ended(2 * MIB, took, left >= window);
                left -= 2 * MIB;
            }
            done += batch;
        }
        search.best
    }

    /// Throughput with a latency that only larger windows hide.
    fn piped(bandwidth: f64, latency: f64) -> impl Fn(u64) -> f64 {
        move |window| bandwidth.min(window as f64 / latency)
    }

    #[test]
    fn the_smallest_sufficient_window_is_found() {
        let random = &mut || 0.5;
        for (needed, found) in [(1, 4), (4, 4), (5, 8), (8, 8), (10, 16), (40, 16)] {
            let latency = (needed * MIB) as f64 / 2e9;
            let best = settle(piped(2e9, latency), 40 << 30, 64 * MIB, 0.0, random);
            assert_eq!(best, found * MIB, "needs {needed} MiB");
        }
    }

    #[test]
    fn an_idle_drive_keeps_its_window() {
        let best = settle(piped(2e9, 1e-4), 40 << 30, 6 * MIB, 0.0, &mut || 0.5);
        assert_eq!(best, 8 * MIB);
    }

    #[test]
    fn the_search_starts_again_later() {
        let now = std::cell::Cell::new(0u64);
        let speed = |window: u64| {
            now.set(now.get() + 2 * MIB);
            let needed = if now.get() < 20 << 30 { MIB } else { 8 * MIB };
            2e9 * (window as f64 / needed as f64).min(1.0)
        };
        let best = settle(speed, 120 << 30, 64 * MIB, 0.0, &mut || 0.5);
        assert_eq!(best, 8 * MIB);
    }

    /// The window that is found for a drive that needs `needed` MiB and gets slower and faster in waves of some seconds by `drift`.
    fn settle_noisy(seed: u64, needed: u64, drift: f64) -> u64 {
        let mut state = seed | 1;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 * (-53f64).exp2()
        };
        let chunks = std::cell::Cell::new(0u64);
        let steady = piped(2e9, (needed * MIB) as f64 / 2e9);
        let speed = |window| {
            chunks.set(chunks.get() + 1);
            steady(window) * (1.0 + drift * (chunks.get() as f64 / 5000.0).sin())
        };
        settle(speed, 40 << 30, 64 * MIB, 0.3, &mut random)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        #[test]
        fn noise_costs_no_bandwidth(seed: u64, needed in 1u64..14, drift in 0.0f64..0.5) {
            let best = settle_noisy(seed, needed, drift);
            let steady = piped(2e9, (needed * MIB) as f64 / 2e9);
            prop_assert!(steady(best) >= 0.9 * steady(16 * MIB), "{best} of {needed}");
        }
    }

    #[test]
    fn noise_seldom_hides_a_smaller_window() {
        // Five ratios with noise of 1.5% each and a drift may mislead: then a larger window stays, which costs only latency.
        let smallest =
            |seed: &u64| settle_noisy(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15), 1, 0.3) == 4 * MIB;
        let found = (1..=200u64).filter(smallest).count();
        assert!(found >= 190, "{found} of 200");
    }
}
