//! Measures where the time of a forward pass goes, phase by phase.

use std::time::{Duration, Instant};

use super::phase::Phase;
use super::timeline::Timeline;

/// Adds the time since the last lap to a phase.
#[derive(Debug)]
pub struct PhaseTimer {
    last: Instant,
    spent: [Duration; Phase::ALL.len()],
    /// Every span, while a recording runs.
    pub(super) timeline: Option<Box<Timeline>>,
}

impl PhaseTimer {
    /// A timer that has measured nothing.
    pub fn new() -> PhaseTimer {
        PhaseTimer {
            last: Instant::now(),
            spent: Default::default(),
            timeline: None,
        }
    }

    /// Counts the time since the last lap for no phase.
    pub fn skip(&mut self) {
        self.last = Instant::now();
    }

    /// Counts the time since the last lap for `phase`.
    pub fn lap(&mut self, phase: Phase) {
        let now = Instant::now();
        self.spent[phase as usize] += now - self.last;
        if let Some(timeline) = &mut self.timeline {
            timeline.push(phase, self.last, now);
        }
        self.last = now;
    }

    /// A forward pass of `tokens` tokens begins; the first one is at `position` of its sequence.
    pub fn pass(&mut self, position: usize, tokens: usize) {
        if let Some(timeline) = &mut self.timeline {
            timeline.pass(position, tokens);
        }
    }

    /// The next laps are in a layer.
    pub fn layer(&mut self, layer: usize) {
        if let Some(timeline) = &mut self.timeline {
            timeline.layer(layer);
        }
    }

    /// The next lap is of an expert: its down projection, or gate and up.
    pub fn expert(&mut self, expert: u32, down: bool) {
        if let Some(timeline) = &mut self.timeline {
            timeline.expert(expert, down);
        }
    }

    /// Time spent in a phase so far.
    pub fn spent(&self, phase: Phase) -> Duration {
        self.spent[phase as usize]
    }
}
