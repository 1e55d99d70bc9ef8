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

impl Priority {
    /// Reads of this priority may fill a `1 / share` of a drive's window. A demand that comes up waits until what is at the
    /// drive has been read, so speculation gets a quarter: against a full window of guesses, decoding with
    /// guesses went from 0.6 to 0.96 times the speed without.
    fn share(self) -> u64 {
        match self {
            Priority::Demand => 1,
            Priority::Speculative => 4,
        }
    }
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

/// A chunk that is not at a device, or its unread rest.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    chunk: Chunk,
    /// Bytes of it that are in already, a multiple of the alignment.
    done: u64,
    /// Bit i: copy i has failed to read it.
    failed: u32,
    /// How often it was interrupted without progress.
    interrupted: u16,
}

/// A read that a device has.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    slab: SlabId,
    waiting: Waiting,
    copy: u8,
    direct: bool,
    drive: usize,
    since: Duration,
}

/// How often a read may be interrupted (EINTR, EAGAIN, less than an aligned block) before that counts as a failure.
const MAX_INTERRUPTIONS: u16 = 100;

/// Decides which chunk goes to which drive next, and keeps the books of every slab being filled.
#[derive(Debug)]
pub struct Scheduler {
    /// For each file, its copies.
    files: Vec<Vec<Route>>,
    drives: Vec<Drive>,
    jobs: Vec<Option<Job>>,
    /// Slabs with waiting chunks, first come first served, by [`Priority`].
    queues: [VecDeque<SlabId>; 2],
    flights: Vec<Option<InFlight>>,
    free_ids: Vec<u32>,
    align: u64,
    /// A refused O_DIRECT read is an error.
    direct_only: bool,
    /// Statistics of everything that completed.
    pub(crate) stats: Stats,
}

impl Scheduler {
    /// A scheduler for `slabs` slabs and reads of `files`; each drive gets a `window`.
    pub fn new(slabs: usize, files: &Files, window: Window) -> Scheduler {
        let mut drives: Vec<Drive> = Vec::new();
        let mut drive_of = |id: u64| {
            drives.iter().position(|d| d.id == id).unwrap_or_else(|| {
                drives.push(Drive {
                    id,
                    window,
                    reads_in_flight: 0,
                    bytes_in_flight: 0,
                });
                drives.len() - 1
            })
        };
        let mut route = |(replica, direct): (&Replica, &bool)| Route {
            replica: replica.clone(),
            drive: drive_of(replica.drive),
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
            flights: Vec::new(),
            free_ids: Vec::new(),
            align: files.align(),
            direct_only: files.direct_only(),
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
                interrupted: 0,
            })
            .collect();
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

    /// The next read for a drive, if it has room and there is one that it has a copy for.
    pub fn next(&mut self, drive: usize, now: Duration) -> Option<Op> {
        for priority in [Priority::Demand, Priority::Speculative] {
            if !self.drives[drive].has_room(priority.share()) {
                return None;
            }
            for q in 0..self.queues[priority as usize].len() {
                let slab = self.queues[priority as usize][q];
                let job = self.jobs[slab.index()]
                    .as_mut()
                    .expect("queued slabs are being filled");
                if job.dropped || job.error.is_some() {
                    continue;
                }
                let files = &self.files;
                let found = job.waiting.iter().enumerate().find_map(|(w, waiting)| {
                    let copy = copy_on(&files[waiting.chunk.file as usize], waiting.failed, drive)?;
                    Some((w, copy))
                });
                let Some((w, copy)) = found else { continue };
                let waiting = job.waiting.remove(w).expect("just found");
                job.in_flight += 1;
                if job.waiting.is_empty() {
                    self.queues[priority as usize].remove(q);
                }
                let route = &self.files[waiting.chunk.file as usize][copy as usize];
                let direct = route.direct;
                let flight = InFlight {
                    slab,
                    waiting,
                    copy,
                    direct,
                    drive,
                    since: now,
                };
                return Some(self.launch(flight));
            }
        }
        None
    }

    fn launch(&mut self, flight: InFlight) -> Op {
        let InFlight {
            slab,
            waiting: Waiting { chunk, done, .. },
            copy,
            direct,
            drive,
            ..
        } = flight;
        self.drives[drive].reads_in_flight += 1;
        self.drives[drive].bytes_in_flight += chunk.len - done;
        let id = self.free_ids.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() as u32 - 1
        });
        self.flights[id as usize] = Some(flight);
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
        let drive = &mut self.drives[flight.drive];
        drive.reads_in_flight -= 1;
        drive.bytes_in_flight -= flight.waiting.chunk.len - flight.waiting.done;
        self.stats.record_latency(now.saturating_sub(flight.since));
        let slab = flight.slab;
        let job = self.jobs[slab.index()]
            .as_mut()
            .expect("a slab in flight is being filled");
        job.in_flight -= 1;

        let mut waiting = flight.waiting;
        let chunk = waiting.chunk;
        let copies = &mut self.files[chunk.file as usize];
        // The last aligned chunk of a file reaches past its end.
        let end = (chunk.offset + chunk.len).min(copies[0].replica.file.size());
        let wanted = end.saturating_sub(chunk.offset + waiting.done);
        let route = &mut copies[flight.copy as usize];
        let source = &mut self.stats.sources[route.replica.source];
        match outcome(ended.result, wanted, self.align) {
            Outcome::Done(n) => {
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
            }
            Outcome::Short(n) => {
                source.bytes += n;
                waiting.done += n & !(self.align - 1);
                job.waiting.push_front(waiting);
            }
            Outcome::Interrupted(_) if waiting.interrupted < MAX_INTERRUPTIONS => {
                waiting.interrupted += 1;
                job.waiting.push_front(waiting);
            }
            // Some file systems open with O_DIRECT and refuse the read.
            Outcome::Refused(e) if flight.direct && !self.direct_only => {
                if route.direct {
                    route.direct = false;
                    let path = route.replica.file.path().display();
                    tracing::warn!(
                        "{path} is read through the page cache: O_DIRECT reads fail: {e}"
                    );
                }
                job.waiting.push_front(waiting);
            }
            Outcome::Interrupted(e) | Outcome::Refused(e) | Outcome::Failed(e) => {
                self.fail(flight, e);
            }
        }
        let job = self.jobs[slab.index()]
            .as_ref()
            .expect("it ends only in finish");
        if !job.waiting.is_empty() {
            let queue = &mut self.queues[job.priority as usize];
            if !queue.contains(&slab) {
                queue.push_front(slab);
            }
        }
        self.finish(slab, events);
    }

    /// A copy could not serve a read: another one has to, or the slab fails. The copy is avoided from now on, and so is
    /// everything else from its source, unless only the file is at fault.
    fn fail(&mut self, flight: InFlight, e: io::Error) {
        let InFlight {
            slab,
            mut waiting,
            copy,
            ..
        } = flight;
        let copies = &mut self.files[waiting.chunk.file as usize];
        let route = &mut copies[copy as usize];
        let source = route.replica.source;
        self.stats.sources[source].errors += 1;
        waiting.failed |= 1 << copy;
        let error = ReadError {
            file: waiting.chunk.file,
            path: route.replica.file.path().to_owned(),
            offset: waiting.chunk.offset + waiting.done,
            len: waiting.chunk.len - waiting.done,
            source: e,
        };
        let known = std::mem::replace(&mut route.failed, true);
        let job = self.jobs[slab.index()]
            .as_mut()
            .expect("a slab in flight is being filled");
        if (0..copies.len()).all(|c| waiting.failed & (1 << c) != 0) {
            job.error.get_or_insert(error);
            return;
        }
        job.waiting.push_front(waiting);
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
    }

    /// Statistics of everything that completed.
    pub fn stats(&self) -> Stats {
        let direct = self.files.iter().flatten().all(|route| route.direct);
        Stats {
            direct,
            ..self.stats.clone()
        }
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

/// What the end of a read means.
#[derive(Debug)]
enum Outcome {
    /// All wanted bytes are in; this many were read.
    Done(u64),
    /// Some are; it goes on from the last aligned byte.
    Short(u64),
    /// Nothing useful came, for no lasting reason.
    Interrupted(io::Error),
    /// The kernel finds fault with the request itself.
    Refused(io::Error),
    /// The copy cannot serve it.
    Failed(io::Error),
}

fn outcome(result: io::Result<u64>, wanted: u64, align: u64) -> Outcome {
    match result {
        Ok(n) if n >= wanted => Outcome::Done(n),
        Ok(n) if n >= align => Outcome::Short(n),
        Ok(0) => Outcome::Failed(truncated()),
        Ok(_) => Outcome::Interrupted(truncated()),
        Err(e) => match e.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => Outcome::Interrupted(e),
            Some(libc::EINVAL) => Outcome::Refused(e),
            _ => Outcome::Failed(e),
        },
    }
}

fn truncated() -> io::Error {
    let why = "the file ended: it was truncated after it was opened";
    io::Error::new(io::ErrorKind::UnexpectedEof, why)
}

/// The copy of a file that a drive should read: one that lies on it and has not failed for this chunk. A copy
/// that failed before is used only when every other has failed too.
fn copy_on(copies: &[Route], failed: u32, drive: usize) -> Option<u8> {
    let untried = |c: usize| failed & (1 << c) == 0;
    let healthy_left = (0..copies.len()).any(|c| untried(c) && !copies[c].failed);
    (0..copies.len())
        .find(|&c| untried(c) && copies[c].drive == drive && (!copies[c].failed || !healthy_left))
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
            .map(|source| Replica::new(file.clone(), source))
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
                reads: 100,
            },
        );
        let mut events = Vec::new();
        let (_, c) = chunks(&[(0, 0, 8192, 0)], 4096);
        s.push(SlabId(0), Priority::Speculative, &c, &mut events);
        s.push(SlabId(1), Priority::Demand, &c, &mut events);
        s.push(SlabId(2), Priority::Speculative, &c, &mut events);
        s.promote(SlabId(2));
        let order: Vec<u32> = std::iter::from_fn(|| s.next(0, NOW))
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
        let ops: Vec<Op> = std::iter::from_fn(|| s.next(0, NOW)).collect();
        assert_eq!(ops.len(), 3);
        s.complete(ok(ops[1]), NOW, &mut Vec::new());
        assert!(s.next(0, NOW).is_some());
        assert!(s.next(0, NOW).is_none());
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
        let op = s.next(0, NOW).unwrap();
        events.clear();
        s.drop_waiting(SlabId(0), &mut events);
        assert!(events.is_empty(), "a read is still writing into the slab");
        s.complete(ok(op), NOW, &mut events);
        assert!(matches!(events[..], [Event::Dropped(SlabId(0))]));
        assert!(s.next(0, NOW).is_none());
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
        let op = s.next(0, NOW).unwrap();
        s.drop_waiting(SlabId(0), &mut events);
        s.promote(SlabId(0));
        s.complete(ok(op), NOW, &mut events);
        let mut reads = 1;
        while let Some(op) = s.next(0, NOW) {
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
        let op = s.next(0, NOW).unwrap();
        s.complete(failed(op, libc::EIO), NOW, &mut events);
        let mut copies = vec![op.copy];
        while let Some(op) = s.next(0, NOW) {
            copies.push(op.copy);
            s.complete(ok(op), NOW, &mut events);
        }
        assert_eq!(copies, [0, 1, 1, 1]);
        assert!(matches!(events.last(), Some(Event::Full(_))));
        assert_eq!(s.stats.sources[0].errors, 1);
    }

    #[test]
    fn a_file_system_that_refuses_direct_reads_is_read_through_the_page_cache() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("a");
        std::fs::File::create(&path)
            .unwrap()
            .set_len(FILE_BYTES)
            .unwrap();
        let file = Arc::new(File::open(&path).unwrap());
        if file.direct().is_err() {
            println!("skipped: no O_DIRECT here");
            return;
        }
        for mode in [DirectMode::Auto, DirectMode::On] {
            let files = Files::new(vec![vec![Replica::new(file.clone(), 0)]], mode).unwrap();
            let mut s = Scheduler::new(
                1,
                &files,
                Window {
                    bytes: 4096,
                    reads: 1,
                },
            );
            let mut events = Vec::new();
            let (_, c) = chunks(&[(0, 0, 2 * 4096, 0)], 4096);
            s.push(SlabId(0), Priority::Demand, &c, &mut events);
            assert!(s.stats().direct);
            let mut refusals = 0;
            while let Some(op) = s.next(0, NOW) {
                refusals += u32::from(op.direct);
                let ended = if op.direct {
                    failed(op, libc::EINVAL)
                } else {
                    ok(op)
                };
                s.complete(ended, NOW, &mut events);
            }
            assert_eq!(refusals, 1, "it is tried once");
            match mode {
                DirectMode::On => assert!(matches!(events.last(), Some(Event::Failed(..)))),
                _ => assert!(matches!(events.last(), Some(Event::Full(_))) && !s.stats().direct),
            }
        }
    }

    #[test]
    fn a_shorter_copy_is_never_taken_for_the_whole() {
        let files_of = |sizes: [u64; 2]| {
            let copy = |(source, size): (usize, u64)| {
                let temp = tempfile::NamedTempFile::new().unwrap();
                temp.as_file().set_len(size).unwrap();
                Replica::new(Arc::new(File::open(temp.path()).unwrap()), source)
            };
            let copies = sizes.into_iter().enumerate().map(copy).collect();
            Files::new(vec![copies], DirectMode::Off).unwrap()
        };
        let mut s = Scheduler::new(
            1,
            &files_of([8192, 4096]),
            Window {
                bytes: 4096,
                reads: 1,
            },
        );
        // As if the first copy had failed before.
        s.files[0][0].failed = true;
        let mut events = Vec::new();
        let (_, c) = chunks(&[(0, 4096, 4096, 0)], 4096);
        s.push(SlabId(0), Priority::Demand, &c, &mut events);
        let op = s.next(0, NOW).unwrap();
        assert_eq!(op.copy, 1);
        s.complete(
            Completion {
                id: op.id,
                result: Ok(0),
            },
            NOW,
            &mut events,
        );
        assert_eq!(s.next(0, NOW).unwrap().copy, 0);
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
        let (a, b) = (s.next(0, NOW).unwrap(), s.next(0, NOW).unwrap());
        s.complete(failed(a, libc::EIO), NOW, &mut events);
        assert!(
            events.is_empty(),
            "the other read is still writing into the slab"
        );
        assert!(s.next(0, NOW).is_none(), "the rest is pointless");
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
        let op = s.next(0, NOW).unwrap();
        s.complete(
            Completion {
                id: op.id,
                result: Ok(4096),
            },
            NOW,
            &mut events,
        );
        assert!(!s.is_idle(), "the rest of a short read waits");
        let op = s.next(0, NOW).unwrap();
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
                while let Some(op) = s.next(0, NOW) {
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
