//! Many large reads into one piece of memory, as fast as the drives and the processors allow: what a model keeps resident.
//!
//! Threads with one pread each, not the ring: nothing else is read meanwhile, and what the kernel does in the reading
//! thread (zeroing fresh pages, filling in holes, copying what is cached) then uses every processor.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::arena::SLAB_ALIGN;
use crate::extent::Span;
use crate::file::{Advice, File};
use crate::replica::{Replica, Replicas};

/// Bytes of a read: several huge pages, and few enough that the last reads of all threads end together.
const CHUNK: usize = 4 << 20;
/// Reads in flight for each source. A drive reaches its bandwidth with about eight reads of this size.
const DEPTH: usize = 8;
/// At most this many threads.
const MAX_THREADS: usize = 32;

/// A read failed on every copy.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {} at offset {offset}: {source}", path.display())]
pub struct BulkError {
    /// Index of the file.
    pub file: u32,
    /// Its primary.
    pub path: PathBuf,
    /// First byte that could not be read.
    pub offset: u64,
    /// The operating system's answer.
    pub source: io::Error,
}

/// A piece of a span and where it goes.
struct Job<'a> {
    file: u32,
    offset: u64,
    into: &'a mut [u8],
}

/// The alignment in bytes that suits direct reads of every file.
pub fn align(files: &[Replicas]) -> u64 {
    let need = |replica: &Replica| replica.file.direct().map_or(0, |(_, need)| need.offset);
    let most = files.iter().flatten().map(need).max().unwrap_or(0);
    u64::from(most).next_power_of_two().max(SLAB_ALIGN as u64)
}

/// Reads `spans` of `files` into `memory`, each to its place, where spans come one after the other. With `direct`, files are
/// read around the page cache where their file system allows it; the others are read through it, and what was read is
/// dropped from it. A file with copies is read from all of them. `progress` hears of bytes as they arrive.
///
/// # Errors
/// The first range that no copy gave.
///
/// # Panics
/// When a span lies outside `memory` or does not begin where the one before it ends.
pub fn read(
    files: &[Replicas],
    spans: &[Span],
    direct: bool,
    memory: &mut [u8],
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), BulkError> {
    let mut jobs = jobs(spans, memory);
    let sources = files.iter().map(Vec::len).max().unwrap_or(1);
    let threads = (DEPTH * sources).min(MAX_THREADS).min(jobs.len());
    // Taken from the end.
    jobs.reverse();
    let jobs = Mutex::new(jobs);
    let failure = Mutex::new(None);
    let failed = AtomicBool::new(false);
    let work = |preferred: usize| {
        while !failed.load(Ordering::Relaxed) {
            let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(Job { file, offset, into }) = job else {
                return;
            };
            let copies = &files[file as usize];
            // A copy each, so that one on a faster drive takes the next piece earlier; the others where that fails.
            let mut order = (0..copies.len()).map(|i| &copies[(preferred + i) % copies.len()]);
            let mut last = None;
            // Of the primary: a copy that is shorter cannot serve, and must not pass for one that ends here.
            let size = copies.first().map_or(0, |copy| copy.file.size());
            let wanted = size.saturating_sub(offset).min(into.len() as u64) as usize;
            let done =
                order.any(
                    |copy| match read_piece(&copy.file, offset, into, wanted, direct) {
                        Ok(()) => true,
                        Err(error) => {
                            last = Some(error);
                            false
                        }
                    },
                );
            if done {
                progress(into.len() as u64);
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
            // A thread that the system refuses is done without.
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

fn jobs<'a>(spans: &[Span], mut memory: &'a mut [u8]) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    let mut at = 0;
    for span in spans {
        assert_eq!(span.at, at, "spans follow each other");
        let (into, rest) = std::mem::take(&mut memory).split_at_mut(span.len as usize);
        memory = rest;
        at += span.len;
        for (i, into) in into.chunks_mut(CHUNK).enumerate() {
            jobs.push(Job {
                file: span.file,
                offset: span.offset + (i * CHUNK) as u64,
                into,
            });
        }
    }
    jobs
}

/// Reads `wanted` bytes of a file; the rest of `into` lies beyond its end and stays as it is.
fn read_piece(
    file: &File,
    offset: u64,
    into: &mut [u8],
    wanted: usize,
    direct: bool,
) -> Result<(), (u64, io::Error)> {
    let twin = if direct { file.direct().ok() } else { None };
    if let Some((fd, align)) = twin
        && let Ok(()) = pread_all(fd, offset, into, wanted, align.offset as usize)
    {
        return Ok(());
    }
    // O_DIRECT may be refused by the read itself; and a drive that fails, fails here again.
    let result = pread_all(file.buffered_fd(), offset, &mut into[..wanted], wanted, 1);
    file.advise(offset, into.len() as u64, Advice::DontNeed);
    result
}

/// Reads until `wanted` bytes are there. A short read goes on at a multiple of `align`.
fn pread_all(
    fd: BorrowedFd<'_>,
    offset: u64,
    into: &mut [u8],
    wanted: usize,
    align: usize,
) -> Result<(), (u64, io::Error)> {
    let mut done = 0;
    while done < wanted {
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
    use crate::arena::Region;
    use crate::extent::{Layout, Range};

    fn directory() -> tempfile::TempDir {
        // On the disk: a tmpfs has no O_DIRECT.
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
    fn every_range_comes_to_its_place() {
        let dir = directory();
        let bytes: Vec<u8> = (0..9_500_001u32).map(|i| (i * 7 / 3) as u8).collect();
        let other = vec![9; 5000];
        let files = [
            vec![file(dir.path(), "a", &bytes)],
            // The second copy of this one is too short: the first serves, whichever is asked first.
            vec![
                file(dir.path(), "b", &other),
                file(dir.path(), "c", &other[..10]),
            ],
        ];
        let wanted = [
            range(0, 100, 5),
            range(0, 20_000, 9_480_001),
            range(1, 4999, 1),
            range(1, 0, 0),
        ];
        for direct in [true, false] {
            let layout = Layout::new(&wanted, align(&files)).unwrap();
            let mut memory = Region::map(layout.footprint as usize).unwrap();
            let heard = AtomicU64::new(0);
            read(&files, &layout.spans, direct, &mut memory, &|n| {
                heard.fetch_add(n, Ordering::Relaxed);
            })
            .unwrap();
            assert_eq!(heard.into_inner(), layout.footprint);
            let got = |i: usize| {
                let at = layout.places[i] as usize;
                &memory[at..at + wanted[i].len as usize]
            };
            assert_eq!(got(0), &bytes[100..105]);
            assert!(got(1) == &bytes[20_000..]);
            assert_eq!(got(2), [9]);
        }
    }

    #[test]
    fn a_file_that_was_cut_is_an_error_with_its_place() {
        let dir = directory();
        let files = [vec![file(dir.path(), "a", &[1; 20_000])]];
        std::fs::OpenOptions::new()
            .write(true)
            .open(dir.path().join("a"))
            .unwrap()
            .set_len(9000)
            .unwrap();
        let layout = Layout::new(&[range(0, 0, 20_000)], align(&files)).unwrap();
        let mut memory = Region::map(layout.footprint as usize).unwrap();
        let error = read(&files, &layout.spans, true, &mut memory, &|_| {}).unwrap_err();
        assert_eq!((error.file, error.offset), (0, 9000));
        assert!(error.to_string().contains("the file ends here"), "{error}");
    }
}
