//! Holds what is left to read of a slab.

use std::collections::VecDeque;
use std::time::Duration;

use crate::arena::SlabId;
use crate::event::{Priority, ReadError};
use crate::extent::{Chunk, PARTS};

/// A slab that is being filled.
#[derive(Debug)]
pub(super) struct Job {
    /// Number of slabs pushed before it.
    pub(super) number: u64,
    pub(super) priority: Priority,
    pub(super) waiting: VecDeque<Waiting>,
    pub(super) in_flight: usize,
    /// Bytes of each part that are not in yet.
    pub(super) missing: [u64; PARTS],
    pub(super) dropped: bool,
    pub(super) error: Option<ReadError>,
}

impl Job {
    pub(super) fn new(number: u64, priority: Priority, chunks: &[Chunk]) -> Job {
        let mut missing = [0; PARTS];
        for chunk in chunks {
            for (missing, payload) in missing.iter_mut().zip(chunk.payload) {
                *missing += payload;
            }
        }
        let waiting = chunks.iter().map(|&chunk| Waiting {
            chunk,
            done: 0,
            failed: 0,
            interrupted: 0,
        });
        Job {
            number,
            priority,
            waiting: waiting.collect(),
            in_flight: 0,
            missing,
            dropped: false,
            error: None,
        }
    }

    /// Bytes that no device has.
    pub(super) fn waiting_bytes(&self) -> u64 {
        self.waiting.iter().map(Waiting::len).sum()
    }
}

/// A chunk that no device has, or its unread rest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) chunk: Chunk,
    /// Bytes of it that are in already, a multiple of the alignment.
    pub(super) done: u64,
    /// Bit i: copy i has failed to read it.
    pub(super) failed: u32,
    /// How often it was interrupted without progress.
    pub(super) interrupted: u16,
}

impl Waiting {
    /// Bytes that are not in.
    pub(super) fn len(&self) -> u64 {
        self.chunk.len - self.done
    }
}

/// A read that a device has.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub(super) slab: SlabId,
    pub(super) waiting: Waiting,
    pub(super) copy: u8,
    pub(super) direct: bool,
    /// Index of its drive.
    pub(super) drive: usize,
    pub(super) priority: Priority,
    pub(super) since: Duration,
    /// It only measures its drive: no slab waits for it. The seconds that it is expected to take.
    pub(super) probe: Option<f64>,
}
