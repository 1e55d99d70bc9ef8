//! Samples a shard's content, to tell apart models of one architecture: their names, sizes and headers are equal, their weights are not.

use colibri_ring::headers::PREFIX;
use colibri_ring::{File, FileError};

/// Bytes read at each place.
const BLOCK: u64 = 64 << 10;

/// Number of places, evenly spread from the first byte of data to the last.
const PLACES: u64 = 32;

/// CRC-32 of blocks of the data of a shard: the first and the last 64 KiB and 30 between them; of all data if there is no more.
///
/// # Errors
/// A failing read.
pub fn data_sample(shard: &File) -> Result<u32, FileError> {
    let mut prefix = [0; PREFIX as usize];
    let size = shard.size();
    if size < PREFIX {
        return Ok(0);
    }
    shard.read_at(&mut prefix, 0)?;
    let start = u64::from_le_bytes(prefix).saturating_add(PREFIX).min(size);
    let mut crc = crc32fast::Hasher::new();
    let mut block = vec![0; BLOCK as usize];
    let mut add = |from: u64, to: u64| {
        let block = &mut block[..(to - from) as usize];
        shard.read_at(block, from)?;
        crc.update(block);
        Ok::<_, FileError>(())
    };
    if size - start <= PLACES * BLOCK {
        let mut from = start;
        while from < size {
            let to = size.min(from + BLOCK);
            add(from, to)?;
            from = to;
        }
    } else {
        // Divided first: sizes near the largest must not overflow. The last block ends where the file does.
        let (room, gaps) = (size - BLOCK - start, PLACES - 1);
        for place in 0..PLACES {
            let from = start + room / gaps * place + room % gaps * place / gaps;
            add(from, from + BLOCK)?;
        }
    }
    Ok(crc.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginning_end_and_small_files_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        let sample = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            data_sample(&File::open(&path).unwrap()).unwrap()
        };
        for len in [1usize, 70_000, 2 << 20, (2 << 20) + 1, 9_000_001] {
            let mut bytes = 2u64.to_le_bytes().to_vec();
            bytes.extend(b"{}");
            bytes.extend((0..len).map(|i| (i * 7) as u8));
            let before = sample(&bytes);
            assert_eq!(sample(&bytes), before);
            for at in [10, bytes.len() - 1] {
                bytes[at] ^= 1;
                assert_ne!(sample(&bytes), before, "{len} {at}");
                bytes[at] ^= 1;
            }
        }
        // Files that are not shards do not panic.
        sample(b"12345");
        sample(&[0xff; 30]);
    }
}
