//! The expert store: which experts are in memory, which are being read, and which come next.

use crate::quant::Matrix;

/// Why an expert is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The router chose it: the layer cannot finish without it.
    Demand,
    /// The router of a later layer will probably choose it.
    Hint,
}

/// A piece of a demanded expert that is in memory and can be computed now.
#[derive(Debug)]
pub enum Ready<'a> {
    /// The gate and up matrices, [moe_intermediate, hidden] each.
    GateUp {
        /// Expert id.
        expert: u32,
        /// Gate projection.
        gate: Matrix<'a>,
        /// Up projection.
        up: Matrix<'a>,
    },
    /// The down matrix, [hidden, moe_intermediate]. Always after the expert's `GateUp`.
    Down {
        /// Expert id.
        expert: u32,
        /// Down projection.
        down: Matrix<'a>,
    },
}

/// Why an expert could not be had.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {}

/// The expert store.
#[derive(Debug)]
pub struct ExpertStore {}

impl ExpertStore {
    /// Asks for the experts `ids` (ascending, distinct) of `layer`. After a `Demand`, call [`ExpertStore::next`] until
    /// it returns `None` before the next `Demand`. `ids` may be more than there are slabs.
    pub fn want(&mut self, layer: usize, ids: &[u32], want: Want) {
        let _ = (layer, ids, want);
        todo!()
    }

    /// The next piece of the demanded experts that can be computed, resident experts first; blocks until
    /// there is one; `None` when all demanded experts have been handed out. The borrow ends before the
    /// next call, which also frees the slab of a finished expert for reuse.
    ///
    /// # Errors
    /// When a read failed on every copy: names tensor, file and offset.
    pub fn next(&mut self) -> Result<Option<Ready<'_>>, StreamError> {
        todo!()
    }
}
