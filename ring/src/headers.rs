//! Reads the length-prefixed headers of many files: 8 bytes of length, little-endian, and then as many bytes.
//!
//! Several workers claim files in order. Each has a small tokio-uring runtime with a bounded number of reads in flight and parses a
//! header as soon as it is read: the kernel reads the next ones meanwhile, all processors parse, and only a window of headers is in
//! memory. Where io_uring is denied, threads with pread do the same.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use tokio::task::JoinSet;
use tokio_uring::buf::BoundedBuf;

use crate::device::EngineKind;
use crate::file::{File, FileError};
use crate::probe::try_ring;

/// Bytes of the length in front of a header.
pub const PREFIX: u64 = 8;

/// Bytes of the read that comes before the length is known: enough for the whole header of a usual file, which then costs one
/// read instead of two.
const FIRST_READ: u64 = 256 << 10;

/// Reads in flight of one worker.
const IN_FLIGHT: usize = 8;

/// Least number of threads of the pread path, which has one read in flight per thread.
const PREAD_THREADS: usize = 8;

/// Why a header cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The file could not be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is shorter than the length field.
    #[error("{}: {size} bytes are too few for a header", path.display())]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// The length points beyond the end of the file.
    #[error("{}: the header claims {len} bytes, but only {left} follow its length field", path.display())]
    BeyondFile {
        /// The file.
        path: PathBuf,
        /// The claimed length in bytes.
        len: u64,
        /// Bytes of the file after the length field.
        left: u64,
    },
    /// The length is more than the caller allows.
    #[error("{}: the header claims {len} bytes, more than the limit of {cap}", path.display())]
    OverCap {
        /// The file.
        path: PathBuf,
        /// The claimed length in bytes.
        len: u64,
        /// The limit in bytes.
        cap: u64,
    },
}

/// Reads the header of every file and calls `parse`, on several threads, with the file's index in `files` and the header without
/// its length field. A header longer than `cap` bytes is refused unread. Where io_uring is denied, pread reads the headers,
/// whatever `engine` says. Returns the results of `parse` in the order of `files`.
///
/// # Errors
/// The error of the first file in the order of `files` that has one.
pub fn read_headers<T, E, P>(
    files: &[Arc<File>],
    cap: u64,
    engine: EngineKind,
    parse: P,
) -> Result<Vec<T>, E>
where
    T: Send,
    E: From<HeaderError> + Send,
    P: Fn(usize, &[u8]) -> Result<T, E> + Sync,
{
    let fan_out = FanOut {
        files,
        cap,
        parse,
        next: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
    };
    let ring = engine != EngineKind::Pread && ring_works();
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let workers = if ring {
        cores
    } else {
        cores.max(PREAD_THREADS)
    };

    let mut done = thread::scope(|scope| {
        // The other threads take the work of one that the system refuses.
        let workers: Vec<_> = (0..workers.min(files.len()))
            .map_while(|_| {
                thread::Builder::new()
                    .name("headers".into())
                    .spawn_scoped(scope, || fan_out.work(ring))
                    .ok()
            })
            .collect();
        workers
            .into_iter()
            .flat_map(|w| w.join().unwrap_or_else(|p| std::panic::resume_unwind(p)))
            .collect::<Vec<_>>()
    });
    // Reads all headers if no thread could be started.
    fan_out.work_with_pread(&mut done);

    done.sort_unstable_by_key(|&(index, _)| index);
    done.into_iter().map(|(_, result)| result).collect()
}

fn ring_works() -> bool {
    try_ring()
        .inspect_err(|e| tracing::debug!("io_uring is denied, headers are read by pread: {e}"))
        .is_ok()
}

/// Results with the indices of their files.
type Done<T, E> = Vec<(usize, Result<T, E>)>;

/// The state that the workers share.
struct FanOut<'a, P> {
    files: &'a [Arc<File>],
    cap: u64,
    parse: P,
    next: AtomicUsize,
    failed: AtomicBool,
}

impl<P> FanOut<'_, P> {
    /// The next file, unless an earlier one failed. Files are claimed in order and every claimed one is finished, so the first
    /// failing file is among the finished ones.
    fn claim(&self) -> Option<usize> {
        if self.failed.load(Ordering::Relaxed) {
            return None;
        }
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.files.len()).then_some(index)
    }

    /// The end of the header in the file, from the file's first bytes.
    fn header_end(&self, file: &File, start: &[u8]) -> Result<usize, HeaderError> {
        let path = || file.path().to_path_buf();
        let size = file.size();
        let Some(prefix) = start.first_chunk::<{ PREFIX as usize }>() else {
            return Err(HeaderError::TooShort { path: path(), size });
        };
        let len = u64::from_le_bytes(*prefix);
        let left = size.saturating_sub(PREFIX);
        let cap = self.cap;
        if len > left {
            return Err(HeaderError::BeyondFile {
                path: path(),
                len,
                left,
            });
        }
        match usize::try_from(len) {
            Ok(n) if len <= cap => Ok(n + PREFIX as usize),
            _ => Err(HeaderError::OverCap {
                path: path(),
                len,
                cap,
            }),
        }
    }

    fn work<T, E>(&self, ring: bool) -> Done<T, E>
    where
        E: From<HeaderError>,
        P: Fn(usize, &[u8]) -> Result<T, E>,
    {
        let mut done = Vec::new();
        let runtime = ring.then(|| {
            tokio_uring::Runtime::new(tokio_uring::builder().entries(2 * IN_FLIGHT as u32))
        });
        match runtime {
            Some(Ok(runtime)) => runtime.block_on(self.work_with_ring(&mut done)),
            Some(Err(_)) | None => self.work_with_pread(&mut done),
        }
        done
    }

    async fn work_with_ring<T, E>(&self, done: &mut Done<T, E>)
    where
        E: From<HeaderError>,
        P: Fn(usize, &[u8]) -> Result<T, E>,
    {
        let mut reads = JoinSet::new();
        let mut spare = Vec::new();
        loop {
            while reads.len() < IN_FLIGHT
                && let Some(index) = self.claim()
            {
                let file = self.files[index].clone();
                let buf: Vec<u8> = spare.pop().unwrap_or_default();
                reads.spawn_local(async move {
                    let reader = RingReader::new(file);
                    let start = reader.fill(buf, FIRST_READ.min(reader.file.size())).await;
                    (index, reader, start)
                });
            }
            let Some(read) = reads.join_next().await else {
                return;
            };
            let (index, reader, start) =
                read.unwrap_or_else(|e| std::panic::resume_unwind(e.into_panic()));
            // The rest of a long header is read here and not in the task above, so that a worker holds at most one of them.
            let header = async {
                let start = start?;
                let end = self.header_end(&reader.file, &start)?;
                let buf = reader.fill(start, end as u64).await?;
                Ok::<_, HeaderError>((buf, end))
            };
            match header.await {
                Ok((mut buf, end)) => {
                    self.finish(done, index, (self.parse)(index, &buf[PREFIX as usize..end]));
                    if buf.capacity() as u64 <= FIRST_READ {
                        buf.clear();
                        spare.push(buf);
                    }
                }
                Err(e) => self.finish(done, index, Err(e.into())),
            }
        }
    }

    fn work_with_pread<T, E>(&self, done: &mut Done<T, E>)
    where
        E: From<HeaderError>,
        P: Fn(usize, &[u8]) -> Result<T, E>,
    {
        let mut buf = Vec::new();
        while let Some(index) = self.claim() {
            let file = &self.files[index];
            buf.clear();
            let header = fill_by_pread(file, &mut buf, FIRST_READ.min(file.size()))
                .map_err(HeaderError::from)
                .and_then(|()| self.header_end(file, &buf))
                .and_then(|end| {
                    fill_by_pread(file, &mut buf, end as u64)?;
                    Ok(end)
                });
            let result = match header {
                Ok(end) => (self.parse)(index, &buf[PREFIX as usize..end]),
                Err(e) => Err(e.into()),
            };
            self.finish(done, index, result);
            if buf.capacity() as u64 > FIRST_READ {
                buf = Vec::new();
            }
        }
    }

    fn finish<T, E>(&self, done: &mut Done<T, E>, index: usize, result: Result<T, E>) {
        if result.is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        done.push((index, result));
    }
}

/// A file with a second descriptor, which the tokio-uring runtime closes.
struct RingReader {
    file: Arc<File>,
    ring: io::Result<tokio_uring::fs::File>,
}

impl RingReader {
    fn new(file: Arc<File>) -> RingReader {
        let ring = file
            .buffered_fd()
            .try_clone_to_owned()
            .map(|fd| tokio_uring::fs::File::from_std(fd.into()));
        RingReader { file, ring }
    }

    /// Extends `buf`, which holds the start of the file, to `len` bytes.
    async fn fill(&self, mut buf: Vec<u8>, len: u64) -> Result<Vec<u8>, FileError> {
        let end = len as usize;
        buf.reserve_exact(end.saturating_sub(buf.len()));
        while let Ok(ring) = &self.ring
            && buf.len() < end
        {
            let at = buf.len();
            let (read, slice) = ring.read_at(buf.slice(at..end), at as u64).await;
            buf = slice.into_inner();
            if !matches!(read, Ok(n) if n > 0) {
                break;
            }
        }
        // pread repeats what the ring could not read (no descriptor left, an old kernel, an error, the end of the file), so that
        // both paths give the same errors.
        fill_by_pread(&self.file, &mut buf, len)?;
        Ok(buf)
    }
}

/// Extends `buf`, which holds the start of the file, to `len` bytes.
fn fill_by_pread(file: &File, buf: &mut Vec<u8>, len: u64) -> Result<(), FileError> {
    let (at, end) = (buf.len(), len as usize);
    if at < end {
        buf.reserve_exact(end - at);
        buf.resize(end, 0);
        file.read_at(&mut buf[at..], at as u64)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const CAP: u64 = 1 << 20;

    /// Files with the given claimed lengths and contents, opened.
    fn files(dir: &std::path::Path, headers: &[(u64, Vec<u8>)]) -> Vec<Arc<File>> {
        let write = |(i, (len, bytes)): (usize, &(u64, Vec<u8>))| {
            let path = dir.join(i.to_string());
            fs::write(&path, [&len.to_le_bytes()[..], bytes].concat()).unwrap();
            Arc::new(File::open(path).unwrap())
        };
        headers.iter().enumerate().map(write).collect()
    }

    fn lengths(files: &[Arc<File>], engine: EngineKind) -> Result<Vec<(usize, u8)>, HeaderError> {
        read_headers(files, CAP, engine, |_, header| {
            assert!(header.iter().all(|b| *b == header[0]));
            Ok((header.len(), header[0]))
        })
    }

    #[test]
    fn headers_short_and_long_come_back_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let sizes = |i: usize| match i % 5 {
            0 => FIRST_READ as usize - 8,
            1 => FIRST_READ as usize - 7,
            2 => CAP as usize,
            n => n * 100 + i,
        };
        let made: Vec<_> = (0..100)
            .map(|i| (sizes(i) as u64, vec![i as u8; sizes(i) + i % 2 * 1000]))
            // Data after a header must not matter; here it is more of the same byte.
            .collect();
        let files = files(dir.path(), &made);
        let expected: Vec<_> = (0..100).map(|i| (sizes(i), i as u8)).collect();
        for engine in [EngineKind::Auto, EngineKind::Pread] {
            assert_eq!(lengths(&files, engine).unwrap(), expected);
        }
    }

    #[test]
    fn the_first_failing_file_is_reported_by_either_engine() {
        let dir = tempfile::tempdir().unwrap();
        let mut made = vec![(3, vec![7; 3]); 60];
        made[41] = (CAP + 1, vec![0; CAP as usize + 1]);
        made[43] = (u64::MAX, vec![0; 20]);
        let files = files(dir.path(), &made);
        for engine in [EngineKind::Auto, EngineKind::Pread] {
            let error = lengths(&files, engine).unwrap_err();
            assert!(
                matches!(&error, HeaderError::OverCap { path, len, cap: CAP }
                if path.ends_with("41") && *len == CAP + 1)
            );
            let error = lengths(&files[42..], engine).unwrap_err();
            assert!(
                matches!(&error, HeaderError::BeyondFile { path, len: u64::MAX, left: 20 }
                if path.ends_with("43"))
            );
        }
    }

    #[test]
    fn a_file_shorter_than_the_length_field() {
        let dir = tempfile::tempdir().unwrap();
        for size in [0, 7] {
            let path = dir.path().join("short");
            fs::write(&path, vec![0; size]).unwrap();
            let files = [Arc::new(File::open(path).unwrap())];
            for engine in [EngineKind::Auto, EngineKind::Pread] {
                let error = lengths(&files, engine).unwrap_err();
                assert!(matches!(error, HeaderError::TooShort { size: s, .. } if s == size as u64));
            }
        }
    }

    #[test]
    fn a_file_that_shrank_after_it_was_opened() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path(), &[(10, vec![0; 10])]);
        fs::write(files[0].path(), []).unwrap();
        for engine in [EngineKind::Auto, EngineKind::Pread] {
            let error = lengths(&files, engine).unwrap_err();
            assert!(matches!(
                error,
                HeaderError::File(FileError::Truncated { .. })
            ));
        }
    }
}
