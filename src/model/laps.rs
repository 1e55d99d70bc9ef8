//! What was computed when: the laps of the clock, kept one by one.

use std::time::{Duration, Instant};

use super::clock::Phase;

/// A stretch of time in one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lap {
    /// Since [`Laps::epoch`].
    pub begin: Duration,
    /// Since [`Laps::epoch`].
    pub end: Duration,
    /// Index in [`Laps::walks`].
    pub walk: u32,
    /// What was done.
    pub phase: Phase,
    /// In which layer, if in one.
    pub layer: Option<u32>,
    /// Of which expert: its id, and whether it was down, or gate and up.
    pub expert: Option<(u32, bool)>,
}

/// Tokens on their way through all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walk {
    /// Position of the first in the context.
    pub position: usize,
    /// How many.
    pub tokens: usize,
}

/// All laps of a session, up to a number.
#[derive(Debug)]
pub struct Laps {
    /// When it began.
    pub epoch: Instant,
    /// In order.
    pub laps: Vec<Lap>,
    /// In order.
    pub walks: Vec<Walk>,
    /// Laps for which there was no room any more.
    pub lost: u64,
    room: usize,
    layer: Option<u32>,
    expert: Option<(u32, bool)>,
}

impl Laps {
    /// Room for that many laps. Its memory is touched only as it fills.
    pub(super) fn new(room: usize) -> Laps {
        Laps {
            epoch: Instant::now(),
            laps: Vec::with_capacity(room),
            walks: Vec::new(),
            lost: 0,
            room,
            layer: None,
            expert: None,
        }
    }

    pub(super) fn pass(&mut self, position: usize, tokens: usize) {
        if self.laps.len() < self.room {
            self.walks.push(Walk { position, tokens });
        }
    }

    pub(super) fn layer(&mut self, layer: usize) {
        self.layer = Some(layer as u32);
    }

    pub(super) fn expert(&mut self, expert: u32, down: bool) {
        self.expert = Some((expert, down));
    }

    pub(super) fn push(&mut self, phase: Phase, begin: Instant, end: Instant) {
        /// Shorter ones are the clock itself.
        const SHORTEST: Duration = Duration::from_nanos(500);
        let expert = self.expert.take();
        if end - begin < SHORTEST {
            return;
        }
        if self.laps.len() == self.room {
            self.lost += 1;
            return;
        }
        self.laps.push(Lap {
            begin: begin.saturating_duration_since(self.epoch),
            end: end.saturating_duration_since(self.epoch),
            walk: self.walks.len().saturating_sub(1) as u32,
            phase,
            layer: match phase {
                Phase::Embed | Phase::Head | Phase::Draft => None,
                _ => self.layer,
            },
            expert: expert.filter(|_| phase == Phase::Experts),
        });
    }
}
