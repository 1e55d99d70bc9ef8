//! The expert store: which experts are in memory, which are being read, and which come next.
//!
//! The model says [`ExpertStore::want`] and takes what it can compute from [`ExpertStore::next`]; it never sees
//! a file or a slab.

pub mod cache;
pub mod catalog;
pub mod demand_trace;
mod error;
pub mod files;
mod prefetch_policy;
pub mod routing;
pub mod slots;
pub mod store;
pub mod usage;

pub use catalog::Catalog;
pub use error::StreamError;
pub use files::ExpertFiles;
pub use prefetch_policy::LayerStats;
pub use store::{ExpertStore, StoreOptions, StreamStats};

use crate::quant::Matrix;

/// Why an expert is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// The router chose it: the layer cannot finish without it.
    Demand,
    /// The router of a later layer will probably choose it.
    Prefetch,
}

/// How many experts of the next layer are read ahead of its router's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Lookahead {
    /// As many as pay for themselves, by what prefetches have cost and brought so far.
    #[default]
    Auto,
    /// None.
    Off,
    /// This many for each token.
    Experts(usize),
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
