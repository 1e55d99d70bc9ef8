//! Writes the pages of a sequence to an unlinked temporary file, and reads them back.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;

/// The values of a sequence that is swapped out. The file has no name: its space is free again when this is dropped.
#[derive(Debug)]
pub struct SwapFile {
    file: File,
    /// Pages of the sequence.
    pub pages: usize,
    /// Pages of its prediction layer.
    pub drafts: usize,
    /// Hidden states that the prediction layer has not seen, in values.
    pub hidden: usize,
}

impl SwapFile {
    /// Writes `pages`, then `drafts`, then `hidden`.
    ///
    /// # Errors
    /// Those of creating and writing a file in `dir`, a full disk among them.
    pub fn write<'a>(
        dir: &Path,
        pages: impl ExactSizeIterator<Item = &'a [f32]>,
        drafts: impl ExactSizeIterator<Item = &'a [f32]>,
        hidden: &'a [f32],
    ) -> io::Result<SwapFile> {
        let mut file = tempfile::tempfile_in(dir)?;
        let (page_count, draft_count) = (pages.len(), drafts.len());
        for values in pages.chain(drafts).chain([hidden]) {
            file.write_all(bytemuck::cast_slice(values))?;
        }
        Ok(SwapFile {
            file,
            pages: page_count,
            drafts: draft_count,
            hidden: hidden.len(),
        })
    }

    /// Goes to the beginning of value `at`.
    ///
    /// # Errors
    /// Those of the system.
    pub fn seek(&mut self, at: usize) -> io::Result<()> {
        let byte = (at * size_of::<f32>()) as u64;
        self.file.seek(io::SeekFrom::Start(byte)).map(drop)
    }

    /// Reads the next values.
    ///
    /// # Errors
    /// Those of the system.
    pub fn read(&mut self, values: &mut [f32]) -> io::Result<()> {
        self.file.read_exact(bytemuck::cast_slice_mut(values))
    }
}
