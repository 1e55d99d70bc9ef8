//! Names why experts are requested, and the pieces that are handed out.

use crate::quant::Matrix;

/// Why experts are requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// The router chose them: the layer cannot finish without them.
    Demand,
    /// The router of a later layer will probably choose them.
    Prefetch,
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
