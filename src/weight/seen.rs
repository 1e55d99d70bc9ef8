//! Checks the bytes of tensors while they are read, and sums them up.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use super::damage;
use crate::quant::Format;
use crate::shards::Pieces;

/// Bytes that are summed up and then checked: the first-level cache holds them.
const TILE: usize = 16 << 10;

/// What threads have seen of one tensor. The default one sums up nothing.
#[derive(Debug, Default)]
pub struct Seen {
    pieces: Option<Pieces>,
    suspicious: AtomicBool,
}

impl Seen {
    /// Nothing yet. `summed` is for [`Seen::total`].
    pub fn new(summed: bool) -> Seen {
        Seen {
            pieces: summed.then(Pieces::default),
            ..Seen::default()
        }
    }

    /// Looks at the bytes of a tensor from its byte `at` on. `format` is `None` for scales.
    pub fn look(&self, format: Option<Format>, at: u64, piece: &[u8]) {
        let mut crc = crc32fast::Hasher::new();
        // A value that is cut in two is looked at when the tensor is complete.
        let width = damage::value_bytes(format.unwrap_or(Format::F32));
        let mut suspicious = !at.is_multiple_of(width as u64);
        for tile in piece.chunks(TILE) {
            if self.pieces.is_some() {
                crc.update(tile);
            }
            if !suspicious {
                suspicious = damage::is_suspicious(tile, format);
            }
        }
        if let Some(pieces) = &self.pieces {
            pieces.add_summed(crc, at);
        }
        if suspicious {
            self.suspicious.store(true, Ordering::Relaxed);
        }
    }

    /// Whether [`damage::check`] may find something.
    pub fn is_suspicious(&self) -> bool {
        self.suspicious.load(Ordering::Relaxed)
    }

    /// The CRC-32 of the tensor, all of whose bytes have been seen; 0 if nothing was summed up.
    pub fn total(self) -> u32 {
        self.pieces.map_or(0, Pieces::total)
    }
}

/// One number for the content of many tensors, in whatever order they are added.
#[derive(Debug, Default)]
pub struct Digest(BTreeMap<String, u32>);

impl Digest {
    /// Adds a tensor by its name and the sum of its content.
    pub fn add(&mut self, name: &str, sum: u32) {
        self.0.insert(name.to_owned(), sum);
    }

    /// CRC-32 of all names and sums.
    pub fn total(&self) -> u32 {
        let mut crc = crc32fast::Hasher::new();
        for (name, sum) in &self.0 {
            crc.update(name.as_bytes());
            crc.update(&sum.to_le_bytes());
        }
        crc.finalize()
    }
}
