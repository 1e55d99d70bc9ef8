//! Measures where the time of a forward pass goes, phase by phase.

use std::time::{Duration, Instant};

use super::timeline::Timeline;

/// A part of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Embedding rows.
    Embed,
    /// Projections, scores and values of attention, with its norm.
    Attention,
    /// Keys, scores and choice of the indexers.
    Indexer,
    /// The router of a layer and the predictions for the next one, with the norm before them.
    Router,
    /// Arithmetic of the routed experts.
    Experts,
    /// Waiting for the reads of experts.
    IoWait,
    /// Shared experts.
    Shared,
    /// MLPs of dense layers.
    Dense,
    /// Final norm and vocabulary projection.
    Head,
    /// Input and head of the prediction layer. The rest of that layer counts as in any layer.
    Draft,
}

impl Phase {
    /// All phases with their names.
    pub const ALL: [(Phase, &'static str); 10] = [
        (Phase::Embed, "embed"),
        (Phase::Attention, "attention"),
        (Phase::Indexer, "indexer"),
        (Phase::Router, "router"),
        (Phase::Experts, "experts"),
        (Phase::IoWait, "io_wait"),
        (Phase::Shared, "shared"),
        (Phase::Dense, "dense"),
        (Phase::Head, "head"),
        (Phase::Draft, "draft"),
    ];
}

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
