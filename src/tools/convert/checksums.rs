//! Saves the checksums of finished shards. Before the source of a shard is removed, the shard must be whole on the drive:
//! a run that has not written it reads it back and compares.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use colibri_ring::{Advice, File};
use crc32fast::Hasher;

use super::header::header_of;
use super::plan::Shard;
use super::{ConvertError, shard_path};
use crate::shards::write_whole;

/// Name of the file, beside the notes.
const NAME: &str = ".convert.sums.json";

/// Bytes that are read back at a time.
const BLOCK: u64 = 4 << 20;

/// CRC-32 of the data of each shard, by name.
#[derive(Debug, Default)]
pub struct Checksums(BTreeMap<String, u32>);

impl Checksums {
    /// What is noted in `out`. What cannot be read is not noted: then shards count as damaged.
    pub fn read(out: &Path) -> Checksums {
        let path = out.join(NAME);
        let regular = fs::metadata(&path).is_ok_and(|meta| meta.is_file());
        let text = regular.then(|| fs::read(&path).ok()).flatten();
        Checksums(
            text.and_then(|text| serde_json::from_slice(&text).ok())
                .unwrap_or_default(),
        )
    }

    /// Notes a shard. To be called before it gets its name: no finished shard is without a sum.
    ///
    /// # Errors
    /// A failing file system.
    pub fn note(&mut self, out: &Path, shard: &Shard, sum: u32) -> Result<(), ConvertError> {
        self.0.insert(shard.name.clone(), sum);
        let path = out.join(NAME);
        let text = serde_json::to_vec(&self.0).map_err(|e| ConvertError::Manifest {
            path: path.clone(),
            reason: e.to_string(),
        })?;
        Ok(write_whole(&path, &text)?)
    }

    /// Whether the data of a finished shard is what was written.
    ///
    /// # Errors
    /// A failing read, or a wish to stop.
    pub fn holds(
        &self,
        out: &Path,
        shard: &Shard,
        stop: &AtomicBool,
    ) -> Result<bool, ConvertError> {
        let Some(noted) = self.0.get(&shard.name) else {
            return Ok(false);
        };
        let file = File::open(shard_path(out, &shard.name))?;
        let mut at = header_of(out, shard)?.0.len() as u64;
        let (mut crc, mut block) = (Hasher::new(), vec![0; BLOCK as usize]);
        while at < file.size() {
            if stop.load(Ordering::Relaxed) {
                return Err(ConvertError::Stopped);
            }
            let block = &mut block[..BLOCK.min(file.size() - at) as usize];
            file.read_at(block, at)?;
            crc.update(block);
            file.advise(at, block.len() as u64, Advice::DontNeed);
            at += block.len() as u64;
        }
        Ok(crc.finalize() == *noted)
    }
}
