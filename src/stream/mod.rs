//! Streams routed experts: keeps some in memory, reads the others when they are requested, prefetches the predicted ones.
//!
//! The model calls [`ExpertStore::request`] and computes what [`ExpertStore::next`] hands out; it never sees a file or a slab.

pub mod cache;
pub mod catalog;
pub mod demand_trace;
mod error;
pub mod eviction;
pub mod files;
pub mod key;
pub mod pins;
mod prefetch_policy;
mod request;
pub mod routing;
pub mod slots;
pub mod store;
pub mod usage;

pub use catalog::Catalog;
pub use error::StreamError;
pub use files::ExpertFiles;
pub use key::ExpertKey;
pub use prefetch_policy::{Lookahead, PrefetchAccuracy};
pub use request::{Ready, Urgency};
pub use store::{ExpertStore, StoreOptions, StoreStats};
