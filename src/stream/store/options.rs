//! Holds the options of a store.

use colibri_ring::Options;

use crate::stream::prefetch_policy::Lookahead;
use crate::stream::slots::Slots;

/// How experts are cached and read.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Memory for experts.
    pub slots: Slots,
    /// Reads ahead of the router.
    pub lookahead: Lookahead,
    /// Device, windows, chunk size.
    pub engine: Options,
}
