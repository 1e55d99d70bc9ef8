//! Averages recent measurements.

/// How often something happened, of about the last 64 times.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    yes: f64,
    all: f64,
}

impl Rate {
    /// Starts as if measured a few times.
    pub(super) fn new(assumed: f64) -> Rate {
        const ASSUMED_TIMES: f64 = 4.0;
        Rate {
            yes: assumed * ASSUMED_TIMES,
            all: ASSUMED_TIMES,
        }
    }

    pub(super) fn record(&mut self, yes: bool) {
        const KEEP: f64 = 1.0 - 1.0 / 64.0;
        self.yes = self.yes * KEEP + f64::from(u8::from(yes));
        self.all = self.all * KEEP + 1.0;
    }

    pub(super) fn get(self) -> f64 {
        self.yes / self.all
    }
}

/// A mean of about the last 16 values; 0 before the first.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mean {
    pub(super) value: f64,
    pub(super) count: f64,
}

impl Mean {
    pub(super) fn record(&mut self, value: f64) {
        self.count = (self.count + 1.0).min(16.0);
        self.value += (value - self.value) / self.count;
    }
}

/// The last values.
#[derive(Clone, Debug, Default)]
pub(super) struct Recent {
    values: Vec<f64>,
    next: usize,
}

impl Recent {
    pub(super) fn record(&mut self, value: f64) {
        const KEPT: usize = 16;
        match self.values.len() < KEPT {
            true => self.values.push(value),
            false => self.values[self.next] = value,
        }
        self.next = (self.next + 1) % KEPT;
    }

    /// The mean of a function of them; 0 if there are none.
    pub(super) fn mean(&self, of: impl Fn(f64) -> f64) -> f64 {
        let sum: f64 = self.values.iter().map(|value| of(*value)).sum();
        sum / self.values.len().max(1) as f64
    }
}
