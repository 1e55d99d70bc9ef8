//! Converts a checkpoint to a container, shard by shard: every matrix gets the requested format.
//!
//! `plan` decides what each output shard holds and where its bytes come from, from the index alone; `shapes` knows which
//! matrices there are. The plan is kept beside the output (`manifest`), because with `delete_source` it could not be made
//! again. `write` carries out one shard. What is finished is what has its final name, so a
//! conversion that was killed anywhere goes on where it was; `checksums` are what shards of earlier runs are checked by before
//! their source is removed.

mod checksums;
mod error;
mod files;
mod header;
mod manifest;
mod plan;
mod space;
mod write;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use crate::pool::Pool;
use crate::quant::encode::Packing;
use crate::weight::Counts;

use checksums::Checksums;
pub use error::ConvertError;
use files::{OutDir, Sources};
use manifest::Manifest;
use space::Space;

/// The format of each kind of matrix; `None` keeps what is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    /// Routed experts.
    pub experts: Option<Packing>,
    /// Resident matrices but the ones below. Routers and vectors always become F32.
    pub dense: Option<Packing>,
    /// The embedding and the head.
    pub embed: Option<Packing>,
    /// Matrices of the layers for multi-token prediction, their experts included.
    pub mtp: Option<Packing>,
}

/// What to convert, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Directories of the checkpoint; config.json is in the first.
    pub sources: Vec<PathBuf>,
    /// Directory of the container.
    pub out: PathBuf,
    /// The formats.
    pub recipe: Recipe,
    /// Most bytes of a shard, as far as one tensor or expert is not larger.
    pub shard_size: u64,
    /// Whether to remove a source file when everything made from it is safely on disk.
    pub delete_source: bool,
}

/// What a conversion will do, or has done.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Output shards.
    pub shards: usize,
    /// Those that were finished before.
    pub finished_before: usize,
    /// Bytes of the tensors of the checkpoint.
    pub bytes_in: u64,
    /// Bytes of all output shards, headers included.
    pub bytes_out: u64,
    /// Bytes of the source that are still to be read.
    pub bytes_to_read: u64,
    /// Most bytes that the rest takes on the disk at any time, beyond what is used now.
    pub space_needed: u64,
    /// Bytes that are free there.
    pub space_free: u64,
    /// Tensors by the format they get.
    pub formats: Counts,
    /// Matrices that were already packed, and are rounded a second time.
    pub requantised: u64,
    /// Tensors that are no part of the model as far as it is known; copied as they are.
    pub unknown: u64,
    /// Source files that were removed.
    pub removed: usize,
}

/// A conversion that is planned and may begin.
#[derive(Debug)]
pub struct Conversion {
    options: Options,
    manifest: Manifest,
    sources: Sources,
    out: OutDir,
    summary: Summary,
}

impl Conversion {
    /// Reads the index of the checkpoint, or the plan of a conversion that was begun before, and works out what is to be done.
    /// Writes nothing.
    ///
    /// # Errors
    /// A checkpoint that is incomplete or does not fit its config, formats that could not be read back, an output directory
    /// that holds something else or was begun with other options.
    pub fn plan(options: Options) -> Result<Conversion, ConvertError> {
        let out = OutDir::inspect(&options)?;
        let manifest = match Manifest::read(&options.out)? {
            Some(manifest) => manifest.check(&options)?,
            None => {
                if let Err(e) = out.must_be_new() {
                    // Another process may just have begun.
                    return Err(match Manifest::read(&options.out)? {
                        Some(_) => ConvertError::Busy { out: options.out },
                        None => e,
                    });
                }
                Manifest::make(&options)?
            }
        };
        let finished = manifest.finished(&options.out)?;
        let sources = Sources::open(&options, &manifest, &finished)?;
        let mut summary = manifest.summary(&finished)?;
        let space = Space::query(&options.out)?;
        summary.space_free = space.free;
        summary.space_needed = space.needed(&options, &manifest, &finished, &sources)?;
        Ok(Conversion {
            options,
            manifest,
            sources,
            out,
            summary,
        })
    }

    /// What it will do.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Whether the disk has room for the rest.
    ///
    /// # Errors
    /// [`ConvertError::Space`] with the numbers, if not.
    pub fn check_space(&self) -> Result<(), ConvertError> {
        let (needed, free) = (self.summary.space_needed, self.summary.space_free);
        if needed <= free {
            return Ok(());
        }
        Err(ConvertError::Space {
            out: self.options.out.clone(),
            needed,
            free,
            total: self.summary.bytes_out,
            deletes: self.options.delete_source,
        })
    }

    /// Writes what is missing. `progress` is told the bytes of the source that were read, from several threads.
    ///
    /// # Errors
    /// The first thing that goes wrong. Finished shards stay, and so does every source file that is still needed: the same
    /// call goes on from there. [`ConvertError::Stopped`] when `stop` became true.
    pub fn run(
        mut self,
        pool: &Pool,
        stop: &AtomicBool,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Summary, ConvertError> {
        self.check_space()?;
        self.out.begin(&self.options, &self.manifest)?;
        let mut sums = Checksums::read(&self.options.out);
        let mut finished = self.manifest.finished(&self.options.out)?;
        if self.options.delete_source && self.find_damaged(&sums, &mut finished, stop)? {
            self.sources = Sources::open(&self.options, &self.manifest, &finished)?;
        }
        for (i, finished) in finished.iter().enumerate() {
            if !finished {
                write::shard(
                    &self.options.out,
                    &self.manifest.shards[i],
                    &self.sources,
                    &mut sums,
                    pool,
                    stop,
                    progress,
                )?;
            }
            if self.options.delete_source {
                self.summary.removed += self.remove_sources(i)?;
            }
        }
        Ok(self.summary)
    }

    /// Reads back every finished shard of which a source would be removed, and takes those that are damaged as not finished.
    /// Returns whether there are any.
    fn find_damaged(
        &self,
        sums: &Checksums,
        finished: &mut [bool],
        stop: &AtomicBool,
    ) -> Result<bool, ConvertError> {
        let out = &self.options.out;
        let mut found = false;
        for (shard, finished) in self.manifest.shards.iter().zip(finished) {
            let files = || shard.items.iter().flat_map(|item| item.spans());
            let there = |file: usize| self.sources.path(file).symlink_metadata().is_ok();
            if !*finished
                || !files().any(|span| there(span.file))
                || sums.holds(out, shard, stop)?
            {
                continue;
            }
            let path = shard_path(out, &shard.name);
            if let Some(gone) = files().find(|span| !there(span.file)) {
                return Err(ConvertError::Damaged {
                    path,
                    source_file: self.sources.path(gone.file).to_path_buf(),
                });
            }
            tracing::warn!("{} is damaged and is made again", path.display());
            (*finished, found) = (false, true);
        }
        Ok(found)
    }

    /// Removes the source files that no shard after `shard` needs, and returns how many there were.
    fn remove_sources(&mut self, shard: usize) -> Result<usize, ConvertError> {
        let mut removed = 0;
        for (file, last) in self.manifest.last_use().iter().enumerate() {
            if *last == Some(shard) && self.sources.remove(file, &self.manifest)? {
                removed += 1;
            }
        }
        Ok(removed)
    }
}

/// Where a shard of the container is.
fn shard_path(out: &Path, name: &str) -> PathBuf {
    out.join(name)
}
