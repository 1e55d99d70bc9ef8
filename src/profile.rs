//! Random reads of large blocks, to find out what a drive gives: which engine, which block size, how many at once.
//!
//! The speed of the page cache is never taken for the drive's. Reads go around it where the file system allows that;
//! elsewhere the files are dropped from it first, a sample is checked, and what is read is dropped at once.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use colibri_ring::drive::Window;
use colibri_ring::engine::{EngineError, EngineKind, Options};
use colibri_ring::extent::{Layout, Range};
use colibri_ring::file::{Advice, File};
use colibri_ring::replica::{DirectMode, DirectRefused, Files, Replica};
use colibri_ring::tokio_read;
use hdrhistogram::Histogram;

use crate::measure::{self, Dice, Load, cpu_time};
use crate::plan::{self, PlanError};

mod rates;
pub use rates::Demand;

/// Why a drive could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// O_DIRECT was insisted on.
    #[error(transparent)]
    Direct(#[from] DirectRefused),
    /// The engine does not run, or a read failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// tokio-uring does not run, or a read failed.
    #[error("tokio-uring cannot read: {0}")]
    Tokio(io::Error),
    /// The files cannot be got out of the page cache.
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
    Memory(#[from] PlanError),
    /// No file is long enough.
    #[error("no file holds a block of {block} bytes")]
    TooShort {
        /// Length of a block in bytes.
        block: u64,
    },
}

/// What reads.
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

impl Blocks {
    /// How many blocks of memory are read into, in turn. Experts go into as much memory as decoding uses, because a processor
    /// whose cache holds everything that is read flatters the drive (by half, where the drive is fast); blocks of a given
    /// size into little more than is read at once, as other tools do it.
    fn places(&self, queue_depth: usize) -> usize {
        /// Bytes; more than the caches of most processors.
        const MEMORY: u64 = 512 << 20;
        let least = queue_depth + queue_depth.div_ceil(4).max(2);
        match self {
            Blocks::Anywhere(_) => least,
            Blocks::Extents(_) => {
                let fit = (MEMORY / self.longest().max(GRID)).min(4096) as usize;
                least.max(fit)
            }
        }
    }
}

/// Blocks begin at multiples of this.
const GRID: u64 = 4096;

/// One measurement.
#[derive(Clone, Debug)]
pub struct Run {
    /// What reads.
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

/// Its result.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Bytes read.
    pub bytes: u64,
    /// In this time.
    pub elapsed: Duration,
    /// Processor time of the process in it.
    pub cpu: Duration,
    /// Time of each read, in microseconds.
    pub latency_us: Histogram<u64>,
}

/// A run that was made.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// What was asked for.
    pub run: Run,
    /// What came of it.
    pub outcome: Outcome,
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

/// The files of a drive that is measured.
#[derive(Clone, Debug)]
pub struct Target {
    files: Vec<Arc<File>>,
}

impl Target {
    /// Files to read.
    pub fn new(files: Vec<Arc<File>>) -> Target {
        Target { files }
    }

    /// The files.
    pub fn files(&self) -> &[Arc<File>] {
        &self.files
    }

    /// Why the files, or one of them, cannot be read around the page cache.
    pub fn direct_refused(&self) -> Option<String> {
        let refused = |file: &Arc<File>| Some(file.direct().err()?.to_owned());
        self.files.iter().find_map(refused)
    }

    fn engine_files(&self, direct: bool) -> Result<Files, DirectRefused> {
        let copies = self.files.iter().map(|file| {
            let file = file.clone();
            vec![Replica::new(file, 0)]
        });
        let mode = if direct {
            DirectMode::On
        } else {
            DirectMode::Off
        };
        Files::new(copies.collect(), mode)
    }

    /// Drops the files from the page cache, and looks whether that worked.
    fn drop_cached(&self) -> Result<(), ProfileError> {
        const SAMPLE: usize = 64;
        let mut dice = Dice(3);
        for file in self.files.iter().filter(|file| file.size() > 0) {
            // Pages of a file that was just written are kept until the drive has them.
            let _ = rustix::fs::fdatasync(file.buffered_fd());
            file.advise(0, file.size(), Advice::DontNeed);
            let mut cached = 0;
            for _ in 0..SAMPLE {
                let offset = dice.below(file.size());
                // A file system that cannot tell, like a tmpfs, may well have it in memory.
                cached += usize::from(file.is_cached(offset) != Some(false));
                // Asking may have started a read.
                file.advise(offset - offset % GRID, GRID, Advice::DontNeed);
            }
            // A few pages may be somebody else's.
            if cached > SAMPLE / 16 {
                return Err(ProfileError::Cached {
                    path: file.path().to_owned(),
                    checked: SAMPLE,
                    cached,
                });
            }
        }
        Ok(())
    }

    /// Reads random blocks.
    ///
    /// # Errors
    /// [`ProfileError`].
    pub fn measure(&self, run: &Run) -> Result<Outcome, ProfileError> {
        let files = self.engine_files(run.direct)?;
        if !run.direct {
            self.drop_cached()?;
        }
        let mut draw = Draw::new(&self.files, &run.blocks)?;
        let wanted = run.blocks.places(run.queue_depth);
        // Its own rounding included, whatever the engine.
        let place = (run.blocks.longest()).saturating_add(2 * files.align());
        let places = plan::slabs_that_fit(wanted, run.queue_depth, place)?;
        let warm_up = (run.time / 4).min(Duration::from_millis(500));
        let kind = match run.reader {
            Reader::Uring => EngineKind::Uring,
            Reader::Pread => EngineKind::Pread,
            Reader::TokioUring => {
                let buffers = (places, run.blocks.longest());
                let times = (warm_up, run.time);
                let next = move || draw.next();
                let reads =
                    tokio_read::read(&files, run.queue_depth, buffers, times, next, cpu_time)
                        .map_err(ProfileError::Tokio)?;
                return Ok(Outcome {
                    bytes: reads.bytes,
                    elapsed: reads.elapsed,
                    cpu: reads.cpu,
                    latency_us: reads.latency_us,
                });
            }
        };
        let (align, slab_bytes) = (files.align(), place);
        let load = Load {
            engine: Options {
                kind,
                // So that a block is one read, and as many of them are under way as there should be, all the time.
                window: Window {
                    bytes: u64::MAX,
                    reads: run.queue_depth,
                },
                search: None,
                chunk_bytes: slab_bytes,
                batch_bytes: 0,
                record: 0,
            },
            slabs: places,
            slab_bytes,
            warm_up,
            time: run.time,
            watch_every: Duration::MAX,
        };
        let next = || {
            let (file, offset, len) = draw.next();
            let range = Range {
                file,
                offset,
                len,
                part: 0,
            };
            Layout::new(&[range], align).expect("inside a file")
        };
        let measured = measure::read(&files, load, next, |_, _| ())?;
        Ok(Outcome {
            bytes: measured.total(),
            elapsed: measured.elapsed,
            cpu: measured.cpu,
            latency_us: measured.latency_us,
        })
    }
}

/// Draws blocks.
#[derive(Debug)]
struct Draw {
    dice: Dice,
    blocks: Blocks,
    /// For each file that holds a block: its index, and how many starts lie in it and the files before it.
    starts: Vec<(u32, u64)>,
}

impl Draw {
    fn new(files: &[Arc<File>], blocks: &Blocks) -> Result<Draw, ProfileError> {
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
            dice: Dice(u64::from(std::process::id())),
            blocks: blocks.clone(),
            starts,
        })
    }

    fn next(&mut self) -> (u32, u64, u64) {
        match &self.blocks {
            Blocks::Extents(extents) => extents[self.dice.below(extents.len() as u64) as usize],
            Blocks::Anywhere(len) => {
                let total = self.starts.last().map_or(1, |(_, sum)| *sum);
                let drawn = self.dice.below(total);
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

    #[test]
    fn memory_is_no_drive() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
            return;
        };
        let path = dir.path().join("in-memory");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let target = Target::new(vec![Arc::new(File::open(path).unwrap())]);
        assert!(target.direct_refused().is_some());
        let run = Run {
            reader: Reader::Pread,
            direct: false,
            blocks: Blocks::Anywhere(4096),
            queue_depth: 1,
            time: Duration::from_millis(50),
        };
        assert!(matches!(
            target.measure(&run),
            Err(ProfileError::Cached { .. })
        ));
    }
}
