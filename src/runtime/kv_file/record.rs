//! Records: a head with kind, length and checksums, then the payload. A turn is a `Turn` record, its ids and rows, and an `End`.

use super::error::Flaw;
use crate::checksum;

/// Bytes of a record's head: kind, bytes of the payload, CRC-32 of the payload, CRC-32 of the head.
pub const HEAD: usize = 16;
/// Bytes of the longest payload.
pub const MAX_PAYLOAD: usize = 1 << 20;

/// What a record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The widths of the rows of every layer; before the first turn, and before a later one that has a layer more, which predicts.
    Shape = 1,
    /// A turn begins: its number, how many tokens of before it keeps.
    Turn = 2,
    /// Token ids.
    Ids = 3,
    /// Rows of a layer.
    Rows = 4,
    /// The turn is complete: its number, tokens of the history.
    End = 5,
    /// A note of the caller.
    Note = 6,
}

/// The head of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub kind: Kind,
    /// Bytes of the payload.
    pub len: usize,
    /// CRC-32 of the payload.
    pub sum: u32,
}

impl Head {
    /// That of a payload of at most [`MAX_PAYLOAD`] bytes.
    pub fn of(kind: Kind, payload: &[u8]) -> Head {
        debug_assert!(payload.len() <= MAX_PAYLOAD);
        Head {
            kind,
            len: payload.len(),
            sum: crc32fast::hash(payload),
        }
    }

    /// As it is written.
    pub fn to_bytes(self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[..4].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&(self.len as u32).to_le_bytes());
        bytes[8..12].copy_from_slice(&self.sum.to_le_bytes());
        let sum = crc32fast::hash(&bytes[..12]);
        bytes[12..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Checks the head of the record at byte `offset` of the file.
    pub fn from_bytes(bytes: &[u8; HEAD], offset: u64) -> Result<Head, Flaw> {
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if !checksum::holds(&bytes[..12], u32_at(12)) {
            return Err(Flaw::at(offset, "the checksum of a record is wrong"));
        }
        let kind = match u32_at(0) {
            1 => Kind::Shape,
            2 => Kind::Turn,
            3 => Kind::Ids,
            4 => Kind::Rows,
            5 => Kind::End,
            6 => Kind::Note,
            _ => return Err(Flaw::at(offset, "a record of an unknown kind")),
        };
        let len = u32_at(4) as usize;
        if len > MAX_PAYLOAD {
            return Err(Flaw::at(offset, "a record that is too long"));
        }
        let sum = u32_at(8);
        Ok(Head { kind, len, sum })
    }

    /// Checks a payload of its length.
    pub fn check(&self, payload: &[u8], offset: u64) -> Result<(), Flaw> {
        if !checksum::holds(payload, self.sum) {
            let what = "the checksum of a record's content is wrong";
            return Err(Flaw::at(offset, what));
        }
        Ok(())
    }
}

/// The numbers of a payload, from its beginning.
pub struct Numbers<'a>(pub &'a [u8]);

impl Numbers<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}
