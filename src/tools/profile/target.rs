//! Measures a drive: drops its files from the page cache or bypasses it, then reads random blocks for some time.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use colibri_ring::{
    Advice, DirectMode, DirectRefused, EngineError, EngineKind, File, Files, Options, Range,
    Replica, Window, is_refusal, tokio_read,
};

use super::draw::{Draw, GRID};
use super::{Blocks, ProfileError, ProfileOutcome, ProfileRun, Reader};
use crate::memory;
use crate::tools::measure::{self, Load, Rng, cpu_time};

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

    /// Why one of the files cannot be read with O_DIRECT.
    pub fn direct_refused(&self) -> Option<String> {
        let refused = |file: &Arc<File>| Some(file.direct_fd().err()?.to_owned());
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

    /// Drops the files from the page cache, and checks a sample.
    fn drop_cached(&self) -> Result<(), ProfileError> {
        const SAMPLE: usize = 64;
        let mut rng = Rng(3);
        for file in self.files.iter().filter(|file| file.size() > 0) {
            // Pages of a file that was just written are kept until the drive has them.
            let _ = rustix::fs::fdatasync(file.buffered_fd());
            file.advise(0, file.size(), Advice::DontNeed);
            let mut cached = 0;
            for _ in 0..SAMPLE {
                let offset = rng.below(file.size());
                // A file system that cannot tell, like a tmpfs, may well have it in memory.
                cached += usize::from(file.is_cached(offset) != Some(false));
                // Asking may have started a read.
                file.advise(offset - offset % GRID, GRID, Advice::DontNeed);
            }
            // Another process may have read a few pages.
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
    pub fn measure(&self, run: &ProfileRun) -> Result<ProfileOutcome, ProfileError> {
        let files = self.engine_files(run.direct)?;
        if !run.direct {
            self.drop_cached()?;
        }
        let mut draw = Draw::new(&self.files, &run.blocks)?;
        let wanted = run.blocks.places(run.queue_depth);
        // Its own rounding included, whatever the engine.
        let place = (run.blocks.longest()).saturating_add(2 * files.align());
        let places = memory::slabs_that_fit(wanted, run.queue_depth, place)?;
        let warm_up = run.warm_up();
        let kind = match run.reader {
            Reader::Uring => EngineKind::Uring,
            Reader::Pread => EngineKind::Pread,
            Reader::TokioUring => {
                let buffers = (places, run.blocks.longest());
                let times = (warm_up, run.time);
                let next = move || draw.next();
                let reads =
                    tokio_read::read(&files, run.queue_depth, buffers, times, next, cpu_time)
                        .map_err(|error| match run.direct && is_refusal(&error) {
                            true => refused(self.files[0].path(), &error),
                            false => ProfileError::Tokio(error),
                        })?;
                return Ok(ProfileOutcome {
                    bytes: reads.bytes,
                    elapsed: reads.elapsed,
                    cpu: reads.cpu,
                    latency_us: reads.latency_us,
                });
            }
        };
        let slab_bytes = place;
        let load = Load {
            engine: Options {
                kind,
                // So that a block is one read, and as many of them are under way as there should be, all the time.
                window: Window {
                    bytes: u64::MAX,
                    reads: run.queue_depth,
                },
                chunk_bytes: slab_bytes,
                batch_bytes: 0,
                ..Options::default()
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
            files.layout(&[range]).expect("inside a file")
        };
        let measured =
            measure::read(&files, load, next, |_, _| ()).map_err(|error| match &error {
                EngineError::Read(read) if run.direct && is_refusal(&read.source) => {
                    refused(&read.path, &read.source)
                }
                _ => error.into(),
            })?;
        Ok(ProfileOutcome {
            bytes: measured.total(),
            elapsed: measured.elapsed,
            cpu: measured.cpu,
            latency_us: measured.latency_us,
        })
    }
}

/// A file system that opens with O_DIRECT has refused such a read.
fn refused(path: &Path, error: &io::Error) -> ProfileError {
    ProfileError::Direct(DirectRefused {
        path: path.to_owned(),
        reason: format!("O_DIRECT reads fail: {error}"),
    })
}

impl Blocks {
    /// How many blocks of memory are read into, in turn. Experts go into as much memory as decoding uses, because a processor
    /// whose cache holds everything that is read flatters the drive (by half, where the drive is fast); blocks of a given
    /// size into as many places as are read at once, as other tools do it.
    fn places(&self, queue_depth: usize) -> usize {
        /// Bytes; more than the caches of most processors.
        const MEMORY: u64 = 512 << 20;
        match self {
            Blocks::Anywhere(_) => queue_depth,
            Blocks::Extents(_) => {
                let fit = (MEMORY / self.longest().max(GRID)).min(4096) as usize;
                queue_depth.max(fit)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_in_memory_are_refused() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
            return;
        };
        let path = dir.path().join("in-memory");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let target = Target::new(vec![Arc::new(File::open(path).unwrap())]);
        assert!(target.direct_refused().is_some());
        let run = ProfileRun {
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
