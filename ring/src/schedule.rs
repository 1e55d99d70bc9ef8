//! The scheduler, without I/O: what to read next from which drive.
//!
//! A read that the kernel has taken cannot be cancelled, so waiting work stays here, in priority order, and each drive
//! is given only as much as its window holds. A drive takes the next chunk when it has room, from whichever
//! file it has a copy of: drives of unequal speed get work in proportion to their speed, with nothing to configure.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::arena::SlabId;
use crate::device::{Completion, Op};
use crate::extent::{Chunk, PARTS};
use crate::replica::{Drive, Files, Replica, Route, Stats, Window};

/// Why a read is wanted. Every waiting demand read goes before every speculative one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Somebody waits for it.
    Demand,
    /// It may be wanted soon.
    Speculative,
}

/// What happened to a slab.
#[derive(Debug)]
pub enum Event {
    /// All bytes of a part are in.
    Part(SlabId, u8),
    /// Everything is in.
    Full(SlabId),
    /// It was dropped before everything was read; nothing writes into it any more.
    Dropped(SlabId),
    /// A read failed on every copy; nothing writes into it any more.
    Failed(SlabId, ReadError),
}

/// A read that failed on every copy of the file.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {len} bytes at offset {offset} of {}: {source}", path.display())]
pub struct ReadError {
    /// Index of the file.
    pub file: u32,
    /// Path of the copy that failed last.
    pub path: PathBuf,
    /// First byte of the failed read.
    pub offset: u64,
    /// Its length.
    pub len: u64,
    /// The operating system's answer.
    pub source: io::Error,
}

/// A slab being filled.
#[derive(Debug)]
struct Job {
    priority: Priority,
    waiting: VecDeque<Waiting>,
    in_flight: usize,
    /// Bytes of each part that are not in yet.
    missing: [u64; PARTS],
    dropped: bool,
    error: Option<ReadError>,
}

impl Job {
    /// A chunk, or its rest, has to be read once more.
    fn wait_again(&mut self, waiting: Waiting, waiting_bytes: &mut u64) {
        *waiting_bytes += waiting.len();
        self.waiting.push_front(waiting);
    }
}

/// A chunk that is not at a device, or its unread rest.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    chunk: Chunk,
    /// Bytes of it that are in already, a multiple of the alignment.
    done: u64,
    /// Bit i: copy i has failed to read it.
    failed: u8,
    /// O_DIRECT was refused for it.
    buffered: bool,
    /// How often it was interrupted without progress.
    interrupted: u16,
}

impl Waiting {
    /// Bytes that are not in.
    fn len(&self) -> u64 {
        self.chunk.len - self.done
    }
}

/// A read that a device has.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    slab: SlabId,
    waiting: Waiting,
    copy: u8,
    drive: usize,
    since: Duration,
}

/// How often a read may be interrupted (EINTR, EAGAIN) before that counts as a failure.
const MAX_INTERRUPTIONS: u16 = 1000;

/// Decides which chunk goes to which drive next, and keeps the books of every slab being filled.
#[derive(Debug)]
pub struct Scheduler {
    /// For each file, its copies.
    files: Vec<Vec<Route>>,
    drives: Vec<Drive>,
    jobs: Vec<Option<Job>>,
    /// Slabs with waiting chunks, first come first served, by [`Priority`].
    queues: [VecDeque<SlabId>; 2],
    /// Bytes of everything that is not at a device.
    waiting_bytes: u64,
    flights: Vec<Option<InFlight>>,
    free_ids: Vec<u32>,
    align: u64,
    /// Statistics of everything that completed.
    pub(crate) stats: Stats,
}

impl Scheduler {
    /// A scheduler for `slabs` slabs and reads of `files`; each drive gets a `window`.
    pub fn new(slabs: usize, files: &Files, window: Window) -> Scheduler {
        let mut drives: Vec<Drive> = Vec::new();
        let mut drive_of = |st_dev: u64| {
            drives
                .iter()
                .position(|d| d.st_dev == st_dev)
                .unwrap_or_else(|| {
                    drives.push(Drive::new(st_dev, window));
                    drives.len() - 1
                })
        };
        let mut route = |(replica, direct): (&Replica, &bool)| Route {
            replica: replica.clone(),
            drive: drive_of(replica.file.drive()),
            direct: *direct,
            failed: false,
        };
        let routes = files
            .replicas
            .iter()
            .zip(&files.direct)
            .map(|(copies, direct)| copies.iter().zip(direct).map(&mut route).collect())
            .collect();
        let sources = files
            .replicas
            .iter()
            .flatten()
            .map(|r| r.source + 1)
            .max()
            .unwrap_or(0);
        Scheduler {
            files: routes,
            drives,
            jobs: (0..slabs).map(|_| None).collect(),
            queues: Default::default(),
            waiting_bytes: 0,
            flights: Vec::new(),
            free_ids: Vec::new(),
            align: files.align(),
            stats: Stats::new(sources),
        }
    }

    /// Number of drives.
    pub fn drives(&self) -> usize {
        self.drives.len()
    }

    /// The most reads that can be at the devices at once.
    pub fn max_in_flight(&self) -> usize {
        self.drives.iter().map(|d| d.window.reads).sum()
    }

    /// Reads that are at the devices now.
    pub fn in_flight(&self) -> usize {
        self.drives.iter().map(|d| d.reads_in_flight).sum()
    }

    /// Reads at the drive that has the fewest, of those that have any; 1 if none has.
    pub fn fewest_in_flight(&self) -> usize {
        let busy = self.drives.iter().map(|d| d.reads_in_flight);
        busy.filter(|n| *n > 0).min().unwrap_or(1)
    }

    /// Whether nothing is at a device and nothing waits to go there.
    pub fn is_idle(&self) -> bool {
        self.in_flight() == 0 && self.queues.iter().all(VecDeque::is_empty)
    }

    /// Bytes that are at the devices now.
    pub fn bytes_in_flight(&self) -> u64 {
        self.drives.iter().map(|d| d.bytes_in_flight).sum()
    }

    /// Asks for a slab to be filled with `chunks`, in this order, which carry `payload` bytes of each part. The slab must
    /// not be being filled.
    pub fn push(
        &mut self,
        slab: SlabId,
        priority: Priority,
        chunks: &[Chunk],
        events: &mut Vec<Event>,
    ) {
        debug_assert!(
            self.jobs[slab.index()].is_none(),
            "{slab:?} is being filled"
        );
        let mut missing = [0; PARTS];
        for chunk in chunks {
            for (missing, payload) in missing.iter_mut().zip(chunk.payload) {
                *missing += payload;
            }
        }
        for (part, _) in missing.iter().enumerate().filter(|(_, m)| **m == 0) {
            events.push(Event::Part(slab, part as u8));
        }
        let waiting = chunks
            .iter()
            .map(|&chunk| Waiting {
                chunk,
                done: 0,
                failed: 0,
                buffered: false,
                interrupted: 0,
            })
            .collect();
        self.waiting_bytes += chunks.iter().map(|chunk| chunk.len).sum::<u64>();
        self.jobs[slab.index()] = Some(Job {
            priority,
            waiting,
            in_flight: 0,
            missing,
            dropped: false,
            error: None,
        });
        self.queues[priority as usize].push_back(slab);
        self.finish(slab, events);
    }

    /// A speculative read turned out to be wanted: it goes to the end of the demand queue. Also takes a
    /// [`Scheduler::drop_waiting`] back that has not ended yet.
    pub fn promote(&mut self, slab: SlabId) {
        let Some(job) = &mut self.jobs[slab.index()] else {
            return;
        };
        job.dropped = false;
        if job.priority == Priority::Speculative {
            job.priority = Priority::Demand;
            self.queues[Priority::Speculative as usize].retain(|s| *s != slab);
            self.queues[Priority::Demand as usize].push_back(slab);
        }
    }

    /// The rest of a slab is not wanted any more. What a device has already is still read; the slab is
    /// free when [`Event::Dropped`] comes (or [`Event::Full`], if nothing was waiting).
    pub fn drop_waiting(&mut self, slab: SlabId, events: &mut Vec<Event>) {
        if let Some(job) = &mut self.jobs[slab.index()] {
            job.dropped = true;
            self.finish(slab, events);
        }
    }

    /// The next read, if a drive has room for one that it has a copy for. Of the drives that could do it, it goes to the one
    /// that will have finished it first.
    pub fn next(&mut self, now: Duration) -> Option<Op> {
        if !self.drives.iter().any(Drive::has_room) {
            return None;
        }
        for priority in [Priority::Demand, Priority::Speculative] {
            for q in 0..self.queues[priority as usize].len() {
                let slab = self.queues[priority as usize][q];
                let job = self.jobs[slab.index()]
                    .as_ref()
                    .expect("queued slabs are being filled");
                if job.dropped || job.error.is_some() {
                    continue;
                }
                let found = job
                    .waiting
                    .iter()
                    .enumerate()
                    .find_map(|(w, waiting)| Some((w, self.choose(waiting, now)?)));
                let Some((w, copy)) = found else { continue };
                let job = self.jobs[slab.index()].as_mut().expect("just found");
                let waiting = job.waiting.remove(w).expect("just found");
                self.waiting_bytes -= waiting.len();
                job.in_flight += 1;
                if job.waiting.is_empty() {
                    self.queues[priority as usize].remove(q);
                }
                let flight = InFlight {
                    slab,
                    waiting,
                    copy,
                    drive: self.files[waiting.chunk.file as usize][copy as usize].drive,
                    since: now,
                };
                return Some(self.launch(flight));
            }
        }
        None
    }

    /// Which copy of a chunk to read now: that of the drive which finishes it first. Where that drive has no room, another
    /// takes it only if it is done with it before the drives with no room could be done with all that waits: the last
    /// chunks of a batch are not left to a slow drive.
    fn choose(&self, waiting: &Waiting, now: Duration) -> Option<u8> {
        let len = waiting.len();
        let copies = &self.files[waiting.chunk.file as usize];
        let mut best: Option<(f64, u8)> = None;
        let (mut full_bytes, mut full_speed, mut full_first) = (0.0, 0.0, f64::INFINITY);
        for copy in usable(copies, waiting.failed) {
            let drive = &self.drives[copies[copy as usize].drive];
            let speed = self.speed(drive, now);
            let end = (drive.bytes_in_flight + len) as f64 / speed;
            if !drive.has_room() {
                full_bytes += drive.bytes_in_flight as f64;
                full_speed += speed;
                full_first = end.min(full_first);
            } else if best.is_none_or(|(other, _)| end < other) {
                best = Some((end, copy));
            }
        }
        let (end, copy) = best?;
        let helps =
            end <= full_first || end <= (full_bytes + self.waiting_bytes as f64) / full_speed;
        helps.then_some(copy)
    }

    /// Bytes a second of a drive; as fast as the others as long as nothing is known about it.
    fn speed(&self, drive: &Drive, now: Duration) -> f64 {
        drive.speed(now).unwrap_or_else(|| {
            let known: Vec<f64> = self.drives.iter().filter_map(|d| d.speed(now)).collect();
            match known.len() {
                0 => 1.0,
                n => known.iter().sum::<f64>() / n as f64,
            }
        })
    }

    fn launch(&mut self, flight: InFlight) -> Op {
        let InFlight {
            slab,
            waiting:
                Waiting {
                    chunk,
                    done,
                    buffered,
                    ..
                },
            copy,
            drive,
            ..
        } = flight;
        self.drives[drive].launch(chunk.len - done, flight.since);
        let id = self.free_ids.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() as u32 - 1
        });
        self.flights[id as usize] = Some(flight);
        let direct = self.files[chunk.file as usize][copy as usize].direct && !buffered;
        Op {
            id,
            file: chunk.file,
            copy,
            direct,
            offset: chunk.offset + done,
            len: chunk.len - done,
            slab,
            at: chunk.at + done,
        }
    }

    /// Takes the end of a read.
    pub fn complete(&mut self, ended: Completion, now: Duration, events: &mut Vec<Event>) {
        let flight = self.flights[ended.id as usize]
            .take()
            .expect("only what was launched ends");
        self.free_ids.push(ended.id);
        self.drives[flight.drive].complete(flight.waiting.len(), now);
        self.stats.record_latency(now.saturating_sub(flight.since));
        let slab = flight.slab;
        let job = self.jobs[slab.index()]
            .as_mut()
            .expect("a slab in flight is being filled");
        job.in_flight -= 1;

        let mut waiting = flight.waiting;
        let chunk = waiting.chunk;
        let route = &mut self.files[chunk.file as usize][flight.copy as usize];
        let source = &mut self.stats.sources[route.replica.source];
        // The last aligned chunk of a file reaches past its end.
        let end = (chunk.offset + chunk.len).min(route.replica.file.size());
        let wanted = end.saturating_sub(chunk.offset + waiting.done);
        let error = match ended.result {
            Ok(n) if n >= wanted => {
                source.reads += 1;
                source.bytes += n;
                for (part, (missing, payload)) in
                    job.missing.iter_mut().zip(chunk.payload).enumerate()
                {
                    *missing -= payload;
                    if payload > 0 && *missing == 0 {
                        events.push(Event::Part(slab, part as u8));
                    }
                }
                None
            }
            // A short read goes on from the last aligned byte.
            Ok(n) if n >= self.align => {
                source.bytes += n;
                waiting.done += n & !(self.align - 1);
                job.wait_again(waiting, &mut self.waiting_bytes);
                None
            }
            Ok(_) => Some(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file ended: it was truncated after it was opened",
            )),
            Err(e)
                if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
                    && waiting.interrupted < MAX_INTERRUPTIONS =>
            {
                waiting.interrupted += 1;
                job.wait_again(waiting, &mut self.waiting_bytes);
                None
            }
            // Some file systems open with O_DIRECT and refuse the read.
            Err(e)
                if e.raw_os_error() == Some(libc::EINVAL) && route.direct && !waiting.buffered =>
            {
                waiting.buffered = true;
                job.wait_again(waiting, &mut self.waiting_bytes);
                None
            }
            Err(e) => Some(e),
        };
        if let Some(e) = error {
            source.errors += 1;
            waiting.failed |= 1 << flight.copy;
            let error = ReadError {
                file: chunk.file,
                path: route.replica.file.path().to_owned(),
                offset: chunk.offset + waiting.done,
                len: chunk.len - waiting.done,
                source: e,
            };
            let known = std::mem::replace(&mut route.failed, true);
            let source = route.replica.source;
            let copies = self.files[chunk.file as usize].len();
            if (0..copies).any(|c| waiting.failed & (1 << c) == 0) {
                job.wait_again(waiting, &mut self.waiting_bytes);
                // A file that was truncated says nothing about its neighbours; a drive that fails does.
                let file_only = error.source.kind() == io::ErrorKind::UnexpectedEof;
                if !known {
                    let dir = error.path.parent().unwrap_or(&error.path);
                    let what = if file_only { &error.path } else { dir };
                    tracing::warn!(
                        "{error}; {} is read only where no other copy is left",
                        what.display()
                    );
                }
                if !file_only {
                    let routes = self.files.iter_mut().flatten();
                    for route in routes.filter(|route| route.replica.source == source) {
                        route.failed = true;
                    }
                }
            } else {
                job.error.get_or_insert(error);
            }
        }
        if !job.waiting.is_empty() {
            let queue = &mut self.queues[job.priority as usize];
            if !queue.contains(&slab) {
                queue.push_front(slab);
            }
        }
        self.finish(slab, events);
    }

    /// Ends the job of a slab if nothing of it is at a device and nothing more will be.
    fn finish(&mut self, slab: SlabId, events: &mut Vec<Event>) {
        let Some(job) = &mut self.jobs[slab.index()] else {
            return;
        };
        if job.in_flight > 0 {
            return;
        }
        let event = if let Some(error) = job.error.take() {
            Event::Failed(slab, error)
        } else if job.waiting.is_empty() {
            Event::Full(slab)
        } else if job.dropped {
            Event::Dropped(slab)
        } else {
            return;
        };
        let priority = job.priority as usize;
        self.waiting_bytes -= job.waiting.iter().map(Waiting::len).sum::<u64>();
        self.jobs[slab.index()] = None;
        self.queues[priority].retain(|s| *s != slab);
        events.push(event);
    }

    /// Drops everything that waits, of every slab.
    pub fn drop_all(&mut self, events: &mut Vec<Event>) {
        for slab in 0..self.jobs.len() {
            self.drop_waiting(SlabId(slab as u32), events);
        }
    }
}

/// The copies of a file that may be read: those that have not failed for this chunk. A copy that failed before is used only
/// when every other has failed too.
fn usable(copies: &[Route], failed: u8) -> impl Iterator<Item = u8> {
    let untried = move |c: usize| failed & (1 << c) == 0;
    let healthy_left = (0..copies.len()).any(|c| untried(c) && !copies[c].failed);
    (0..copies.len())
        .filter(move |&c| untried(c) && (!copies[c].failed || !healthy_left))
        .map(|c| c as u8)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::extent::{Layout, Range};
    use crate::file::File;
    use crate::replica::DirectMode;

    const FILE_BYTES: u64 = 300_001;
    const NOW: Duration = Duration::ZERO;

    /// `files` files of `copies` copies each; nothing here reads them.
    fn files(files: usize, copies: usize) -> Files {
        let temp = tempfile::NamedTempFile::new().unwrap();
        temp.as_file().set_len(FILE_BYTES).unwrap();
        let file = Arc::new(File::open(temp.path()).unwrap());
        let copies = (0..copies)
            .map(|source| Replica {
                file: file.clone(),
                source,
            })
            .collect();
        Files::new(vec![copies; files], DirectMode::Off).unwrap()
    }

    fn chunks(ranges: &[(u32, u64, u64, u8)], chunk: u64) -> (Layout, Vec<Chunk>) {
        let ranges: Vec<Range> = ranges
            .iter()
            .map(|&(file, offset, len, part)| Range {
                file,
                offset,
                len,
                part,
            })
            .collect();
        let layout = Layout::new(&ranges, 4096).unwrap();
        let chunks = layout.chunks(chunk, 4096);
        (layout, chunks)
    }

    fn ok(op: Op) -> Completion {
        Completion {
            id: op.id,
            result: Ok(op.len.min(FILE_BYTES - op.offset)),
        }
    }

    fn failed(op: Op, errno: i32) -> Completion {
        Completion {
            id: op.id,
            result: Err(io::Error::from_raw_os_error(errno)),
        }
    }

    #[test]
    fn demand_goes_before_speculation() {
        let mut s = Scheduler::new(
            3,
            &files(1, 1),
            Window {
                bytes: u64::MAX,
                reads: 10,
            },
        );
        let mut events = Vec::new();
        let (_, c) = chunks(&[(0, 0, 8192, 0)], 4096);
        s.push(SlabId(0), Priority::Speculative, &c, &mut events);
        s.push(SlabId(1), Priority::Demand, &c, &mut events);
        s.push(SlabId(2), Priority::Speculative, &c, &mut events);
        s.promote(SlabId(2));
        let order: Vec<u32> = std::iter::from_fn(|| s.next(NOW))
            .map(|op| op.slab.0)
            .collect();
        assert_eq!(order, [1, 1, 2, 2, 0, 0]);
    }

    #[test]
    fn the_window_bounds_what_a_drive_has() {
        let mut s = Scheduler::new(
            1,
            &files(1, 1),
            Window {
                bytes: 3 * 4096,
                reads: 10,
            },
        );
        let (_, c) = chunks(&[(0, 0, 20 * 4096, 0)], 4096);
        s.push(SlabId(0), Priority::Demand, &c, &mut Vec::new());
        let ops: Vec<Op> = std::iter::from_fn(|| s.next(NOW)).collect();
        assert_eq!(ops.len(), 3);
        s.complete(ok(ops[1]), NOW, &mut Vec::new());
        assert!(s.next(NOW).is_some());
        assert!(s.next(NOW).is_none());
    }

    #[test]
    fn dropped_work_never_reaches_a_drive() {
        let mut s = Scheduler::new(
            1,
            &files(1, 1),
            Window {
                bytes: 4096,
                reads: 1,
            },
        );
        let mut events = Vec::new();
        let (_, c) = chunks(&[(0, 0, 4 * 4096, 0)], 4096);
        s.push(SlabId(0), Priority::Speculative, &c, &mut events);
        let op = s.next(NOW).unwrap();
        events.clear();
        s.drop_waiting(SlabId(0), &mut events);
        assert!(events.is_empty(), "a read is still writing into the slab");
        s.complete(ok(op), NOW, &mut events);
        assert!(matches!(events[..], [Event::Dropped(SlabId(0))]));
        assert!(s.next(NOW).is_none());
        assert!(s.is_idle());
    }

    #[test]
    fn dropped_work_that_is_wanted_again_goes_on() {
        let mut s = Scheduler::new(
            1,
            &files(1, 1),
            Window {
                bytes: 4096,
                reads: 1,
            },
        );
        let mut events = Vec::new();
        let (_, c) = chunks(&[(0, 0, 3 * 4096, 0)], 4096);
        s.push(SlabId(0), Priority::Speculative, &c, &mut events);
        let op = s.next(NOW).unwrap();
        s.drop_waiting(SlabId(0), &mut events);
        s.promote(SlabId(0));
        s.complete(ok(op), NOW, &mut events);
        let mut reads = 1;
        while let Some(op) = s.next(NOW) {
            reads += 1;
            s.complete(ok(op), NOW, &mut events);
        }
        assert_eq!(reads, 3, "each chunk is read once");
        assert!(matches!(
            events[..],
            [Event::Part(_, 1), Event::Part(_, 0), Event::Full(_)]
        ));
    }

    #[test]
    fn a_failing_copy_is_replaced_and_then_avoided() {
        let mut s = Scheduler::new(
            1,
            &files(1, 2),
            Window {
                bytes: 4096,
                reads: 1,
            },
        );
        let mut events = Vec::new();
        let (_, c) = chunks(&[(0, 0, 3 * 4096, 0)], 4096);
        s.push(SlabId(0), Priority::Demand, &c, &mut events);
        let op = s.next(NOW).unwrap();
        s.complete(failed(op, libc::EIO), NOW, &mut events);
        let mut copies = vec![op.copy];
        while let Some(op) = s.next(NOW) {
            copies.push(op.copy);
            s.complete(ok(op), NOW, &mut events);
        }
        assert_eq!(copies, [0, 1, 1, 1]);
        assert!(matches!(events.last(), Some(Event::Full(_))));
        assert_eq!(s.stats.sources[0].errors, 1);
    }

    /// Fails the first read of file 0, lets everything else succeed, and returns which copies of file 1 were read.
    fn copies_of_the_second_file(error: io::Error) -> Vec<u8> {
        let window = Window {
            bytes: 4096,
            reads: 1,
        };
        let mut s = Scheduler::new(2, &files(2, 2), window);
        let mut events = Vec::new();
        for file in 0..2 {
            let (_, c) = chunks(&[(file, 0, 2 * 4096, 0)], 4096);
            s.push(SlabId(file), Priority::Demand, &c, &mut events);
        }
        let mut first = Some(error);
        let mut copies = Vec::new();
        while let Some(op) = s.next(NOW) {
            if op.file == 1 {
                copies.push(op.copy);
            }
            let result = match first.take() {
                Some(error) => Err(error),
                None => Ok(op.len),
            };
            s.complete(Completion { id: op.id, result }, NOW, &mut events);
        }
        assert!(s.is_idle());
        copies
    }

    #[test]
    fn a_drive_that_fails_is_avoided_for_all_its_files() {
        let broken = io::Error::from_raw_os_error(libc::EIO);
        assert_eq!(copies_of_the_second_file(broken), [1, 1]);
        let truncated = io::ErrorKind::UnexpectedEof.into();
        assert_eq!(copies_of_the_second_file(truncated), [0, 0]);
    }

    #[test]
    fn a_wait_is_never_longer_than_the_drive_with_the_fewest_reads() {
        let window = Window {
            bytes: u64::MAX,
            reads: 10,
        };
        let mut s = Scheduler::new(1, &files(1, 1), window);
        assert_eq!(s.fewest_in_flight(), 1);
        let (_, c) = chunks(&[(0, 0, 3 * 4096, 0)], 4096);
        s.push(SlabId(0), Priority::Demand, &c, &mut Vec::new());
        while s.next(NOW).is_some() {}
        assert_eq!(s.fewest_in_flight(), 3);
    }

    #[test]
    fn the_last_copys_failure_is_an_error_when_nothing_writes_any_more() {
        let mut s = Scheduler::new(
            1,
            &files(1, 1),
            Window {
                bytes: u64::MAX,
                reads: 2,
            },
        );
        let mut events = Vec::new();
        let (_, c) = chunks(&[(0, 0, 4 * 4096, 1)], 4096);
        s.push(SlabId(0), Priority::Demand, &c, &mut events);
        events.clear();
        let (a, b) = (s.next(NOW).unwrap(), s.next(NOW).unwrap());
        s.complete(failed(a, libc::EIO), NOW, &mut events);
        assert!(
            events.is_empty(),
            "the other read is still writing into the slab"
        );
        assert!(s.next(NOW).is_none(), "the rest is pointless");
        s.complete(ok(b), NOW, &mut events);
        match &events[..] {
            [Event::Failed(SlabId(0), e)] => {
                assert_eq!((e.file, e.offset, e.len), (0, 0, 4096));
                assert_eq!(e.source.raw_os_error(), Some(libc::EIO));
            }
            other => panic!("{other:?}"),
        }
        assert!(s.is_idle());
    }

    #[test]
    fn a_truncated_file_is_an_error() {
        let mut s = Scheduler::new(1, &files(1, 1), Window::default());
        let mut events = Vec::new();
        let (_, c) = chunks(&[(0, 290_000, 10_001, 1)], 1 << 20);
        s.push(SlabId(0), Priority::Demand, &c, &mut events);
        let op = s.next(NOW).unwrap();
        s.complete(
            Completion {
                id: op.id,
                result: Ok(4096),
            },
            NOW,
            &mut events,
        );
        assert!(!s.is_idle(), "the rest of a short read waits");
        let op = s.next(NOW).unwrap();
        s.complete(
            Completion {
                id: op.id,
                result: Ok(0),
            },
            NOW,
            &mut events,
        );
        assert!(matches!(events.last(), Some(Event::Failed(..))));
    }

    /// Reads batches one after the other from drives of these speeds (MiB/s), each of which does one read at a time and has a copy
    /// of everything, and returns how long the last batch took, as a multiple of the shortest possible time.
    fn batches(speeds: &[f64], chunk: u64, chunks_in_batch: u64, batches: usize) -> f64 {
        let window = Window::default();
        let mut s = Scheduler::new(1, &files(1, speeds.len()), window);
        s.drives = (0..speeds.len() as u64)
            .map(|n| Drive::new(n, window))
            .collect();
        for (drive, route) in s.files[0].iter_mut().enumerate() {
            route.drive = drive;
        }
        let mut now = 0.0;
        let mut batch_time = 0.0;
        // Of each drive: when it will have done everything that it has, and what that is.
        let mut free_at = vec![0.0; speeds.len()];
        let mut at_drives: Vec<(f64, Op)> = Vec::new();
        let chunks: Vec<Chunk> = (0..chunks_in_batch)
            .map(|n| Chunk {
                file: 0,
                offset: n * chunk,
                len: chunk,
                at: n * chunk,
                payload: [chunk, 0],
            })
            .collect();
        for _ in 0..batches {
            let begin = now;
            let mut events = Vec::new();
            s.push(SlabId(0), Priority::Demand, &chunks, &mut events);
            loop {
                while let Some(op) = s.next(Duration::from_secs_f64(now)) {
                    let drive = op.copy as usize;
                    let took = op.len as f64 / speeds[drive] / f64::from(1 << 20);
                    free_at[drive] = now.max(free_at[drive]) + took;
                    at_drives.push((free_at[drive], op));
                }
                let Some(i) =
                    (0..at_drives.len()).min_by(|&a, &b| at_drives[a].0.total_cmp(&at_drives[b].0))
                else {
                    break;
                };
                let (end, op) = at_drives.swap_remove(i);
                now = end;
                let ended = Completion {
                    id: op.id,
                    result: Ok(op.len),
                };
                s.complete(ended, Duration::from_secs_f64(now), &mut events);
            }
            assert!(s.is_idle() && s.waiting_bytes == 0);
            batch_time = now - begin;
        }
        let mib = (chunk * chunks_in_batch) as f64 / f64::from(1 << 20);
        batch_time / (mib / speeds.iter().sum::<f64>())
    }

    #[test]
    fn a_batch_that_fits_into_one_window_is_spread_over_all_drives() {
        const MIB: u64 = 1 << 20;
        assert!(batches(&[400.0, 400.0], 2 * MIB, 8, 1) < 1.01);
        assert!(batches(&[400.0; 4], 2 * MIB, 12, 1) < 1.01);
        // Small reads, far from any window.
        assert!(batches(&[400.0; 4], 16 << 10, 12, 1) < 1.01);
    }

    #[test]
    fn a_slow_drive_does_not_hold_the_end_of_a_batch() {
        const MIB: u64 = 1 << 20;
        // Two experts' chunks and eight experts', once the speeds are known. A chunk is 10 ms of the slow drive.
        for (chunks, most) in [(20, 1.25), (80, 1.1)] {
            for speeds in [&[600.0, 200.0][..], &[200.0, 600.0], &[400.0, 50.0, 400.0]] {
                let ratio = batches(speeds, 2 * MIB, chunks, 12);
                assert!(ratio < most, "{speeds:?} {chunks}: {ratio}");
            }
        }
    }

    proptest! {
        /// Whatever fails, comes short or is dropped, in whatever order reads end: every slab ends exactly once, a full
        /// slab has had every byte written, and nothing is written after the end.
        #[test]
        fn every_slab_ends_once(
            jobs in prop::collection::vec(
                (prop::collection::vec((0u32..2, 0u64..200_000, 1u64..100_000, 0u8..2), 1..4), any::<bool>()), 1..6),
            dice in prop::collection::vec((0u8..12, any::<prop::sample::Index>()), 400),
            copies in 1usize..4,
            chunk in 1u64..60_000,
        ) {
            let mut s = Scheduler::new(jobs.len(), &files(2, copies), Window { bytes: 100_000, reads: 4 });
            let mut events = Vec::new();
            let mut layouts = Vec::new();
            for (i, (ranges, speculative)) in jobs.iter().enumerate() {
                let (layout, c) = chunks(ranges, chunk);
                layouts.push(layout);
                let priority = if *speculative { Priority::Speculative } else { Priority::Demand };
                s.push(SlabId(i as u32), priority, &c, &mut events);
            }
            let mut ended = vec![0; jobs.len()];
            let mut written: Vec<std::collections::HashSet<u64>> = vec![Default::default(); jobs.len()];
            let mut at_device: Vec<Op> = Vec::new();
            let mut dice = dice.iter().cycle();
            loop {
                while let Some(op) = s.next(NOW) {
                    prop_assert_eq!(ended[op.slab.index()], 0);
                    at_device.push(op);
                }
                if at_device.is_empty() {
                    break;
                }
                let (throw, which) = dice.next().unwrap();
                if *throw == 0 {
                    s.drop_waiting(SlabId(which.index(jobs.len()) as u32), &mut events);
                }
                if *throw == 1 {
                    s.promote(SlabId(which.index(jobs.len()) as u32));
                }
                let op = at_device.swap_remove(which.index(at_device.len()));
                let all = op.len.min(FILE_BYTES.saturating_sub(op.offset));
                let result = match throw {
                    2 => Err(io::Error::from_raw_os_error(libc::EIO)),
                    3 => Err(io::Error::from_raw_os_error(libc::EINTR)),
                    4 | 5 if all > 4096 => Ok(4096 + (all - 4096) / 2),
                    _ => Ok(all),
                };
                if let Ok(n) = result {
                    written[op.slab.index()].extend((0..n).step_by(512).map(|b| op.at + b));
                }
                s.complete(Completion { id: op.id, result }, NOW, &mut events);
                for event in events.drain(..) {
                    match event {
                        Event::Part(slab, part) => {
                            let layout = &layouts[slab.index()];
                            for (range, place) in layout.ranges.iter().zip(&layout.places) {
                                let bytes = *place..place + range.len;
                                let complete = bytes.step_by(512).chain([place + range.len - 1])
                                    .all(|b| written[slab.index()].contains(&(b / 512 * 512)));
                                prop_assert!(range.part != part || complete);
                            }
                        }
                        Event::Full(slab) | Event::Dropped(slab) | Event::Failed(slab, _) => {
                            ended[slab.index()] += 1;
                            prop_assert!(at_device.iter().all(|op| op.slab != slab));
                        }
                    }
                }
            }
            prop_assert!(s.is_idle());
            prop_assert!(ended.iter().all(|n| *n == 1), "{:?}", ended);
        }
    }
}
