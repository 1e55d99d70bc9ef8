//! Decides how many rows of prompts a pass may have, so that it does not hold up those who decode.

use std::time::Duration;

/// Rows of the first pass that has a prompt and decodes.
const FIRST: usize = 8;

/// The rows of prompts for which a pass takes as long as it may. A pass grows by less than its rows, because rows share experts; so a pass
/// of twice the rows takes at most twice the time.
#[derive(Clone, Debug)]
pub struct Budget {
    /// The longest pass.
    stall: Duration,
    rows: usize,
    /// The last pass without a prompt.
    decode: Duration,
}

impl Budget {
    pub fn new(stall: Duration) -> Budget {
        Budget {
            stall,
            rows: FIRST,
            decode: Duration::ZERO,
        }
    }

    /// Rows of prompts in a pass that decodes, too; at least 1.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// A pass that decodes took `time`, with `rows` rows of prompts.
    pub fn passed(&mut self, rows: usize, time: Duration) {
        if rows == 0 {
            self.decode = time;
            return;
        }
        // Where decoding alone takes as long, prompts must go on, too.
        let goal = self.stall.max(self.decode.mul_f64(1.5)).as_secs_f64();
        let factor = 0.9 * goal / time.as_secs_f64().max(1e-6);
        if factor < 1.0 || rows >= self.rows {
            self.rows = ((rows as f64 * factor.min(2.0)) as usize).max(1);
        }
    }
}
