//! Tells the time of the clock that the drives run on.

use std::time::{Duration, Instant};

use colibri_ring::sim::Clock;

/// The clock that the drives run on.
#[derive(Debug)]
pub(super) enum Time {
    Real(Instant),
    Simulated(Clock),
}

impl Time {
    /// Since some start.
    pub fn now(&self) -> Duration {
        match self {
            Time::Real(start) => start.elapsed(),
            Time::Simulated(clock) => clock.now(),
        }
    }
}
