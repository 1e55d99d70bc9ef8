//! A record of reads, for whoever wants to see when each drive did what.
//!
//! Bounded and made beforehand, so that recording is a store into memory. It knows reads by their number, as
//! [`Engine::read`](crate::engine::Engine::read) gave it out; what was in them, only the caller knows.

use std::time::{Duration, Instant};

use crate::extent::PARTS;
use crate::schedule::Priority;

/// One chunk at a drive, from its submission to its end.
#[derive(Clone, Copy, Debug)]
pub struct ChunkRead {
    /// The number of the read that it belongs to.
    pub read: u64,
    /// Since [`Record::epoch`], when it was submitted.
    pub begin: Duration,
    /// Since [`Record::epoch`], when its end was noticed.
    pub end: Duration,
    /// Bytes that came, alignment included: 0 when it failed.
    pub bytes: u64,
    /// The [`Replica::source`](crate::replica::Replica::source) that it was read from.
    pub source: u32,
    /// Why it was wanted when it was submitted.
    pub priority: Priority,
    /// For each part of the slab, whether it carries bytes of it.
    pub parts: [bool; PARTS],
}

/// The chunks of an engine in the order of their ends.
#[derive(Debug)]
pub struct Record {
    /// The device's time 0.
    pub epoch: Instant,
    /// What was recorded.
    pub chunks: Vec<ChunkRead>,
    /// Chunks for which there was no room any more.
    pub lost: u64,
    room: usize,
}

impl Record {
    /// A record with room for that many chunks. Its memory is touched only as it fills.
    pub(crate) fn new(room: usize) -> Record {
        Record {
            epoch: Instant::now(),
            chunks: Vec::with_capacity(room),
            lost: 0,
            room,
        }
    }

    pub(crate) fn push(&mut self, chunk: ChunkRead) {
        if self.chunks.len() < self.room {
            self.chunks.push(chunk);
        } else {
            self.lost += 1;
        }
    }
}
