//! Records which drive read which chunk when.
//!
//! The record is bounded and allocated at the start, so that recording is a store into memory. It numbers reads as
//! [`Engine::read`](crate::Engine::read) returned it; the caller knows what was in them.

use std::time::{Duration, Instant};

use crate::event::Priority;
use crate::extent::PARTS;

/// One chunk at a drive, from its submission to its end.
#[derive(Clone, Copy, Debug)]
pub struct ChunkRead {
    /// The number of the read that it belongs to.
    pub read: u64,
    /// Since [`Record::epoch`], when it was submitted.
    pub begin: Duration,
    /// Since [`Record::epoch`], when its end was noticed.
    pub end: Duration,
    /// Bytes read, alignment included: 0 when it failed.
    pub bytes: u64,
    /// The [`Replica::source`](crate::Replica::source) that it was read from.
    pub source: u32,
    /// Its priority when it was submitted.
    pub priority: Priority,
    /// For each part of the slab, whether the chunk has bytes of it.
    pub parts: [bool; PARTS],
}

/// The chunks of an engine in the order of their ends.
#[derive(Debug)]
pub struct Record {
    /// The device's time 0.
    pub epoch: Instant,
    /// The recorded chunks.
    pub chunks: Vec<ChunkRead>,
    /// Chunks beyond the record's capacity, which were not recorded.
    pub lost: u64,
    capacity: usize,
}

impl Record {
    /// A record of at most `capacity` chunks. Its memory is touched only as it fills.
    pub(crate) fn new(capacity: usize) -> Record {
        Record {
            epoch: Instant::now(),
            chunks: Vec::with_capacity(capacity),
            lost: 0,
            capacity,
        }
    }

    pub(crate) fn push(&mut self, chunk: ChunkRead) {
        if self.chunks.len() < self.capacity {
            self.chunks.push(chunk);
        } else {
            self.lost += 1;
        }
    }
}
