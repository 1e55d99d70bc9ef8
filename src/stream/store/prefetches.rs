//! Queues prefetches, and drops those that mispredicted.

use std::collections::VecDeque;

use colibri_ring::SlabId;

use super::slabs::ExpertSlabs;
use crate::stream::cache::Cache;
use crate::stream::key::ExpertKey;

/// Experts that are predicted to be demanded.
#[derive(Debug, Default)]
pub(super) struct PrefetchQueue {
    /// Experts that have no slab yet, most likely first.
    waiting: VecDeque<ExpertKey>,
    /// Slabs that were read on a prediction and have not been demanded.
    unconfirmed: Vec<SlabId>,
    /// Slabs that are read for the next group of experts of the same layer.
    next_group: Vec<SlabId>,
}

impl PrefetchQueue {
    /// Replaces what waits by `ids`, the most likely first. Experts that have a slab are only protected from eviction.
    pub fn replace(&mut self, layer: usize, ids: &[u32], cache: &mut Cache) {
        self.waiting.clear();
        for key in ids.iter().map(|&expert| ExpertKey { layer, expert }) {
            match cache.slab(key) {
                // It must not be evicted for another prediction.
                Some(slab) => cache.touch(slab),
                None => self.waiting.push_back(key),
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The expert to read next.
    pub fn next(&self) -> Option<ExpertKey> {
        self.waiting.front().copied()
    }

    /// The read of [`PrefetchQueue::next`] has started. An expert of the `running` layer is demanded with the layer's next
    /// group: it is no prediction. Returns whether it is one.
    pub fn started(&mut self, slab: SlabId, running: usize) -> bool {
        let key = self.waiting.pop_front();
        let predicted = key.is_some_and(|key| key.layer != running);
        match predicted {
            true => self.unconfirmed.push(slab),
            false => self.next_group.push(slab),
        }
        predicted
    }

    /// Whether the slab was read on a prediction that its router has not confirmed.
    pub fn is_unconfirmed(&self, slab: SlabId) -> bool {
        self.unconfirmed.contains(&slab)
    }

    /// The slabs of the next group, which is demanded now.
    pub fn take_next_group(&mut self) -> Vec<SlabId> {
        std::mem::take(&mut self.next_group)
    }

    /// Drops the queued prefetches that have no slab.
    pub fn drop_waiting(&mut self) {
        self.waiting.clear();
    }

    /// Drops the reads for `layer` that a newer prediction does not confirm, unless they are complete.
    pub fn drop_outdated(&mut self, layer: usize, predicted: &[u32], slabs: &mut ExpertSlabs) {
        for &slab in &self.unconfirmed {
            let key = slabs.key(slab);
            if key.layer == layer && !predicted.contains(&key.expert) && !slabs.is_full(slab) {
                slabs.engine.abandon(slab);
            }
        }
    }

    /// The router of `layer` chose `ids`. Drops what waits and every read up to this layer that mispredicted: the expert is the first to be
    /// evicted, and its read is abandoned if it is not complete. Returns how many predictions came true.
    pub fn drop_mispredicted(&mut self, layer: usize, ids: &[u32], slabs: &mut ExpertSlabs) -> u64 {
        self.drop_waiting();
        let mut confirmed = 0;
        self.unconfirmed.retain(|&slab| {
            let key = slabs.key(slab);
            if key.layer == layer && ids.contains(&key.expert) {
                confirmed += 1;
                return false;
            }
            if key.layer > layer {
                return true;
            }
            slabs.cache.forget_use(slab);
            if !slabs.is_full(slab) {
                slabs.engine.abandon(slab);
            }
            false
        });
        confirmed
    }

    /// The slab holds another expert now, or none.
    pub fn forget(&mut self, slab: SlabId) {
        self.unconfirmed.retain(|s| *s != slab);
        self.next_group.retain(|s| *s != slab);
    }
}
