//! Reads many large ranges into one piece of memory, as fast as drives and processors allow.
//!
//! It uses threads with one pread each instead of io_uring: no other read competes, and the work of the kernel in a reading thread
//! (zeroing fresh pages, filling in holes, copying cached bytes) then uses every processor.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::extent::{Layout, Range, RangeError};
use crate::file::{Advice, File};
use crate::kernel::explained;
pub use crate::region::{HUGE_PAGE, Region, SLAB_ALIGN};
use crate::replica::{self, Replica, Replicas};

/// Bytes of a read: several huge pages, and so few that the last reads of all threads end together.
const CHUNK: usize = 4 << 20;
/// Reads in flight for each source. A drive reaches its bandwidth with about eight reads of this size.
const DEPTH: usize = 8;
const MAX_THREADS: usize = 32;

/// A read failed on every copy.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {} at offset {offset}: {source}{}", path.display(), explained(source))]
pub struct BulkError {
    /// Index of the file.
    pub file: u32,
    /// Path of its primary.
    pub path: PathBuf,
    /// First byte that could not be read.
    pub offset: u64,
    /// The kernel's error.
    pub source: io::Error,
}

/// A piece of a span and its memory.
struct Job<'a> {
    file: u32,
    offset: u64,
    /// Where it begins in the memory of all spans.
    at: usize,
    into: &'a mut [u8],
}

/// Lays ranges of `files` out for [`read`], with an alignment that suits direct reads of every file.
///
/// # Errors
/// [`RangeError`] for a range that ends after its file.
pub fn layout(files: &[Replicas], ranges: &[Range]) -> Result<Layout, RangeError> {
    let need = |replica: &Replica| replica.file.direct_fd().map_or(0, |(_, need)| need.offset);
    let most = files.iter().flatten().map(need).max().unwrap_or(0);
    let align = u64::from(most).next_power_of_two().max(SLAB_ALIGN as u64);
    replica::layout(files, ranges, align)
}

/// Reads the spans of `layout` into `memory`, each to its place. With `direct`, reads bypass the page cache where the file system
/// allows it; otherwise the bytes are dropped from it afterwards. All copies of a file take part. Each piece that has been read is
/// handed to `arrived` by the thread that read it, with its position in `memory`.
///
/// # Errors
/// The first range that no copy gave.
///
/// # Panics
/// When `memory` is smaller than the layout.
pub fn read(
    files: &[Replicas],
    layout: &Layout,
    direct: bool,
    memory: &mut [u8],
    arrived: &(dyn Fn(usize, &[u8]) + Sync),
) -> Result<(), BulkError> {
    let mut jobs = jobs(layout, memory);
    let sources = files.iter().map(Vec::len).max().unwrap_or(1);
    let threads = (DEPTH * sources).min(MAX_THREADS).min(jobs.len());
    // Threads pop from the end.
    jobs.reverse();
    let jobs = Mutex::new(jobs);
    let failure = Mutex::new(None);
    let failed = AtomicBool::new(false);
    let work = |preferred: usize| {
        while !failed.load(Ordering::Relaxed) {
            let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(Job {
                file,
                offset,
                at,
                into,
            }) = job
            else {
                return;
            };
            let copies = &files[file as usize];
            // Each thread prefers one copy, so that those of a faster drive take the next piece earlier.
            let mut order = (0..copies.len()).map(|i| &copies[(preferred + i) % copies.len()]);
            let mut last = None;
            // Of the primary: a shorter copy cannot serve.
            let size = copies.first().map_or(0, |copy| copy.file.size());
            let requested = size.saturating_sub(offset).min(into.len() as u64) as usize;
            let done =
                order.any(
                    |copy| match read_piece(&copy.file, offset, into, requested, direct) {
                        Ok(()) => true,
                        Err(error) => {
                            last = Some(error);
                            false
                        }
                    },
                );
            if done {
                arrived(at, into);
                continue;
            }
            failed.store(true, Ordering::Relaxed);
            let (offset, source) =
                last.unwrap_or_else(|| (offset, io::Error::other("there is no copy")));
            let path = copies.first().map(|copy| copy.file.path().to_path_buf());
            let error = BulkError {
                file,
                path: path.unwrap_or_default(),
                offset,
                source,
            };
            let mut first = failure.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(error);
        }
    };
    std::thread::scope(|scope| {
        for i in 1..threads {
            let work = &work;
            // The other threads take the work of one that the system refuses.
            let spawned = std::thread::Builder::new()
                .name(format!("load-{i}"))
                .spawn_scoped(scope, move || work(i));
            if spawned.is_err() {
                break;
            }
        }
        work(0);
    });
    let failure = failure.into_inner();
    match failure.unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn jobs<'a>(layout: &Layout, mut memory: &'a mut [u8]) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    let mut at = 0;
    // Spans follow each other without gaps.
    for span in layout.spans() {
        let (into, rest) = std::mem::take(&mut memory).split_at_mut(span.len as usize);
        memory = rest;
        for (i, into) in into.chunks_mut(CHUNK).enumerate() {
            jobs.push(Job {
                file: span.file,
                offset: span.offset + (i * CHUNK) as u64,
                at: at + i * CHUNK,
                into,
            });
        }
        at += span.len as usize;
    }
    jobs
}

/// Reads `requested` bytes of a file; the rest of `into` lies beyond its end and stays as it is.
fn read_piece(
    file: &File,
    offset: u64,
    into: &mut [u8],
    requested: usize,
    direct: bool,
) -> Result<(), (u64, io::Error)> {
    let direct_fd = if direct { file.direct_fd().ok() } else { None };
    if let Some((fd, align)) = direct_fd
        && let Ok(()) = pread_all(fd, offset, into, requested, align.offset as usize)
    {
        return Ok(());
    }
    // A file system may refuse O_DIRECT at the read itself. A failing drive fails here again.
    let into = &mut into[..requested];
    let result = pread_all(file.buffered_fd(), offset, into, requested, 1);
    file.advise(offset, requested as u64, Advice::DontNeed);
    result
}

/// Reads until `requested` bytes are in. A short read goes on at a multiple of `align`.
fn pread_all(
    fd: BorrowedFd<'_>,
    offset: u64,
    into: &mut [u8],
    requested: usize,
    align: usize,
) -> Result<(), (u64, io::Error)> {
    let mut done = 0;
    while done < requested {
        let from = done - done % align.max(1);
        let at = offset + from as u64;
        match rustix::io::pread(fd, &mut into[from..], at) {
            Ok(n) if from + n > done => done = from + n,
            Ok(_) => {
                let ended = io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends here");
                return Err((at, ended));
            }
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err((at, error.into())),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn directory() -> tempfile::TempDir {
        // Not on a tmpfs, which has no O_DIRECT.
        let test = std::env::current_exe().unwrap();
        tempfile::tempdir_in(test.parent().unwrap()).unwrap()
    }

    fn file(dir: &std::path::Path, name: &str, bytes: &[u8]) -> Replica {
        let path = dir.join(name);
        std::fs::write(&path, bytes).unwrap();
        std::fs::File::open(&path).unwrap().sync_all().unwrap();
        Replica::new(Arc::new(File::open(path).unwrap()), 0)
    }

    fn range(file: u32, offset: u64, len: u64) -> Range {
        Range {
            file,
            offset,
            len,
            part: 0,
        }
    }

    #[test]
    fn every_range_is_read_to_its_place() {
        let dir = directory();
        let bytes: Vec<u8> = (0..9_500_001u32).map(|i| (i * 7 / 3) as u8).collect();
        let other = vec![9; 5000];
        let files = [
            vec![file(dir.path(), "a", &bytes)],
            // The second copy of this one is too short: the first serves.
            vec![
                file(dir.path(), "b", &other),
                file(dir.path(), "c", &other[..10]),
            ],
        ];
        let requested = [
            range(0, 100, 5),
            range(0, 20_000, 9_480_001),
            range(1, 4999, 1),
            range(1, 0, 0),
        ];
        for direct in [true, false] {
            let layout = layout(&files, &requested).unwrap();
            let mut memory = Region::map(layout.footprint() as usize).unwrap();
            let counted = AtomicU64::new(0);
            let arrived = Mutex::new(vec![0; layout.footprint() as usize]);
            read(&files, &layout, direct, &mut memory, &|at, piece| {
                counted.fetch_add(piece.len() as u64, Ordering::Relaxed);
                arrived.lock().unwrap()[at..at + piece.len()].copy_from_slice(piece);
            })
            .unwrap();
            assert_eq!(counted.into_inner(), layout.footprint());
            assert!(arrived.into_inner().unwrap()[..] == memory[..layout.footprint() as usize]);
            let got = |i: usize| {
                let at = layout.places()[i] as usize;
                &memory[at..at + requested[i].len as usize]
            };
            assert_eq!(got(0), &bytes[100..105]);
            assert!(got(1) == &bytes[20_000..]);
            assert_eq!(got(2), [9]);
        }
    }

    #[test]
    fn a_range_past_the_end_is_refused() {
        let dir = directory();
        let files = [vec![file(dir.path(), "short", &[1; 20_000])]];
        let error = layout(&files, &[range(0, 19_999, 2)]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("short") && text.contains("20000"), "{text}");
    }

    #[test]
    fn a_truncated_file_is_an_error_with_its_offset() {
        let dir = directory();
        let files = [vec![file(dir.path(), "a", &[1; 20_000])]];
        std::fs::OpenOptions::new()
            .write(true)
            .open(dir.path().join("a"))
            .unwrap()
            .set_len(9000)
            .unwrap();
        let layout = layout(&files, &[range(0, 0, 20_000)]).unwrap();
        let mut memory = Region::map(layout.footprint() as usize).unwrap();
        let error = read(&files, &layout, true, &mut memory, &|_, _| {}).unwrap_err();
        assert_eq!((error.file, error.offset), (0, 9000));
        assert!(error.to_string().contains("the file ends here"), "{error}");
    }
}
