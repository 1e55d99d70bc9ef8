//! Copies a model's shards to another drive, as a mirror: the hottest first, as many as fit into a budget.
//!
//! A shard is written under a temporary name, compared with the original as both drives return it, and
//! then renamed. So a file with a shard's name is a complete copy; later runs compare its size, header and a sample of its
//! content. An interrupted run is continued by the next.
//! Only unfinished files of this program are ever deleted or overwritten.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytesize::ByteSize;
use colibri_ring::{DirectRefused, EngineError, File, FileError, drive_of};

use crate::shards::{ShardError, Shards, data_sample, is_copy};
use crate::tools::ordered_reads::StartError;
use crate::tools::verify::VerifyError;

mod copy;
mod hotness;
pub use copy::{Copying, Ended, copy_shard, copy_small};
pub use hotness::hotness;

/// Files beside the shards that are copied too, up to this many bytes each: configuration, tokenizer, list of shards.
const SMALL: u64 = 64 << 20;

/// Why copies could not be made.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// The directory is no place for copies of this model.
    #[error("{} cannot take copies of {}: {reason}", to.display(), model.display())]
    Place {
        /// Where to.
        to: PathBuf,
        /// Of what.
        model: PathBuf,
        /// Why not.
        reason: &'static str,
    },
    /// Something else has the name of a file to be copied.
    #[error(
        "{} is there already and differs from {}{}: nothing is overwritten, move it away",
        path.display(), of.display(), others(*more)
    )]
    Different {
        /// What is there.
        path: PathBuf,
        /// What would be copied.
        of: PathBuf,
        /// How many more there are like it.
        more: usize,
    },
    /// A model that is split over directories has a name twice, and a mirror is one directory.
    #[error("{} and {} have the same name: a mirror holds one of them", first.display(), second.display())]
    SameName {
        /// One of them.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
    },
    /// What is to be copied is more than the drive has room for.
    #[error(
        "{} has {} free, and {} are to be copied: free some, or give --budget",
        to.display(), size(*free), size(*needed)
    )]
    NoRoom {
        /// Where to.
        to: PathBuf,
        /// Bytes that are free.
        free: u64,
        /// Bytes that are missing there.
        needed: u64,
    },
    /// The drive became full meanwhile.
    #[error("{} is full: what is complete stays, and the next run goes on where this one ended", to.display())]
    Full {
        /// The file that was being written.
        to: PathBuf,
    },
    /// Another process writes the same file.
    #[error("{} is being written by another process", path.display())]
    Busy {
        /// The unfinished file.
        path: PathBuf,
    },
    /// What was written is not what comes back.
    #[error("{}: what was written at offset {offset} is not what the drive gives back", path.display())]
    Corrupt {
        /// The file that was written.
        path: PathBuf,
        /// First byte that differs.
        offset: u64,
    },
    /// A file operation failed.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A file could not be opened or read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The model cannot be read.
    #[error(transparent)]
    Shards(#[from] ShardError),
    /// O_DIRECT was required and refused.
    #[error(transparent)]
    Direct(#[from] DirectRefused),
    /// The engine does not run, or the original cannot be read.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The comparison does not run.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// The engine does not run, or there is no memory to read into.
    #[error(transparent)]
    Start(#[from] StartError),
}

fn others(more: usize) -> String {
    match more {
        0 => String::new(),
        n => format!(" (and {n} more like it)"),
    }
}

fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

/// An error of a file operation, with its path.
fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StageError {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StageError::Full { to: path },
        _ => StageError::Io { what, path, source },
    }
}

/// What remains to be done for a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyState {
    /// The copy is complete.
    Complete,
    /// The copy does not exist, or is unfinished.
    Missing {
        /// Bytes of the unfinished copy.
        begun: u64,
    },
    /// The budget is used up.
    LeftOut,
}

/// A shard and the state of its copy.
#[derive(Clone, Debug)]
pub struct Shard {
    /// The original.
    pub file: Arc<File>,
    /// Where its copy belongs.
    pub to: PathBuf,
    /// The state of the copy.
    pub state: CopyState,
}

impl Shard {
    /// Bytes that have to be written.
    pub fn to_write(&self) -> u64 {
        match self.state {
            CopyState::Missing { begun } => self.file.size() - begun,
            CopyState::Complete | CopyState::LeftOut => 0,
        }
    }
}

/// All shards and small files to copy, hottest shard first.
#[derive(Clone, Debug)]
pub struct Work {
    /// The directory of the copies.
    pub to: PathBuf,
    /// All shards.
    pub shards: Vec<Shard>,
    /// Small files that are not there: original and copy.
    pub small: Vec<(PathBuf, PathBuf)>,
    /// Whether the copies are on a drive that holds originals.
    pub same_drive: bool,
}

impl Work {
    /// Bytes of shards that have to be written.
    pub fn to_write(&self) -> u64 {
        self.shards.iter().map(Shard::to_write).sum()
    }

    /// Compares the directory with the model. With a budget, at most so many bytes of shards will be in the directory. Writes nothing.
    ///
    /// # Errors
    /// When the directory is not fit for copies, something else is in the way, or there is not enough room.
    pub fn plan(shards: &Shards, to: &Path, budget: Option<u64>) -> Result<Work, StageError> {
        check_place(shards, to)?;
        let mut named: HashMap<&std::ffi::OsStr, &Path> = HashMap::new();
        let mut different = Vec::new();
        let mut work = Work {
            to: to.to_owned(),
            shards: Vec::new(),
            small: Vec::new(),
            same_drive: false,
        };
        let drive = drive_of(&existing(to)).ok();
        let mut needed = 0;
        let mut left = budget.unwrap_or(u64::MAX);
        for i in hotness(shards) {
            let file = &shards.files()[i];
            let name = file.path().file_name().unwrap_or_default();
            if let Some(first) = named.insert(name, shards.files()[i].path()) {
                return Err(StageError::SameName {
                    first: first.to_owned(),
                    second: file.path().to_owned(),
                });
            }
            work.same_drive |= Some(file.drive()) == drive;
            let path = to.join(name);
            let found = copy_state(file, &path)?;
            let state = match found {
                None => {
                    different.push((path.clone(), file.path().to_owned()));
                    CopyState::Complete
                }
                // Complete copies stay, also beyond the budget.
                Some(CopyState::Complete) => CopyState::Complete,
                Some(_) if file.size() > left => CopyState::LeftOut,
                Some(state) => state,
            };
            if state != CopyState::LeftOut {
                left = left.saturating_sub(file.size());
            }
            if let CopyState::Missing { .. } = state {
                needed += file.size().saturating_sub(allocated(&unfinished(&path)));
            }
            work.shards.push(Shard {
                file: file.clone(),
                to: path,
                state,
            });
        }
        for path in small_files(shards)? {
            let copy = to.join(path.file_name().unwrap_or_default());
            if copy.symlink_metadata().is_err() {
                work.small.push((path, copy));
            } else if !same_bytes(&path, &copy) {
                different.push((copy, path));
            }
        }
        if let Some((path, of)) = different.first() {
            return Err(StageError::Different {
                path: path.clone(),
                of: of.clone(),
                more: different.len() - 1,
            });
        }
        let free = free_bytes(to)?;
        if needed > free {
            return Err(StageError::NoRoom {
                to: to.to_owned(),
                free,
                needed,
            });
        }
        Ok(work)
    }
}

/// Name of an unfinished copy, which no reader of the directory takes for a shard.
fn unfinished(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".colibri-part");
    path.with_file_name(name)
}

/// Bytes of the drive that a file has, also those that are only reserved for it.
fn allocated(path: &Path) -> u64 {
    path.symlink_metadata()
        .map_or(0, |meta| meta.blocks() * 512)
}

/// The state of a shard's copy; `None` when another file has its name.
fn copy_state(file: &File, path: &Path) -> Result<Option<CopyState>, StageError> {
    if path.symlink_metadata().is_ok() {
        let copy = File::open(path)
            .ok()
            .filter(|copy| copy.size() == file.size());
        let same = match copy {
            // Another model of the same shape has the same header.
            Some(copy) => is_copy(file, &copy)? && data_sample(file)? == data_sample(&copy)?,
            None => false,
        };
        return Ok(same.then_some(CopyState::Complete));
    }
    let part = unfinished(path).symlink_metadata();
    let begun = part
        .ok()
        .filter(|meta| meta.is_file())
        .map_or(0, |meta| meta.len());
    // One that is longer belonged to another model.
    let begun = if begun > file.size() { 0 } else { begun };
    Ok(Some(CopyState::Missing { begun }))
}

/// The directory must not be one of the model's, or inside one.
fn check_place(shards: &Shards, to: &Path) -> Result<(), StageError> {
    let here = existing(to);
    let canonical = here.canonicalize().map_err(failed("look at", &here))?;
    if to.exists() && !to.is_dir() {
        return Err(StageError::Place {
            to: to.to_owned(),
            model: shards.dirs()[0].clone(),
            reason: "it is no directory",
        });
    }
    for dir in shards.dirs() {
        let model = dir.canonicalize().map_err(failed("look at", dir))?;
        if canonical.starts_with(&model) {
            return Err(StageError::Place {
                to: to.to_owned(),
                model: dir.clone(),
                reason: "it is the model's own directory, or inside it",
            });
        }
    }
    Ok(())
}

/// The path, or the nearest directory above it that exists.
fn existing(path: &Path) -> PathBuf {
    let found = path.ancestors().find(|path| path.exists());
    match found {
        Some(path) if !path.as_os_str().is_empty() => path.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn free_bytes(to: &Path) -> Result<u64, StageError> {
    let here = existing(to);
    let fs = rustix::fs::statvfs(&here).map_err(|e| failed("look at", &here)(e.into()))?;
    Ok(fs.f_bavail.saturating_mul(fs.f_frsize))
}

/// The files beside the shards of each directory, the first of a name.
fn small_files(shards: &Shards) -> Result<Vec<PathBuf>, StageError> {
    let mut found: Vec<PathBuf> = Vec::new();
    for dir in shards.dirs() {
        let entries = fs::read_dir(dir).map_err(failed("list", dir))?;
        let mut here = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed("list", dir))?.path();
            let name = path.file_name().unwrap_or_default();
            let shard = name.as_bytes().ends_with(b".safetensors");
            let known = found.iter().any(|other| other.file_name() == Some(name));
            if shard || known || name.as_bytes().starts_with(b".") {
                continue;
            }
            if fs::metadata(&path).is_ok_and(|meta| meta.is_file() && meta.len() <= SMALL) {
                here.push(path);
            }
        }
        here.sort();
        found.extend(here);
    }
    Ok(found)
}

fn same_bytes(a: &Path, b: &Path) -> bool {
    let size = |path: &Path| {
        fs::metadata(path)
            .ok()
            .filter(|m| m.is_file())
            .map(|m| m.len())
    };
    match (size(a), size(b)) {
        (Some(x), Some(y)) if x == y => match (fs::read(a), fs::read(b)) {
            (Ok(x), Ok(y)) => x == y,
            _ => false,
        },
        _ => false,
    }
}
