//! Where the time of a forward pass goes.

use std::time::{Duration, Instant};

use super::laps::Laps;

/// A part of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Embedding rows.
    Embed,
    /// Projections, scores and values of attention, with its norm.
    Attention,
    /// Keys, scores and choice of the indexers.
    Indexer,
    /// The router of a layer and the early look at the next one's, with the norm before them.
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
    /// What only the prediction layer has: its input and its head. The rest of it is counted as in any layer.
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
pub struct Clock {
    last: Instant,
    spent: [Duration; Phase::ALL.len()],
    /// Every lap, if somebody wants to see them.
    pub(super) laps: Option<Box<Laps>>,
}

impl Clock {
    /// A clock that has measured nothing.
    pub fn new() -> Clock {
        Clock {
            last: Instant::now(),
            spent: Default::default(),
            laps: None,
        }
    }

    /// What happened since the last lap belongs to nothing.
    pub fn skip(&mut self) {
        self.last = Instant::now();
    }

    /// What happened since the last lap was `phase`.
    pub fn lap(&mut self, phase: Phase) {
        let now = Instant::now();
        self.spent[phase as usize] += now - self.last;
        if let Some(laps) = &mut self.laps {
            laps.push(phase, self.last, now);
        }
        self.last = now;
    }

    /// What follows is the way of `tokens` tokens from `position` on.
    pub fn pass(&mut self, position: usize, tokens: usize) {
        if let Some(laps) = &mut self.laps {
            laps.pass(position, tokens);
        }
    }

    /// What follows is in a layer.
    pub fn layer(&mut self, layer: usize) {
        if let Some(laps) = &mut self.laps {
            laps.layer(layer);
        }
    }

    /// The next lap is about an expert: its gate and up, or its down.
    pub fn expert(&mut self, expert: u32, down: bool) {
        if let Some(laps) = &mut self.laps {
            laps.expert(expert, down);
        }
    }

    /// Time spent in a phase so far.
    pub fn spent(&self, phase: Phase) -> Duration {
        self.spent[phase as usize]
    }
}
