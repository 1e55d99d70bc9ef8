//! Draws the next block to read: anywhere in the files, or from a list.

use std::sync::Arc;

use colibri_ring::File;

use super::{Blocks, ProfileError};
use crate::tools::measure::Rng;

/// Blocks begin at multiples of this.
pub(super) const GRID: u64 = 4096;

/// Draws blocks.
#[derive(Debug)]
pub(super) struct Draw {
    rng: Rng,
    blocks: Blocks,
    /// For each file that holds a block: its index, and how many starts lie in it and the files before it.
    starts: Vec<(u32, u64)>,
}

impl Draw {
    pub(super) fn new(files: &[Arc<File>], blocks: &Blocks) -> Result<Draw, ProfileError> {
        let block = blocks.longest();
        let mut starts = Vec::new();
        let mut sum = 0;
        if let Blocks::Anywhere(_) = blocks {
            for (i, file) in files.iter().enumerate() {
                if let Some(spare) = file.size().checked_sub(block) {
                    sum += spare / GRID + 1;
                    starts.push((i as u32, sum));
                }
            }
        }
        let some = match blocks {
            Blocks::Anywhere(len) => *len > 0 && sum > 0,
            Blocks::Extents(extents) => !extents.is_empty(),
        };
        if !some {
            return Err(ProfileError::TooShort { block });
        }
        Ok(Draw {
            rng: Rng(u64::from(std::process::id())),
            blocks: blocks.clone(),
            starts,
        })
    }

    pub(super) fn next(&mut self) -> (u32, u64, u64) {
        match &self.blocks {
            Blocks::Extents(extents) => extents[self.rng.below(extents.len() as u64) as usize],
            Blocks::Anywhere(len) => {
                let total = self.starts.last().map_or(1, |(_, sum)| *sum);
                let drawn = self.rng.below(total);
                let at = self.starts.partition_point(|(_, sum)| *sum <= drawn);
                let before = if at == 0 { 0 } else { self.starts[at - 1].1 };
                (self.starts[at].0, (drawn - before) * GRID, *len)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(sizes: &[u64]) -> (tempfile::TempDir, Vec<Arc<File>>) {
        let dir = tempfile::tempdir().unwrap();
        let files = sizes.iter().enumerate().map(|(i, size)| {
            let path = dir.path().join(i.to_string());
            std::fs::File::create(&path)
                .unwrap()
                .set_len(*size)
                .unwrap();
            Arc::new(File::open(path).unwrap())
        });
        let files = files.collect();
        (dir, files)
    }

    #[test]
    fn blocks_lie_inside_files_and_reach_all_of_them() {
        let (_dir, files) = files(&[8192, 100, 3 * 4096, 0]);
        let mut draw = Draw::new(&files, &Blocks::Anywhere(8192)).unwrap();
        let drawn: std::collections::BTreeSet<_> = (0..200).map(|_| draw.next()).collect();
        let wanted = [(0, 0, 8192), (2, 0, 8192), (2, 4096, 8192)];
        assert!(drawn.iter().eq(&wanted), "{drawn:?}");
    }

    #[test]
    fn no_file_holds_the_block() {
        let (_dir, files) = files(&[8192, 100]);
        for blocks in [
            Blocks::Anywhere(8193),
            Blocks::Anywhere(0),
            Blocks::Extents(Vec::new()),
        ] {
            assert!(matches!(
                Draw::new(&files, &blocks),
                Err(ProfileError::TooShort { .. })
            ));
        }
    }
}
