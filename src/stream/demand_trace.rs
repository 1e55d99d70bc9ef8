//! Which expert each read brings, and which demands were served from memory: what makes a record of reads readable.

use std::time::Instant;

use super::cache::Key;

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

/// The experts of a layer that were demanded at once.
#[derive(Clone, Copy, Debug)]
pub struct Demanded {
    /// When.
    pub at: Instant,
    /// Index of the layer.
    pub layer: u32,
    /// Experts that were in memory.
    pub hits: u32,
    /// Experts that were not, or not whole.
    pub misses: u32,
}

/// What a store did, up to a number of entries.
#[derive(Debug)]
pub struct DemandTrace {
    room: usize,
    /// By the number of the read, what it brings.
    started: Vec<Key>,
    /// All demands, in order.
    pub demands: Vec<Demanded>,
    /// By layer and expert, how often it was demanded.
    pub uses: Vec<Vec<u32>>,
    /// Demands for which there was no room any more.
    pub lost: u64,
}

impl DemandTrace {
    /// A log with room for that many reads and demands.
    pub(super) fn new(room: usize) -> DemandTrace {
        DemandTrace {
            room,
            started: Vec::new(),
            demands: Vec::new(),
            uses: Vec::new(),
            lost: 0,
        }
    }

    /// What read `number` brings, if that was logged.
    pub fn key(&self, number: u64) -> Option<Key> {
        self.started.get(usize::try_from(number).ok()?).copied()
    }

    /// Reads are numbered from 0 on, without gaps.
    pub(super) fn started(&mut self, number: u64, key: Key) {
        if self.started.len() < self.room {
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
        if self.demands.len() == self.room {
            self.lost += 1;
            return;
        }
        self.demands.push(Demanded {
            at: Instant::now(),
            layer: layer as u32,
            hits: hits as u32,
            misses: (ids.len() as u64 - hits) as u32,
        });
    }
}
