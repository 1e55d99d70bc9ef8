//! Says what a read is for and what became of it.

use std::io;
use std::path::PathBuf;

use crate::arena::SlabId;
use crate::kernel::explained;

/// What a read is for. All waiting demands are read before any prefetch, and those before any preload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// The caller waits for it.
    Demand,
    /// The caller may need it soon.
    Prefetch,
    /// The caller will need it some time; it gets idle bandwidth.
    Preload,
}

impl Priority {
    /// All, the most urgent first.
    pub(crate) const ALL: [Priority; 3] = [Priority::Demand, Priority::Prefetch, Priority::Preload];
}

/// What happened to a slab.
#[derive(Debug)]
pub enum Event {
    /// All bytes of a part are in.
    Part(SlabId, u8),
    /// All bytes are in.
    Full(SlabId),
    /// The read was abandoned before all bytes were in; nothing writes into the slab any more.
    Dropped(SlabId),
    /// A read failed on every copy; nothing writes into the slab any more.
    Failed(SlabId, ReadError),
}

/// A read that failed on every copy of the file.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {len} bytes at offset {offset} of {}: {source}{}", path.display(), explained(source))]
pub struct ReadError {
    /// Index of the file.
    pub file: u32,
    /// Path of the copy that failed last.
    pub path: PathBuf,
    /// First byte of the failed read.
    pub offset: u64,
    /// Its length.
    pub len: u64,
    /// The kernel's error.
    pub source: io::Error,
}
