//! Hands the tools of a forward pass down through the layers.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::model::error::ModelError;
use crate::model::progress::Meter;
use crate::model::rope::Angle;
use crate::model::timer::PhaseTimer;
use crate::pool::Pool;
use crate::stream::ExpertStore;

/// The tools of a pass.
#[derive(Debug)]
pub struct Pass<'a> {
    /// The compute threads.
    pub pool: &'a Pool,
    /// Measures the time of each phase.
    pub timer: &'a mut PhaseTimer,
    /// Reads the experts.
    pub store: &'a mut ExpertStore,
    /// Reports the progress of a prompt.
    pub meter: &'a mut Meter,
    /// Becomes true when the pass should end early.
    pub stop: Option<&'a AtomicBool>,
}

impl Pass<'_> {
    /// Called before every block of tokens and every expert: a layer of a long prompt takes too long to wait for.
    ///
    /// # Errors
    /// [`ModelError::Stopped`] when the stop flag is set.
    pub fn check_stop(&self) -> Result<(), ModelError> {
        match self.stop {
            Some(stop) if stop.load(Ordering::Relaxed) => Err(ModelError::Stopped),
            _ => Ok(()),
        }
    }
}

/// Consecutive rows of a batch, on their way through the attention of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Their number, at least 1.
    pub n: usize,
    /// Index of the first in the batch.
    pub row: usize,
    /// The normed residual [n, hidden].
    pub x: &'a [f32],
    /// Angles of their positions, [n, qk_rope_head_dim / 2].
    pub angles: &'a [Angle],
}

impl<'a> Tokens<'a> {
    /// The angles of token `i`.
    pub fn angles_of(&self, i: usize) -> &'a [Angle] {
        let pairs = self.angles.len() / self.n;
        &self.angles[i * pairs..(i + 1) * pairs]
    }
}
