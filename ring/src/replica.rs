//! Copies of files, and the drives that hold them: window, measured speed, health.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hdrhistogram::Histogram;

use crate::arena::SLAB_ALIGN;
use crate::file::File;

/// Whether reads bypass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DirectMode {
    /// O_DIRECT where the file system supports it.
    #[default]
    Auto,
    /// O_DIRECT, or an error.
    On,
    /// Through the page cache, which is told to forget what was read.
    Off,
}

/// One copy of a file.
#[derive(Clone, Debug)]
pub struct Replica {
    /// The opened file.
    pub file: Arc<File>,
    /// The directory that it came from, as an index that the caller chose: statistics are kept for each.
    pub source: usize,
    /// The drive that holds it: copies with the same number share its bandwidth.
    pub drive: u64,
}

impl Replica {
    /// A copy on the drive that the file system names.
    pub fn new(file: Arc<File>, source: usize) -> Replica {
        Replica {
            drive: file.drive(),
            file,
            source,
        }
    }
}

/// A file and its copies, primary first. All have the same bytes.
pub type Replicas = Vec<Replica>;

/// Which files there are, and how each copy of them is read.
#[derive(Clone, Debug)]
pub struct Files {
    pub(crate) replicas: Arc<[Replicas]>,
    /// For each copy, whether its O_DIRECT descriptor is used.
    pub(crate) direct: Vec<Vec<bool>>,
    /// By source, in what ratio bytes are read; `None`: from whichever drive has them first.
    pub(crate) weights: Option<Vec<u32>>,
    mode: DirectMode,
    align: u64,
}

/// O_DIRECT was insisted on, and a file system refuses it.
#[derive(Debug, thiserror::Error)]
#[error("{} cannot be read with O_DIRECT: {reason}", path.display())]
pub struct DirectRefused {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub reason: String,
}

impl Files {
    /// Decides for each copy whether it is read with O_DIRECT. Where that is refused, one warning a source says why.
    ///
    /// # Errors
    /// [`DirectRefused`] with [`DirectMode::On`].
    pub fn new(replicas: Vec<Replicas>, mode: DirectMode) -> Result<Files, DirectRefused> {
        let mut warned = Vec::new();
        let mut align = SLAB_ALIGN as u64;
        let mut direct_of = |replica: &Replica| -> Result<bool, DirectRefused> {
            if mode == DirectMode::Off {
                return Ok(false);
            }
            let path = replica.file.path();
            let reason = match replica.file.direct() {
                Ok((_, need)) if need.memory as usize <= SLAB_ALIGN => {
                    align = align.max(u64::from(need.offset).next_power_of_two());
                    return Ok(true);
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
            if !warned.contains(&replica.source) {
                warned.push(replica.source);
                tracing::warn!(
                    "{} is read through the page cache: {reason}",
                    path.display()
                );
            }
            Ok(false)
        };
        let direct = replicas
            .iter()
            .map(|copies| {
                copies
                    .iter()
                    .map(&mut direct_of)
                    .collect::<Result<Vec<_>, _>>()
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Files {
            replicas: replicas.into(),
            direct,
            weights: None,
            mode,
            align,
        })
    }

    /// Pins the ratio of the bytes that are read from each [`Replica::source`]; a source that is not in the list, or has 0,
    /// is read only where no other copy is left. Without it, each drive is used in proportion to its speed.
    pub fn pin(&mut self, weights: Vec<u32>) {
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
            ids.collect::<std::collections::BTreeSet<u64>>().len()
        };
        self.replicas.iter().map(distinct).max().unwrap_or(0)
    }

    /// Whether a read that cannot be direct is an error.
    pub(crate) fn direct_only(&self) -> bool {
        self.mode == DirectMode::On
    }

    /// Whether every copy is read with O_DIRECT.
    pub fn all_direct(&self) -> bool {
        self.direct.iter().flatten().all(|d| *d)
    }
}

/// Reads and bytes of one source directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceStats {
    /// Bytes read, alignment included.
    pub bytes: u64,
    /// Finished reads.
    pub reads: u64,
    /// Failed reads.
    pub errors: u64,
}

/// What the reads did so far.
#[derive(Clone, Debug)]
pub struct Stats {
    /// By [`Replica::source`].
    pub sources: Vec<SourceStats>,
    /// Time from submission to completion of each read, in microseconds.
    pub latency_us: Histogram<u64>,
    /// How many times the kernel was entered to submit or to wait.
    pub enters: u64,
    /// Whether every copy is read with O_DIRECT (still: a file system may refuse the reads themselves).
    pub direct: bool,
    /// Bytes of each drive's window, as it is now.
    pub windows: Vec<u64>,
}

impl Stats {
    pub(crate) fn new(sources: usize) -> Stats {
        Stats {
            sources: vec![SourceStats::default(); sources],
            latency_us: Histogram::new_with_bounds(1, 60_000_000, 3).expect("valid bounds"),
            enters: 0,
            direct: false,
            windows: Vec::new(),
        }
    }

    /// Bytes of all sources.
    pub fn bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.bytes).sum()
    }

    pub(crate) fn record_latency(&mut self, latency: Duration) {
        self.latency_us
            .saturating_record(latency.as_micros() as u64);
    }
}

/// How a copy is read, decided once.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) replica: Replica,
    /// Index of its drive.
    pub(crate) drive: usize,
    pub(crate) direct: bool,
    /// Set after a failure: other copies are preferred from then on.
    pub(crate) failed: bool,
}
