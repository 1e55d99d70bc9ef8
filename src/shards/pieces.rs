//! Sums up data that arrives in pieces, in any order.

use std::sync::{Mutex, PoisonError};

use crc32fast::Hasher;

/// The CRC-32 of data that threads read or write piece by piece, in any order.
#[derive(Debug, Default)]
pub(crate) struct Pieces(Mutex<Vec<(u64, Hasher)>>);

impl Pieces {
    /// Adds the piece that begins at `at`.
    pub fn add(&self, data: &[u8], at: u64) {
        if data.is_empty() {
            return;
        }
        let mut crc = Hasher::new();
        crc.update(data);
        self.add_summed(crc, at);
    }

    /// Adds the piece that begins at `at` and that `crc` has summed up.
    pub fn add_summed(&self, crc: Hasher, at: u64) {
        let mut pieces = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pieces.push((at, crc));
    }

    /// Of all pieces, which must be there without gaps.
    pub fn total(self) -> u32 {
        let mut pieces = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        pieces.sort_by_key(|(at, _)| *at);
        let mut all = Hasher::new();
        pieces.iter().for_each(|(_, crc)| all.combine(crc));
        all.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_pieces_does_not_count() {
        let data: Vec<u8> = (0..1000u32).map(|i| (i * i) as u8).collect();
        let pieces = Pieces::default();
        for (from, to) in [(500, 1000), (0, 3), (3, 3), (3, 500)] {
            pieces.add(&data[from..to], from as u64);
        }
        assert_eq!(pieces.total(), crc32fast::hash(&data));
    }
}
