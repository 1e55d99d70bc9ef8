//! Measures a drive with random reads of large blocks: which engine, which block size, how many at once.
//!
//! The speed of the page cache is never taken for the drive's. Reads bypass it where the file system allows O_DIRECT.
//! Elsewhere the files are dropped from it first, a sample is checked, and each read is dropped at once.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use colibri_ring::{DirectRefused, EngineError};
use hdrhistogram::Histogram;

use crate::memory::MemoryError;
use crate::tools::measure;

mod draw;
mod rates;
mod target;
pub use rates::ExpertTraffic;
pub use target::Target;

/// Why a drive could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// O_DIRECT was required and refused.
    #[error(transparent)]
    Direct(#[from] DirectRefused),
    /// The engine does not run, or a read failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// tokio-uring does not run, or a read failed.
    #[error("tokio-uring cannot read: {0}")]
    Tokio(io::Error),
    /// The files stay in the page cache.
    #[error(
        "{} stays in the page cache (of {checked} sampled pages, {cached} are, or may be, there after it was told to drop \
         them), whose speed is not the drive's: take a file that --direct on can read", path.display()
    )]
    Cached {
        /// A file.
        path: PathBuf,
        /// Pages looked at.
        checked: usize,
        /// Pages found.
        cached: usize,
    },
    /// There is no memory to read into.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// No file is long enough.
    #[error("no file holds a block of {block} bytes")]
    TooShort {
        /// Length of a block in bytes.
        block: u64,
    },
}

impl ProfileError {
    /// Whether other depths and block sizes would fail in the same way.
    pub fn is_lasting(&self) -> bool {
        match self {
            ProfileError::Engine(e) => matches!(e, EngineError::Device { .. }),
            ProfileError::Direct(_) | ProfileError::Tokio(_) | ProfileError::Cached { .. } => true,
            ProfileError::Memory(_) | ProfileError::TooShort { .. } => false,
        }
    }
}

/// The engine that reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// The engine on io_uring, with registered files and slabs on huge pages.
    Uring,
    /// The engine on threads that call pread.
    Pread,
    /// tokio-uring.
    TokioUring,
}

impl Reader {
    /// As in reports.
    pub fn name(self) -> &'static str {
        match self {
            Reader::Uring => "uring",
            Reader::Pread => "pread",
            Reader::TokioUring => "tokio-uring",
        }
    }
}

/// Blocks to draw from.
#[derive(Clone, Debug)]
pub enum Blocks {
    /// This many bytes anywhere in the files.
    Anywhere(u64),
    /// These: index of the file, offset, length. Aligned.
    Extents(Vec<(u32, u64, u64)>),
}

impl Blocks {
    /// Length of the longest in bytes.
    pub fn longest(&self) -> u64 {
        match self {
            Blocks::Anywhere(len) => *len,
            Blocks::Extents(extents) => extents.iter().map(|(.., len)| *len).max().unwrap_or(0),
        }
    }
}

/// One measurement.
#[derive(Clone, Debug)]
pub struct ProfileRun {
    /// The engine that reads.
    pub reader: Reader,
    /// Around the page cache.
    pub direct: bool,
    /// What it reads.
    pub blocks: Blocks,
    /// Reads at once.
    pub queue_depth: usize,
    /// How long.
    pub time: Duration,
}

impl ProfileRun {
    /// How long it reads before it counts.
    pub fn warm_up(&self) -> Duration {
        (self.time / 4).min(Duration::from_millis(500))
    }
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct ProfileOutcome {
    /// Bytes read.
    pub bytes: u64,
    /// In this time.
    pub elapsed: Duration,
    /// Processor time of the process in it.
    pub cpu: Duration,
    /// Time of each read, in microseconds.
    pub latency_us: Histogram<u64>,
}

/// A run and its result.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// The request.
    pub run: ProfileRun,
    /// The result.
    pub outcome: ProfileOutcome,
    /// When it began.
    pub start: SystemTime,
}

impl Measurement {
    /// MiB a second.
    pub fn mib_per_s(&self) -> f64 {
        measure::mib_per_s(self.outcome.bytes, self.outcome.elapsed)
    }

    /// Reads a second.
    pub fn iops(&self) -> f64 {
        let seconds = self.outcome.elapsed.as_secs_f64();
        self.outcome.latency_us.len() as f64 / seconds.max(f64::MIN_POSITIVE)
    }

    /// Processor seconds for each GiB read; 0 if nothing was.
    pub fn cpu_seconds_per_gib(&self) -> f64 {
        match self.outcome.bytes {
            0 => 0.0,
            bytes => self.outcome.cpu.as_secs_f64() * f64::from(1 << 30) / bytes as f64,
        }
    }
}
