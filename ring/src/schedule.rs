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
use crate::drive::{Drive, Window};
use crate::extent::{Chunk, PARTS};
use crate::options::Options;
use crate::pin::Pinned;
use crate::record::{ChunkRead, Record};
use crate::replica::{Files, Replica, Route, Stats};

/// Why a read is wanted. Every waiting demand read goes before every speculative one, and that before every preload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Somebody waits for it.
    Demand,
    /// It may be wanted soon.
    Speculative,
    /// It will be wanted some time, and may take what the drives have left.
    Preload,
}

impl Priority {
    const ALL: [Priority; 3] = [Priority::Demand, Priority::Speculative, Priority::Preload];
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
    /// How many slabs were pushed before it.
    number: u64,
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
    fn wait_again(&mut self, waiting: Waiting, waiting_bytes: &mut [u64; 3]) {
        waiting_bytes[self.priority as usize] += waiting.len();
        self.waiting.push_front(waiting);
    }

    /// Bytes that are not at a device.
    fn waiting_bytes(&self) -> u64 {
        self.waiting.iter().map(Waiting::len).sum()
    }
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
    direct: bool,
    drive: usize,
    priority: Priority,
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
    queues: [VecDeque<SlabId>; 3],
    /// Bytes that are not at a device, by [`Priority`].
    waiting_bytes: [u64; 3],
    /// Reads that are not demanded may fill a `1 / ahead_share` of a drive's window.
    ahead_share: u64,
    flights: Vec<Option<InFlight>>,
    free_ids: Vec<u32>,
    align: u64,
    /// A refused O_DIRECT read is an error.
    direct_only: bool,
    /// Shares that the user has pinned.
    pinned: Option<Pinned>,
    /// Statistics of everything that completed.
    pub(crate) stats: Stats,
    /// What completed, one by one, if somebody wants to see that.
    pub(crate) record: Option<Record>,
    /// Slabs pushed so far.
    pushed: u64,
}

impl Scheduler {
    /// A scheduler for `slabs` slabs and reads of `files`; each drive gets a `window`.
    pub fn new(slabs: usize, files: &Files, window: Window) -> Scheduler {
        let mut drives: Vec<Drive> = Vec::new();
        let mut drive_of = |id: u64| {
            drives.iter().position(|d| d.id == id).unwrap_or_else(|| {
                drives.push(Drive::new(id, window));
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
            waiting_bytes: [0; 3],
            ahead_share: Options::default().ahead_share,
            flights: Vec::new(),
            free_ids: Vec::new(),
            align: files.align(),
            direct_only: files.direct_only(),
            pinned: files.weights.clone().map(Pinned::new),
            stats: Stats::new(sources),
            record: None,
            pushed: 0,
        }
    }

    /// From now on a window is sought for each drive within `bounds` (bytes, both included) while it works.
    pub fn search_windows(&mut self, bounds: (u64, u64)) {
        for drive in &mut self.drives {
            drive.search(bounds);
        }
    }

    /// From now on every chunk is recorded, up to `room` of them.
    pub(crate) fn record(&mut self, room: usize) {
        self.record = Some(Record::new(room));
    }

    /// From now on, reads that are not demanded may fill a `1 / share` of a drive's window.
    pub(crate) fn share_ahead(&mut self, share: u64) {
        self.ahead_share = share.max(1);
    }

    /// Number of drives.
    pub fn drives(&self) -> usize {
        self.drives.len()
    }

    /// The most reads that can be at the devices at once.
    pub fn max_in_flight(&self) -> usize {
        self.drives.iter().map(|d| d.window.reads).sum()
    }

    /// Whether no drive has room for anything.
    pub(crate) fn all_full(&self) -> bool {
        !self.drives.iter().any(|drive| drive.has_room(1))
    }

    /// Whether a drive may get a read of this priority now.
    fn has_room(&self, drive: &Drive, priority: Priority) -> bool {
        match priority {
            Priority::Demand => drive.has_room(1) && !self.keeps_back(drive),
            Priority::Speculative | Priority::Preload => drive.has_room(self.ahead_share),
        }
    }

    /// Whether a drive has to end some of what it has before it gets the last demands. There are drives that end nothing before they have done
    /// all that they were given; then everything else can be computed while the last demands are read. A drive that ends its reads one
    /// by one loses nothing: what it has left is enough to do.
    fn keeps_back(&self, drive: &Drive) -> bool {
        /// The last demands are this part of a window.
        const LAST: u64 = 4;
        let last = drive.window.bytes / LAST;
        let (has, waiting) = (
            drive.bytes_in_flight,
            self.waiting_bytes[Priority::Demand as usize],
        );
        has >= last && waiting <= last && has + waiting > 2 * last
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

    /// Whether there are demands that are not at a device.
    pub(crate) fn demands_wait(&self) -> bool {
        self.waiting_bytes[Priority::Demand as usize] > 0
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
        self.waiting_bytes[priority as usize] += chunks.iter().map(|chunk| chunk.len).sum::<u64>();
        self.jobs[slab.index()] = Some(Job {
            number: self.pushed,
            priority,
            waiting,
            in_flight: 0,
            missing,
            dropped: false,
            error: None,
        });
        self.pushed += 1;
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
        if job.priority != Priority::Demand {
            let before = std::mem::replace(&mut job.priority, Priority::Demand);
            let bytes = job.waiting_bytes();
            self.waiting_bytes[before as usize] -= bytes;
            self.waiting_bytes[Priority::Demand as usize] += bytes;
            self.queues[before as usize].retain(|s| *s != slab);
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
        for priority in Priority::ALL {
            if !self
                .drives
                .iter()
                .any(|drive| self.has_room(drive, priority))
            {
                return None;
            }
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
                    .find_map(|(w, waiting)| Some((w, self.choose(waiting, priority, now)?)));
                let Some((w, copy)) = found else { continue };
                let job = self.jobs[slab.index()].as_mut().expect("just found");
                let waiting = job.waiting.remove(w).expect("just found");
                self.waiting_bytes[priority as usize] -= waiting.len();
                job.in_flight += 1;
                if job.waiting.is_empty() {
                    self.queues[priority as usize].remove(q);
                }
                let route = &self.files[waiting.chunk.file as usize][copy as usize];
                let (direct, drive) = (route.direct, route.drive);
                let flight = InFlight {
                    slab,
                    waiting,
                    copy,
                    direct,
                    drive,
                    priority,
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
    fn choose(&self, waiting: &Waiting, priority: Priority, now: Duration) -> Option<u8> {
        let len = waiting.len();
        let copies = &self.files[waiting.chunk.file as usize];
        if let Some(pinned) = &self.pinned {
            let source = |copy: u8| copies[copy as usize].replica.source;
            let room =
                |copy: u8| self.has_room(&self.drives[copies[copy as usize].drive], priority);
            let weighted =
                || usable(copies, waiting.failed).filter(|c| pinned.weight(source(*c)) > 0);
            // Where only fallbacks are left, the first to finish serves, as without pins.
            if weighted().next().is_some() {
                return pinned.choose(weighted().map(|c| (c, source(c), room(c))));
            }
        }
        let mut best: Option<(f64, u8)> = None;
        let (mut full_bytes, mut full_speed, mut full_first) = (0.0, 0.0, f64::INFINITY);
        for copy in usable(copies, waiting.failed) {
            let drive = &self.drives[copies[copy as usize].drive];
            let speed = self.speed(drive, now);
            let end = (drive.bytes_in_flight + len) as f64 / speed;
            if !self.has_room(drive, priority) {
                full_bytes += drive.bytes_in_flight as f64;
                full_speed += speed;
                full_first = end.min(full_first);
            } else if best.is_none_or(|(other, _)| end < other) {
                best = Some((end, copy));
            }
        }
        let (end, copy) = best?;
        let waiting_bytes: u64 = self.waiting_bytes.iter().sum();
        let helps = end <= full_first || end <= (full_bytes + waiting_bytes as f64) / full_speed;
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
            waiting: Waiting { chunk, done, .. },
            copy,
            direct,
            drive,
            ..
        } = flight;
        self.drives[drive].launch(chunk.len - done, flight.since);
        if let Some(pinned) = &mut self.pinned {
            let route = &self.files[chunk.file as usize][copy as usize];
            pinned.ask(route.replica.source, chunk.len - done);
        }
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
        let flight_bytes = flight.waiting.len();
        self.drives[flight.drive].complete(flight_bytes, now);
        self.stats.record_latency(now.saturating_sub(flight.since));
        let slab = flight.slab;
        let job = self.jobs[slab.index()]
            .as_mut()
            .expect("a slab in flight is being filled");
        job.in_flight -= 1;
        let number = job.number;

        let mut waiting = flight.waiting;
        let chunk = waiting.chunk;
        let copies = &mut self.files[chunk.file as usize];
        // The last aligned chunk of a file reaches past its end.
        let end = (chunk.offset + chunk.len).min(copies[0].replica.file.size());
        let wanted = end.saturating_sub(chunk.offset + waiting.done);
        let route = &mut copies[flight.copy as usize];
        let source_index = route.replica.source;
        let source = &mut self.stats.sources[source_index];
        let before = source.bytes;
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
                job.wait_again(waiting, &mut self.waiting_bytes);
            }
            Outcome::Interrupted(_) if waiting.interrupted < MAX_INTERRUPTIONS => {
                waiting.interrupted += 1;
                job.wait_again(waiting, &mut self.waiting_bytes);
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
                job.wait_again(waiting, &mut self.waiting_bytes);
            }
            Outcome::Interrupted(e) | Outcome::Refused(e) | Outcome::Failed(e) => {
                self.fail(flight, e);
            }
        }
        let came = self.stats.sources[source_index].bytes - before;
        if let Some(record) = &mut self.record {
            record.push(ChunkRead {
                read: number,
                begin: flight.since,
                end: now,
                bytes: came,
                source: source_index as u32,
                priority: flight.priority,
                parts: chunk.payload.map(|payload| payload > 0),
            });
        }
        if let Some(pinned) = &mut self.pinned {
            pinned.take_back(source_index, flight_bytes.saturating_sub(came));
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
    }

    /// Statistics of everything that completed.
    pub fn stats(&self) -> Stats {
        let direct = self.files.iter().flatten().all(|route| route.direct);
        Stats {
            direct,
            windows: self.drives.iter().map(|drive| drive.window.bytes).collect(),
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
        self.waiting_bytes[priority] -= job.waiting_bytes();
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

/// The copies of a file that may be read: those that have not failed for this chunk. A copy that failed before is used only
/// when every other has failed too.
fn usable(copies: &[Route], failed: u32) -> impl Iterator<Item = u8> {
    let untried = move |c: usize| failed & (1 << c) == 0;
    let healthy_left = (0..copies.len()).any(|c| untried(c) && !copies[c].failed);
    (0..copies.len())
        .filter(move |&c| untried(c) && (!copies[c].failed || !healthy_left))
        .map(|c| c as u8)
}

#[cfg(test)]
mod tests;
