//! Records which expert each read brings, and which demands hit: gives the engine's record of chunks its meaning.

use std::time::Instant;

use super::key::ExpertKey;

/// Most entries of each kind that a trace keeps: the first hundreds of tokens of a large model.
pub const MAX_ENTRIES: usize = 1 << 18;

/// Bytes of one entry of every kind, recorded and in the finished trace. A number, because the types are in modules above this one;
/// `tools::trace` asserts that it is enough.
pub const ENTRY_BYTES: usize = 328;

/// Most bytes that a trace with so many entries takes.
pub const fn bytes(entries: usize) -> u64 {
    (entries * ENTRY_BYTES) as u64
}

/// How many entries fit into so many bytes.
pub fn entries_in(bytes: u64) -> usize {
    usize::try_from(bytes / ENTRY_BYTES as u64).map_or(MAX_ENTRIES, |n| n.min(MAX_ENTRIES))
}

/// A demand for experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct DemandRecord {
    /// When it came.
    pub at: Instant,
    /// Index of the layer.
    pub layer: u32,
    /// Experts that were in memory.
    pub hits: u32,
    /// Experts that were not, or not whole.
    pub misses: u32,
}

/// Reads and demands of a store, up to a number of entries of each.
#[derive(Debug)]
pub struct DemandTrace {
    capacity: usize,
    /// By the number of the read, its expert.
    started: Vec<ExpertKey>,
    /// All demands, in order.
    pub demands: Vec<DemandRecord>,
    /// By layer and expert, how often it was demanded.
    pub uses: Vec<Vec<u32>>,
    /// Demands beyond the capacity.
    pub lost: u64,
}

impl DemandTrace {
    pub(super) fn new(capacity: usize) -> DemandTrace {
        DemandTrace {
            capacity,
            started: Vec::new(),
            demands: Vec::new(),
            uses: Vec::new(),
            lost: 0,
        }
    }

    /// The expert of read `number`, unless it is beyond the capacity.
    pub fn key(&self, number: u64) -> Option<ExpertKey> {
        self.started.get(usize::try_from(number).ok()?).copied()
    }

    /// Reads are numbered from 0 on, without gaps.
    pub(super) fn started(&mut self, number: u64, key: ExpertKey) {
        if self.started.len() < self.capacity {
            debug_assert_eq!(number, self.started.len() as u64);
            self.started.push(key);
        }
    }

    pub(super) fn demanded(&mut self, layer: usize, ids: &[u32], hits: u64) {
        if self.uses.len() <= layer {
            self.uses.resize_with(layer + 1, Vec::new);
        }
        let uses = &mut self.uses[layer];
        for id in ids.iter().map(|id| *id as usize) {
            if uses.len() <= id {
                uses.resize(id + 1, 0);
            }
            uses[id] = uses[id].saturating_add(1);
        }
        if self.demands.len() == self.capacity {
            self.lost += 1;
            return;
        }
        self.demands.push(DemandRecord {
            at: Instant::now(),
            layer: layer as u32,
            hits: hits as u32,
            misses: (ids.len() as u64 - hits) as u32,
        });
    }
}
