//! Decides how many rows of prompts a pass may have, so that it does not hold up those who decode.

use std::time::Duration;

/// Rows of the first pass that has a prompt and decodes. Each row may read as many experts as a decoding request does, and nothing is known of
/// the drives yet.
const FIRST: usize = 1;

/// The part of the time for prompts that is used: the rest is for rows that take longer than those before them.
const USED: f64 = 0.6;

/// The rows of prompts for which a pass takes as long as it may. What they add to a pass grows by less than their number, because rows share
/// experts; so twice the rows add at most twice the time. Rows at the end of a long prompt take longer than those at its start.
#[derive(Clone, Debug)]
pub struct Budget {
    /// The longest pass.
    stall: Duration,
    rows: usize,
    /// The last pass without a prompt.
    decode: Duration,
    /// Seconds that a row of the last pass with a prompt added; 0 at first.
    each: f64,
}

impl Budget {
    pub fn new(stall: Duration) -> Budget {
        Budget {
            stall,
            rows: FIRST,
            decode: Duration::ZERO,
            each: 0.0,
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
        let goal = self.stall.max(self.decode.mul_f64(1.5));
        let room = USED * (goal.saturating_sub(self.decode)).as_secs_f64();
        let added = time.saturating_sub(self.decode).as_secs_f64().max(1e-6);
        let each = added / rows as f64;
        // The next rows may take as much longer as these did.
        let growth = match self.each {
            0.0 => 1.0,
            before => (each / before).clamp(1.0, 2.0),
        };
        self.each = each;
        let factor = room / (added * growth);
        if factor < 1.0 || rows >= self.rows {
            self.rows = ((rows as f64 * factor.min(2.0)) as usize).max(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes that take `each` for every row: the longest one, and the rows of the last.
    fn passes(budget: &mut Budget, decoding: usize, each: Duration) -> (Duration, usize) {
        budget.passed(0, each * decoding as u32);
        let mut longest = Duration::ZERO;
        for _ in 0..40 {
            let rows = budget.rows();
            let time = each * (decoding + rows) as u32;
            longest = longest.max(time);
            budget.passed(rows, time);
        }
        (longest, budget.rows())
    }

    #[test]
    fn no_pass_takes_longer_than_it_may() {
        let stall = Duration::from_millis(500);
        for (decoding, each, most) in [(1, 1, 500), (8, 1, 500), (4, 90, 540), (3, 600, 2700)] {
            let each = Duration::from_millis(each);
            let (longest, rows) = passes(&mut Budget::new(stall), decoding, each);
            assert!(longest <= Duration::from_millis(most), "{longest:?}");
            let used = each * (decoding + rows) as u32;
            assert!(used * 10 > longest * 5, "{rows} rows take {used:?}");
        }
    }

    #[test]
    fn slower_drives_are_noticed_at_once() {
        let mut budget = Budget::new(Duration::from_millis(500));
        let (_, fast) = passes(&mut budget, 2, Duration::from_millis(1));
        budget.passed(0, Duration::from_millis(20));
        budget.passed(fast, Duration::from_millis(10) * fast as u32);
        assert!(
            Duration::from_millis(10) * (budget.rows() as u32 + 2) <= Duration::from_millis(500)
        );
    }

    /// As measured: 100 ms for decoding, and rows that take 4 ms at first and 12 ms after 2000 tokens.
    #[test]
    fn rows_of_a_long_prompt_take_longer_and_longer() {
        let stall = Duration::from_secs(2);
        let decode = Duration::from_millis(100);
        let each = |position: usize| match position {
            0..1400 => 4.0,
            1400..2100 => 4.0 + 8.0 * (position - 1400) as f64 / 700.0,
            _ => 12.0,
        };
        let mut budget = Budget::new(stall);
        budget.passed(0, decode);
        let (mut position, mut passes, mut longest) = (0, 0, Duration::ZERO);
        while position < 4000 {
            let rows = budget.rows().min(4000 - position);
            let added: f64 = (position..position + rows).map(each).sum();
            let time = decode + Duration::from_secs_f64(added / 1000.0);
            longest = longest.max(time);
            budget.passed(rows, time);
            position += rows;
            passes += 1;
        }
        assert!(longest <= stall, "{longest:?}");
        assert!(passes < 45, "{passes}");
    }
}
