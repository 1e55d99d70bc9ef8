//! Describes files, their copies on several drives, and how each copy is read.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::device::EngineKind;
use crate::extent::{Layout, Range, RangeError};
use crate::file::File;
use crate::region::SLAB_ALIGN;

/// Whether reads bypass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DirectMode {
    /// O_DIRECT where the file system supports it.
    #[default]
    Auto,
    /// O_DIRECT, or an error.
    On,
    /// Through the page cache, from which the bytes are dropped after the read.
    Off,
}

/// One copy of a file.
#[derive(Clone, Debug)]
pub struct Replica {
    /// The opened file.
    pub file: Arc<File>,
    /// Index under which its reads are counted in [`Stats::sources`](crate::Stats::sources): usually its directory.
    pub source: usize,
    /// The drive that holds it: copies with the same number share its bandwidth.
    pub drive: u64,
    /// Whether its reads bypass the page cache; `None`: as [`Files::new`] says.
    pub direct: Option<DirectMode>,
    /// The device that reads it; `None`: the one of [`Options::kind`](crate::Options::kind).
    pub device: Option<EngineKind>,
}

impl Replica {
    /// A copy on the drive that the file system names.
    pub fn new(file: Arc<File>, source: usize) -> Replica {
        Replica {
            drive: file.drive(),
            file,
            source,
            direct: None,
            device: None,
        }
    }
}

/// The scheduler marks failed copies in 32 bits.
const MAX_COPIES: usize = 32;

/// A file and its copies, primary first. All have the same bytes.
pub type Replicas = Vec<Replica>;

/// How a copy is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Through the page cache.
    Buffered,
    /// With O_DIRECT; through the page cache where the file system refuses the read.
    Direct,
    /// With O_DIRECT; a refused read is an error.
    DirectOnly,
}

impl Access {
    pub(crate) fn is_direct(self) -> bool {
        self != Access::Buffered
    }
}

/// The files that an engine reads, and how it reads each copy of them.
#[derive(Clone, Debug)]
pub struct Files {
    pub(crate) replicas: Arc<[Replicas]>,
    /// For each file, how each copy is read.
    pub(crate) access: Vec<Vec<Access>>,
    /// By source, the ratio of the bytes that are read; `None`: by the speed of the drives.
    pub(crate) weights: Option<Vec<u32>>,
    align: u64,
}

/// [`DirectMode::On`] was requested, and the file system refuses O_DIRECT.
#[derive(Debug, thiserror::Error)]
#[error("{} cannot be read with O_DIRECT: {reason}", path.display())]
pub struct DirectRefused {
    /// The file.
    pub path: PathBuf,
    /// What the file system says.
    pub reason: String,
}

/// Opens the O_DIRECT descriptors of all copies at the same time: each open probes its file with a read.
fn open_direct(replicas: &[Replicas], mode: DirectMode) {
    const THREADS: usize = 8;
    let copies: Vec<&Replica> = (replicas.iter().flatten())
        .filter(|copy| copy.direct.unwrap_or(mode) != DirectMode::Off)
        .collect();
    let next = AtomicUsize::new(0);
    let open = || {
        while let Some(copy) = copies.get(next.fetch_add(1, Ordering::Relaxed)) {
            let _ = copy.file.direct_fd();
        }
    };
    thread::scope(|scope| {
        for _ in 1..THREADS.min(copies.len()) {
            // Without the thread, the others have more to open.
            let _ = thread::Builder::new().spawn_scoped(scope, open);
        }
        open();
    });
}

impl Files {
    /// Decides for each copy whether it is read with O_DIRECT. Logs one warning a source where O_DIRECT is refused.
    ///
    /// # Errors
    /// [`DirectRefused`] for a copy with [`DirectMode::On`].
    ///
    /// # Panics
    /// When a file has more than 32 copies.
    pub fn new(replicas: Vec<Replicas>, mode: DirectMode) -> Result<Files, DirectRefused> {
        assert!(
            replicas.iter().all(|copies| copies.len() <= MAX_COPIES),
            "a file has more than {MAX_COPIES} copies"
        );
        open_direct(&replicas, mode);
        let mut warned = BTreeSet::new();
        let mut align = SLAB_ALIGN as u64;
        let mut access_of = |replica: &Replica| {
            let mode = replica.direct.unwrap_or(mode);
            if mode == DirectMode::Off {
                return Ok(Access::Buffered);
            }
            let path = replica.file.path();
            let reason = match replica.file.direct_fd() {
                Ok((_, need)) if need.memory as usize <= SLAB_ALIGN => {
                    align = align.max(u64::from(need.offset).next_power_of_two());
                    return Ok(match mode {
                        DirectMode::On => Access::DirectOnly,
                        _ => Access::Direct,
                    });
                }
                Ok((_, need)) => format!("it needs memory aligned to {} bytes", need.memory),
                Err(reason) => reason.to_owned(),
            };
            if mode == DirectMode::On {
                return Err(DirectRefused {
                    path: path.to_owned(),
                    reason,
                });
            }
            if warned.insert(replica.source) {
                tracing::warn!(
                    "{} is read through the page cache: {reason}",
                    path.display()
                );
            }
            Ok(Access::Buffered)
        };
        let access = replicas
            .iter()
            .map(|copies| copies.iter().map(&mut access_of).collect())
            .collect::<Result<_, _>>()?;
        Ok(Files {
            replicas: replicas.into(),
            access,
            weights: None,
            align,
        })
    }

    /// Lays ranges out in a slab, for [`Engine::read`](crate::Engine::read).
    ///
    /// # Errors
    /// [`RangeError`] for a range that ends after its file, or that names no file or no part.
    pub fn layout(&self, ranges: &[Range]) -> Result<Layout, RangeError> {
        layout(&self.replicas, ranges, self.align)
    }

    /// Sets the ratio of the bytes that are read from each [`Replica::source`]. A source that has no weight, or 0, is read only
    /// where no other copy is left. Without weights, each drive gets reads in proportion to its speed.
    pub fn set_weights(&mut self, weights: Vec<u32>) {
        self.weights = Some(weights);
    }

    /// The alignment in bytes that suits every read of every file.
    pub fn align(&self) -> u64 {
        self.align
    }

    /// The most drives that hold copies of one file.
    pub fn drives(&self) -> usize {
        let distinct = |copies: &Replicas| {
            let ids = copies.iter().map(|r| r.drive);
            ids.collect::<BTreeSet<u64>>().len()
        };
        self.replicas.iter().map(distinct).max().unwrap_or(0)
    }

    /// Whether every copy is read with O_DIRECT.
    pub fn all_direct(&self) -> bool {
        self.access.iter().flatten().all(|a| a.is_direct())
    }
}

/// Lays ranges of `files` out with spans at multiples of `align`.
pub(crate) fn layout(
    files: &[Replicas],
    ranges: &[Range],
    align: u64,
) -> Result<Layout, RangeError> {
    let file = |index: u32| -> Option<(&Path, u64)> {
        // The primary: a copy that is shorter serves only what it has.
        let primary = &files.get(index as usize)?.first()?.file;
        Some((primary.path(), primary.size()))
    };
    Layout::new(ranges, align, file)
}
