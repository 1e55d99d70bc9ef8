//! Queues the reads of pinned experts, which run while the drives are otherwise idle.

use std::collections::VecDeque;

use colibri_ring::SlabId;

use crate::stream::key::ExpertKey;

/// Reads at once: enough to keep the drives busy while an attention is computed.
const AT_ONCE: usize = 8;

/// Pinned experts that have not been read.
#[derive(Debug, Default)]
pub(super) struct PreloadQueue {
    /// The hottest first.
    waiting: VecDeque<ExpertKey>,
    /// Slabs that are being read into.
    reading: Vec<SlabId>,
}

impl PreloadQueue {
    pub fn new(pinned: Vec<ExpertKey>) -> PreloadQueue {
        PreloadQueue {
            waiting: pinned.into(),
            reading: Vec::new(),
        }
    }

    /// The expert to read next, unless enough are being read.
    pub fn next(&self) -> Option<ExpertKey> {
        let next = self.waiting.front().copied();
        next.filter(|_| self.reading.len() < AT_ONCE)
    }

    /// Takes the expert of [`PreloadQueue::next`] off the queue: it is being read into `slab`, or was demanded before.
    pub fn pop(&mut self, slab: Option<SlabId>) {
        self.waiting.pop_front();
        self.reading.extend(slab);
    }

    /// A read has ended.
    pub fn ended(&mut self, slab: SlabId) {
        self.reading.retain(|s| *s != slab);
    }
}
