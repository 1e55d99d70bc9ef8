//! Decides how many tokens to draft, from the cost and yield of earlier passes.
//!
//! More drafts yield more tokens a pass if they are accepted, and make every pass more expensive: the prediction layer has to run, and verified
//! tokens use more experts, which may have to be read. Both change with the text and with the cache, so nothing is assumed about either.
//!
//! Passes run at one depth (drafts a pass), with occasional trials of the next depth up or down; the cheaper one per token stays.
//! A trial that paid counts only after a few more passes at the old depth were more expensive too: at the beginning every pass is cheaper than
//! the ones before it, as experts come into memory. Depth 0 is decoding without drafts. After a trial that failed the next one comes four
//! times as late, so that drafting costs little where nothing is accepted; after one that paid it comes soon, in the same direction. When
//! drafting costs more than decoding without drafts did, depth 0 is tried at once.

use std::time::Duration;

/// Drafts a pass, at most.
pub const MAX_DEPTH: usize = 4;

/// Passes of a trial that count. The first one does not: it pays for what the passes at the other depth left undone.
const TRIAL: u32 = 6;
/// After so many passes, a trial that costs half as much again is given up.
const MIN_PASSES: u32 = 2;
/// Passes at the old depth that a trial that paid is compared with.
const CHECK: u32 = 3;
/// Tokens before the first trial and after one that paid.
const MIN_INTERVAL: u64 = 12;
/// Tokens between trials, at most.
const MAX_INTERVAL: u64 = 1024;
/// Share of the current cost that another depth must stay below, because clocks are not exact.
const MIN_GAIN: f64 = 0.97;

/// Cost and yield of some passes.
#[derive(Clone, Copy, Debug, Default)]
struct Passes {
    number: u32,
    tokens: u64,
    time: Duration,
}

impl Passes {
    fn add(&mut self, tokens: u64, time: Duration) {
        self.number += 1;
        self.tokens += tokens;
        self.time += time;
        // Older passes count less, because the cache changes.
        if self.number == 2 * TRIAL {
            self.number /= 2;
            self.tokens = self.tokens.div_ceil(2);
            self.time /= 2;
        }
    }

    /// Seconds a token.
    fn cost(&self) -> f64 {
        self.time.as_secs_f64() / self.tokens.max(1) as f64
    }
}

/// A few passes at another depth.
#[derive(Clone, Copy, Debug, Default)]
struct Trial {
    depth: usize,
    /// Whether its first pass has been made.
    begun: bool,
    passes: Passes,
}

/// Decides on a depth before every pass, and takes its cost and yield after it.
#[derive(Clone, Debug)]
pub struct Auto {
    depth: usize,
    /// The last passes at that depth.
    usual: Passes,
    /// Seconds a token without drafts, at the last measurement.
    plain: f64,
    trial: Option<Trial>,
    /// A trial that paid and is being checked.
    promise: Option<Trial>,
    /// Whether the next trial is of more drafts than now.
    up: bool,
    /// Tokens until the next trial, and what that was set to.
    left: u64,
    interval: u64,
}

impl Default for Auto {
    fn default() -> Auto {
        Auto::new()
    }
}

impl Auto {
    /// Begins without drafts.
    pub fn new() -> Auto {
        Auto {
            depth: 0,
            usual: Passes::default(),
            plain: f64::INFINITY,
            trial: None,
            promise: None,
            up: true,
            left: MIN_INTERVAL,
            interval: MIN_INTERVAL,
        }
    }

    /// Tokens to draft in the next pass.
    pub fn drafts(&self) -> usize {
        self.trial.map_or(self.depth, |trial| trial.depth)
    }

    /// Drafts a pass, apart from a trial that is under way.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// A pass with [`Auto::drafts`] drafts took `time`, drafting included, and yielded `tokens` tokens (1 and the accepted drafts).
    pub fn passed(&mut self, tokens: u64, time: Duration) {
        match &mut self.trial {
            Some(trial) if !trial.begun => trial.begun = true,
            Some(trial) => {
                trial.passes.add(tokens, time);
                let (passes, usual) = (trial.passes, self.usual);
                let pays = passes.cost() < usual.cost() * MIN_GAIN;
                if passes.number >= TRIAL && pays {
                    self.promise = self.trial.take();
                    self.usual = Passes::default();
                } else if passes.number >= TRIAL
                    || passes.number >= MIN_PASSES && passes.cost() > usual.cost() * 1.5
                {
                    self.settle(false);
                }
            }
            None => {
                self.usual.add(tokens, time);
                self.left = self.left.saturating_sub(tokens);
                if self.depth == 0 {
                    self.plain = self.usual.cost();
                }
                if let Some(promise) = self.promise {
                    if self.usual.number >= CHECK {
                        self.trial = self.promise.take();
                        self.settle(promise.passes.cost() < self.usual.cost() * MIN_GAIN);
                    }
                } else if self.usual.number >= TRIAL && self.usual.cost() * MIN_GAIN > self.plain {
                    self.try_depth(0);
                } else if self.left == 0 && self.usual.number >= MIN_PASSES {
                    self.try_next();
                }
            }
        }
    }

    fn try_next(&mut self) {
        self.up = match self.depth {
            0 => true,
            MAX_DEPTH => false,
            _ => self.up,
        };
        let depth = match self.up {
            true => self.depth + 1,
            false => self.depth - 1,
        };
        self.try_depth(depth);
    }

    fn try_depth(&mut self, depth: usize) {
        self.trial = Some(Trial {
            depth,
            ..Trial::default()
        });
    }

    /// Ends a trial.
    fn settle(&mut self, paid: bool) {
        let Some(trial) = self.trial.take() else {
            return;
        };
        if trial.depth == 0 {
            self.plain = trial.passes.cost();
        }
        if paid {
            self.depth = trial.depth;
            self.usual = trial.passes;
            self.interval = MIN_INTERVAL;
        } else {
            self.up = !self.up;
            self.interval = (4 * self.interval).min(MAX_INTERVAL);
        }
        self.left = self.interval;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a pass takes 1 and `draft` for each draft, and a text that accepts so many drafts from a token on.
    struct World {
        draft: f64,
        come_true: fn(u64) -> usize,
        time: f64,
        tokens: u64,
    }

    impl World {
        fn new(draft: f64, come_true: fn(u64) -> usize) -> World {
            World {
                draft,
                come_true,
                time: 0.0,
                tokens: 0,
            }
        }

        fn run(&mut self, auto: &mut Auto, tokens: u64) -> f64 {
            let (time, end) = (self.time, self.tokens + tokens);
            while self.tokens < end {
                let drafts = auto.drafts();
                let took = 1.0 + self.draft * drafts as f64;
                let brought = 1 + drafts.min((self.come_true)(self.tokens)) as u64;
                self.time += took;
                self.tokens += brought;
                auto.passed(brought, Duration::from_secs_f64(took));
            }
            (self.time - time) / tokens as f64
        }
    }

    #[test]
    fn drafts_that_come_true_are_made() {
        let mut auto = Auto::new();
        let mut world = World::new(0.3, |_| MAX_DEPTH);
        world.run(&mut auto, 200);
        assert_eq!(auto.depth(), MAX_DEPTH);
        let cost = world.run(&mut auto, 1000);
        assert!(cost < 1.05 * (1.0 + 0.3 * 4.0) / 5.0, "{cost}");
    }

    #[test]
    fn drafts_that_never_come_true_cost_little() {
        let mut auto = Auto::new();
        let mut world = World::new(0.9, |_| 0);
        let first = world.run(&mut auto, 128);
        assert!(first < 1.06, "{first}");
        let later = world.run(&mut auto, 4000);
        assert!(later < 1.01, "{later}");
        assert_eq!((auto.depth(), auto.drafts() <= 1), (0, true));
    }

    #[test]
    fn as_deep_as_pays() {
        // The first draft comes true, the second never.
        let mut auto = Auto::new();
        let mut world = World::new(0.3, |_| 1);
        world.run(&mut auto, 300);
        assert_eq!(auto.depth(), 1);
        let cost = world.run(&mut auto, 3000);
        assert!(cost < 1.03 * 1.3 / 2.0, "{cost}");
        // True and too dear.
        let mut auto = Auto::new();
        let cost = World::new(1.1, |_| MAX_DEPTH).run(&mut auto, 3000);
        assert!(auto.depth() == 0 && cost < 1.02, "{cost}");
    }

    #[test]
    fn a_text_that_changes_is_noticed() {
        let mut auto = Auto::new();
        let mut world = World::new(0.3, |token| match token {
            0..2000 => MAX_DEPTH,
            2000..8000 => 0,
            _ => MAX_DEPTH,
        });
        world.run(&mut auto, 2000);
        assert_eq!(auto.depth(), MAX_DEPTH);
        let cost = world.run(&mut auto, 6000);
        assert_eq!(auto.depth(), 0);
        assert!(cost < 1.1, "{cost}");
        world.run(&mut auto, 3000);
        assert_eq!(auto.depth(), MAX_DEPTH);
    }

    #[test]
    fn cache_warmup_is_not_credited_to_drafts() {
        // Experts come into memory: the first passes cost five times as much. Every other draft comes true, which does not pay.
        let (mut auto, mut drafted, mut tokens, mut passes) = (Auto::new(), 0, 0u64, 0u64);
        while tokens < 400 {
            let drafts = auto.drafts();
            drafted += drafts;
            passes += 1;
            let cold = 1.0 + 4.0 * (-(tokens as f64) / 20.0).exp();
            let brought = 1 + (drafts as u64).min(passes & 1);
            auto.passed(
                brought,
                Duration::from_secs_f64(cold * (1.0 + 0.7 * drafts as f64)),
            );
            tokens += brought;
        }
        assert_eq!(auto.depth(), 0);
        assert!(drafted < 40, "{drafted}");
    }

    #[test]
    fn noise_does_not_make_it_draft_for_nothing() {
        let mut auto = Auto::new();
        let (mut tokens, mut drafted) = (0u64, 0);
        let mut state = 1u64;
        while tokens < 5000 {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let noise = 0.6 + 0.8 * (state >> 40) as f64 / f64::from(1 << 24);
            let drafts = auto.drafts();
            drafted += drafts;
            // Every other draft comes true, and costs as much as it brings.
            let brought = 1 + (drafts as u64).min((state >> 20) & 1);
            let took = noise * (1.0 + 0.6 * drafts as f64);
            auto.passed(brought, Duration::from_secs_f64(took));
            tokens += brought;
        }
        assert!(drafted < 1500, "{drafted}");
    }
}
