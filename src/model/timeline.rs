//! Records what was computed when: every span of the phase timer.

use std::time::{Duration, Instant};

use super::phase::Phase;

/// A span of time in one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseSpan {
    /// Since [`Timeline::epoch`].
    pub begin: Duration,
    /// Since [`Timeline::epoch`].
    pub end: Duration,
    /// Index in [`Timeline::passes`].
    pub pass: u32,
    /// What was done.
    pub phase: Phase,
    /// In which layer, if in one.
    pub layer: Option<u32>,
    /// Of which expert: its id, and whether it was the down projection.
    pub expert: Option<(u32, bool)>,
}

/// Tokens that went through all layers together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardPass {
    /// Position of the first token in its sequence.
    pub position: usize,
    /// Number of tokens.
    pub tokens: usize,
}

/// The spans of a runner, up to a number.
#[derive(Debug)]
pub struct Timeline {
    /// When the recording began.
    pub epoch: Instant,
    /// In order.
    pub spans: Vec<PhaseSpan>,
    /// In order.
    pub passes: Vec<ForwardPass>,
    /// Spans beyond the capacity.
    pub lost: u64,
    capacity: usize,
    layer: Option<u32>,
    expert: Option<(u32, bool)>,
}

impl Timeline {
    /// A timeline of at most `capacity` spans. Its memory is touched only as it fills.
    pub(super) fn new(capacity: usize) -> Timeline {
        Timeline {
            epoch: Instant::now(),
            spans: Vec::with_capacity(capacity),
            passes: Vec::new(),
            lost: 0,
            capacity,
            layer: None,
            expert: None,
        }
    }

    pub(super) fn pass(&mut self, position: usize, tokens: usize) {
        if self.spans.len() < self.capacity {
            self.passes.push(ForwardPass { position, tokens });
        }
    }

    pub(super) fn layer(&mut self, layer: usize) {
        self.layer = Some(layer as u32);
    }

    pub(super) fn expert(&mut self, expert: u32, down: bool) {
        self.expert = Some((expert, down));
    }

    pub(super) fn push(&mut self, phase: Phase, begin: Instant, end: Instant) {
        /// Shorter spans measure the timer itself.
        const SHORTEST: Duration = Duration::from_nanos(500);
        let expert = self.expert.take();
        if end - begin < SHORTEST {
            return;
        }
        if self.spans.len() == self.capacity {
            self.lost += 1;
            return;
        }
        self.spans.push(PhaseSpan {
            begin: begin.saturating_duration_since(self.epoch),
            end: end.saturating_duration_since(self.epoch),
            pass: self.passes.len().saturating_sub(1) as u32,
            phase,
            layer: match phase {
                Phase::Embed | Phase::Head | Phase::Draft => None,
                _ => self.layer,
            },
            expert: expert.filter(|_| phase == Phase::Experts),
        });
    }
}
