//! Whether the disk can hold the output.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::files::Sources;
use super::manifest::Manifest;
use super::{ConvertError, Options};
use crate::shards::free_space;

/// The file system of the output.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    /// Bytes that may still be written.
    pub free: u64,
    /// Its number.
    device: u64,
}

impl Space {
    /// Asks the file system of `out`, or of the nearest directory above it that exists.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn query(out: &Path) -> Result<Space, ConvertError> {
        let absolute = std::path::absolute(out).unwrap_or_else(|_| out.to_path_buf());
        let existing = absolute.ancestors().find(|dir| dir.exists());
        let dir = existing.unwrap_or(Path::new("/"));
        let asked = free_space(dir).and_then(|free| Ok((free, fs::metadata(dir)?.dev())));
        let (free, device) = asked.map_err(|source| ConvertError::Io {
            what: "look at",
            path: dir.to_path_buf(),
            source,
        })?;
        Ok(Space { free, device })
    }

    /// Most bytes that unfinished shards take at any time, less what has been freed by then: a source file is only removed once
    /// everything made from it is written.
    ///
    /// # Errors
    /// Sizes that no file can have.
    pub fn needed(
        &self,
        options: &Options,
        manifest: &Manifest,
        finished: &[bool],
        sources: &Sources,
    ) -> Result<u64, ConvertError> {
        let last_use = manifest.last_use();
        let here = |file: usize| {
            let found = fs::symlink_metadata(sources.path(file));
            found.is_ok_and(|m| m.dev() == self.device)
        };
        let (mut taken, mut freed, mut most) = (0u64, 0u64, 0u64);
        let sizes = manifest.sizes(&options.out)?;
        for (i, (size, finished)) in sizes.into_iter().zip(finished).enumerate() {
            if !finished {
                taken = taken.saturating_add(size);
                most = most.max(taken.saturating_sub(freed));
            }
            if options.delete_source {
                for (file, last) in last_use.iter().enumerate() {
                    if *last == Some(i) && here(file) {
                        freed = freed.saturating_add(manifest.sources[file].identity.size);
                    }
                }
            }
        }
        Ok(most)
    }
}
