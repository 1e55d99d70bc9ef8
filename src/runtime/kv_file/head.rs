//! Reads and writes the head of a KV file and its two marks.
//!
//! The head names the model and settings, and is written once. The two *marks* after it are written alternately. Each records how
//! many turns are valid and where they end; the newer one holds, so an interrupted write leaves the other intact. Head and
//! marks take one 512-byte sector each.

use super::error::Flaw;
use super::fingerprint::Fingerprint;
use crate::checksum;

/// The first bytes of every KV file.
pub const MAGIC: [u8; 8] = *b"colikvc\n";
/// Version of the format; other versions are refused by name.
pub const VERSION: u32 = 3;
/// Bytes of the head and of a mark.
pub const SECTOR: usize = 512;
/// Byte offset of the first record.
pub const RECORDS: u64 = 3 * SECTOR as u64;

/// Byte offset of the CRC-32 that ends each sector.
const SUM: usize = SECTOR - 4;

type Sector = [u8; SECTOR];

/// Fills in the sector's checksum.
pub fn seal(mut sector: Sector) -> Sector {
    let sum = crc32fast::hash(&sector[..SUM]).to_le_bytes();
    sector[SUM..].copy_from_slice(&sum);
    sector
}

fn is_sealed(sector: &Sector) -> bool {
    let sum = std::array::from_fn(|i| sector[SUM + i]);
    checksum::holds(&sector[..SUM], u32::from_le_bytes(sum))
}

/// The head of a file that belongs to `fingerprint`.
pub fn head(fingerprint: &Fingerprint) -> Sector {
    let mut head = [0; SECTOR];
    head[..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..][..Fingerprint::BYTES].copy_from_slice(&fingerprint.to_bytes());
    seal(head)
}

/// Whether `bytes` begin like a KV file, of any version or model, even a truncated one.
pub fn is_ours(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// Checks a possibly truncated head: magic bytes, version, checksum, fingerprint, in this order. Returns the fingerprint.
pub fn check(bytes: &[u8], wanted: &Fingerprint) -> Result<Fingerprint, Flaw> {
    if !is_ours(bytes) {
        return Err(Flaw::Foreign);
    }
    let version = bytes
        .get(8..12)
        .map(|v| u32::from_le_bytes([v[0], v[1], v[2], v[3]]));
    let Some((head, version)) = bytes.first_chunk::<SECTOR>().zip(version) else {
        let what = format!("it is truncated: it has only {} bytes", bytes.len());
        return Err(Flaw::Damaged(what));
    };
    if version != VERSION {
        return Err(Flaw::Version(version));
    }
    if !is_sealed(head) {
        return Err(Flaw::Damaged("the checksum of its head is wrong".into()));
    }
    let mut found = [0; Fingerprint::BYTES];
    found.copy_from_slice(&head[12..][..Fingerprint::BYTES]);
    let found = Fingerprint::from_bytes(&found);
    match wanted.difference(&found) {
        Some(what) => Err(Flaw::Other(what)),
        None => Ok(found),
    }
}

/// How much of the file is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Number of turns.
    pub turns: u64,
    /// Byte offset at which their records end.
    pub end: u64,
    /// CRC-32 over the heads of all records.
    pub sum: u32,
}

impl Mark {
    /// The mark of a file without turns.
    pub const EMPTY: Mark = Mark {
        turns: 0,
        end: RECORDS,
        sum: 0,
    };

    /// Byte offset of this mark: the two places alternate.
    pub fn offset(&self) -> u64 {
        SECTOR as u64 * (1 + self.turns % 2)
    }

    /// Encodes the mark, checksum included.
    pub fn to_bytes(self) -> Sector {
        let mut sector = [0; SECTOR];
        sector[..8].copy_from_slice(&self.turns.to_le_bytes());
        sector[8..16].copy_from_slice(&self.end.to_le_bytes());
        sector[16..20].copy_from_slice(&self.sum.to_le_bytes());
        seal(sector)
    }

    fn from_bytes(sector: &Sector) -> Option<Mark> {
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| sector[at + i]));
        let mark = Mark {
            turns: u64_at(0),
            end: u64_at(8),
            sum: u64_at(16) as u32,
        };
        (is_sealed(sector) && mark.end >= RECORDS).then_some(mark)
    }
}

/// The mark that holds, and whether the other one is intact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    pub newest: Mark,
    /// If not, the damaged mark may have been newer: a complete turn after the end of this one belongs to it.
    pub both: bool,
}

/// Decodes the two marks that follow the head.
pub fn marks(bytes: &[u8; 2 * SECTOR]) -> Result<Marks, Flaw> {
    let sectors = bytes.as_chunks::<SECTOR>().0;
    let places = [0, 1].map(|i| Mark::from_bytes(&sectors[i]).filter(|m| m.turns % 2 == i as u64));
    // The second mark is first written with the first turn.
    let unwritten = sectors[1].iter().all(|byte| *byte == 0);
    match places {
        [Some(a), Some(b)] => {
            let (older, newest) = if a.turns < b.turns { (a, b) } else { (b, a) };
            if newest.turns - older.turns != 1 || older.end >= newest.end {
                return Err(Flaw::Damaged("its two marks contradict each other".into()));
            }
            Ok(Marks { newest, both: true })
        }
        [Some(newest), None] if newest.turns == 0 && unwritten => Ok(Marks { newest, both: true }),
        [Some(newest), None] | [None, Some(newest)] => Ok(Marks {
            newest,
            both: false,
        }),
        [None, None] => Err(Flaw::Damaged("the checksums of its marks are wrong".into())),
    }
}
