//! Schedules reads without I/O: which chunk goes to which drive next.
//!
//! A read that the kernel has taken cannot be cancelled, so waiting chunks stay here, by priority, and each drive gets only as
//! much as its window holds. A drive with capacity takes the next chunk of any file that it has a copy of: drives of unequal
//! speed get work in proportion to their speed, without configuration.

mod fleet;
mod job;
mod outcome;
mod probes;
mod routes;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use crate::arena::SlabId;
pub use crate::device::{Completion, Op};
use crate::drive::{Drive, Window};
use crate::event::{Event, Priority, ReadError};
use crate::extent::Chunk;
use crate::record::{ChunkRead, Record};
use crate::replica::{Access, Files, Replica};
use crate::stats::Stats;
use fleet::Fleet;
use job::{InFlight, Job, Waiting};
use outcome::{Outcome, outcome};
pub(crate) use probes::Probes;
use routes::Route;

/// How often a read may be interrupted (EINTR, EAGAIN, less than an aligned block) before that counts as a failure.
const MAX_INTERRUPTIONS: u16 = 100;

/// Decides which chunk goes to which drive next, and tracks every slab that is being filled.
#[derive(Debug)]
pub struct Scheduler {
    /// For each file, its copies.
    files: Vec<Vec<Route>>,
    fleet: Fleet,
    /// By slab.
    jobs: Vec<Option<Job>>,
    /// Slabs with waiting chunks, first come first served, by [`Priority`].
    queues: [VecDeque<SlabId>; 3],
    /// By the id of the op.
    flights: Vec<Option<InFlight>>,
    free_ids: Vec<u32>,
    align: u64,
    pub(crate) stats: Stats,
    pub(crate) record: Option<Record>,
    /// Slabs pushed so far.
    pushed: u64,
    probes: Option<Probes>,
}

impl Scheduler {
    /// A scheduler for `slabs` slabs and reads of `files`; each drive starts with `window`.
    pub fn new(slabs: usize, files: &Files, window: Window) -> Scheduler {
        let mut drives: Vec<Drive> = Vec::new();
        let mut drive_of = |id: u64| {
            drives.iter().position(|d| d.id == id).unwrap_or_else(|| {
                drives.push(Drive::new(id, window));
                drives.len() - 1
            })
        };
        let mut route = |(replica, access): (&Replica, &Access)| Route {
            replica: replica.clone(),
            drive: drive_of(replica.drive),
            access: *access,
            failed: false,
        };
        let routes: Vec<Vec<Route>> = files
            .replicas
            .iter()
            .zip(&files.access)
            .map(|(copies, access)| copies.iter().zip(access).map(&mut route).collect())
            .collect();
        let sources = files
            .replicas
            .iter()
            .flatten()
            .map(|r| r.source + 1)
            .max()
            .unwrap_or(0);
        Scheduler {
            fleet: Fleet::new(drives, &routes, files.weights.clone()),
            files: routes,
            jobs: (0..slabs).map(|_| None).collect(),
            queues: Default::default(),
            flights: Vec::new(),
            free_ids: Vec::new(),
            align: files.align(),
            stats: Stats::new(sources),
            record: None,
            pushed: 0,
            probes: None,
        }
    }

    /// Number of drives.
    pub(crate) fn drives(&self) -> usize {
        self.fleet.drives.len()
    }

    /// Whether it has to choose between drives by their speed.
    pub(crate) fn needs_probes(&self) -> bool {
        self.fleet.drives.iter().any(|drive| drive.measured)
    }

    /// How many drives read a fair part of what is read; updated by every read.
    pub(crate) fn serving(&self) -> Arc<AtomicUsize> {
        self.fleet.serving.clone()
    }

    /// Starts the search for the window of each drive within `bounds` (bytes, both included).
    pub(crate) fn search_windows(&mut self, bounds: (u64, u64)) {
        for drive in &mut self.fleet.drives {
            drive.search(bounds);
        }
    }

    /// Records the chunks from now on, up to `capacity` of them.
    pub(crate) fn record(&mut self, capacity: usize) {
        self.record = Some(Record::new(capacity));
    }

    /// Prefetches and preloads may fill a `1 / share` of a drive's window from now on.
    pub(crate) fn set_prefetch_share(&mut self, share: u64) {
        self.fleet.prefetch_share = share.max(1);
    }

    /// The most reads that the drives have at once.
    pub(crate) fn max_in_flight(&self) -> usize {
        self.fleet.drives.iter().map(|d| d.window.reads).sum()
    }

    /// Whether no drive has capacity for anything.
    pub(crate) fn all_full(&self) -> bool {
        !self.fleet.drives.iter().any(|drive| drive.has_capacity(1))
    }

    /// Reads that the drives have now.
    pub(crate) fn in_flight(&self) -> usize {
        self.fleet.drives.iter().map(|d| d.reads_in_flight).sum()
    }

    /// Reads of the busy drive that has the fewest; 1 if all are idle.
    pub(crate) fn fewest_in_flight(&self) -> usize {
        let busy = self.fleet.drives.iter().map(|d| d.reads_in_flight);
        busy.filter(|n| *n > 0).min().unwrap_or(1)
    }

    /// Whether a demand waits for a drive.
    pub(crate) fn demands_wait(&self) -> bool {
        self.fleet.waiting_bytes[Priority::Demand as usize] > 0
    }

    /// Reads of demands that the drives have now.
    pub(crate) fn demands_in_flight(&self) -> usize {
        let demanded = |flight: &&InFlight| {
            // The slabs of probes have no jobs.
            let job = self.jobs.get(flight.slab.index()).and_then(Option::as_ref);
            job.is_some_and(|job| job.priority == Priority::Demand)
        };
        self.flights.iter().flatten().filter(demanded).count()
    }

    /// Whether no drive has a read and none waits.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight() == 0 && self.queues.iter().all(VecDeque::is_empty)
    }

    /// Bytes that the drives are reading now.
    pub(crate) fn bytes_in_flight(&self) -> u64 {
        self.fleet.drives.iter().map(|d| d.bytes_in_flight).sum()
    }

    /// Queues the `chunks` of a slab, which are read in this order. The slab must not be being filled.
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
        let job = Job::new(self.pushed, priority, chunks);
        for (part, _) in job.missing.iter().enumerate().filter(|(_, m)| **m == 0) {
            events.push(Event::Part(slab, part as u8));
        }
        self.fleet.waiting_bytes[priority as usize] += job.waiting_bytes();
        self.jobs[slab.index()] = Some(job);
        self.pushed += 1;
        self.queues[priority as usize].push_back(slab);
        self.finish(slab, events);
    }

    /// Turns a read into a demand: it goes to the end of the demand queue. Reverts a [`Scheduler::drop_waiting`] that has not
    /// ended yet.
    pub fn promote(&mut self, slab: SlabId) {
        let Some(job) = &mut self.jobs[slab.index()] else {
            return;
        };
        job.dropped = false;
        if job.priority != Priority::Demand {
            let before = std::mem::replace(&mut job.priority, Priority::Demand);
            let bytes = job.waiting_bytes();
            self.fleet.waiting_bytes[before as usize] -= bytes;
            self.fleet.waiting_bytes[Priority::Demand as usize] += bytes;
            self.queues[before as usize].retain(|s| *s != slab);
            self.queues[Priority::Demand as usize].push_back(slab);
        }
    }

    /// Drops the chunks of a slab that no device has. The slab is free after [`Event::Dropped`], or full after [`Event::Full`] if
    /// nothing was waiting.
    pub fn drop_waiting(&mut self, slab: SlabId, events: &mut Vec<Event>) {
        if let Some(job) = &mut self.jobs[slab.index()] {
            job.dropped = true;
            self.finish(slab, events);
        }
    }

    /// The next read, if a drive has capacity for one that it has a copy for.
    pub fn next(&mut self, now: Duration) -> Option<Op> {
        self.next_waiting(now).or_else(|| self.probe(now))
    }

    fn next_waiting(&mut self, now: Duration) -> Option<Op> {
        // Bytes of chunks that are left to drives without capacity.
        let mut in_front = 0;
        for priority in Priority::ALL {
            if !self.fleet.begin(priority, in_front, now) {
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
                let found = job.waiting.iter().enumerate().find_map(|(w, waiting)| {
                    let copies = &self.files[waiting.chunk.file as usize];
                    let copy = self.fleet.choose(copies, waiting, in_front);
                    if copy.is_none() {
                        in_front += waiting.len();
                    }
                    Some((w, copy?))
                });
                let Some((w, copy)) = found else { continue };
                let job = self.jobs[slab.index()].as_mut().expect("just found");
                let waiting = job.waiting.remove(w).expect("just found");
                self.fleet.waiting_bytes[priority as usize] -= waiting.len();
                job.in_flight += 1;
                if job.waiting.is_empty() {
                    self.queues[priority as usize].remove(q);
                }
                if let Some(probes) = &mut self.probes {
                    probes.latest = Some(waiting.chunk);
                }
                let route = &self.files[waiting.chunk.file as usize][copy as usize];
                let flight = InFlight {
                    slab,
                    waiting,
                    copy,
                    direct: route.access.is_direct(),
                    drive: route.drive,
                    priority,
                    since: now,
                    probe: None,
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
        self.fleet.drives[drive].launch(chunk.len - done, flight.since);
        if let Some(shares) = &mut self.fleet.shares {
            let route = &self.files[chunk.file as usize][copy as usize];
            shares.request(route.replica.source, chunk.len - done);
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
            slab_offset: chunk.slab_offset + done,
        }
    }

    /// Takes the end of a read.
    pub fn complete(&mut self, ended: Completion, now: Duration, events: &mut Vec<Event>) {
        let flight = self.flights[ended.id as usize]
            .take()
            .expect("only what was launched ends");
        self.free_ids.push(ended.id);
        if let Some(expected) = flight.probe {
            self.end_probe(flight, expected, ended, now);
            return;
        }
        let flight_bytes = flight.waiting.len();
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
        let requested = end.saturating_sub(chunk.offset + waiting.done);
        let route = &mut copies[flight.copy as usize];
        let source_index = route.replica.source;
        let source = &mut self.stats.sources[source_index];
        let before = source.bytes;
        let outcome = outcome(ended.result, requested, self.align);
        self.fleet
            .complete(flight.drive, flight_bytes, outcome.bytes(), now);
        match outcome {
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
                self.wait_again(slab, waiting);
            }
            Outcome::Interrupted(_) if waiting.interrupted < MAX_INTERRUPTIONS => {
                waiting.interrupted += 1;
                self.wait_again(slab, waiting);
            }
            // Some file systems open with O_DIRECT and refuse the read.
            Outcome::Refused(e) if flight.direct && route.may_be_buffered() => {
                route.buffer(&e);
                self.wait_again(slab, waiting);
            }
            Outcome::Interrupted(e) | Outcome::Refused(e) | Outcome::Failed(e) => {
                self.fail(flight, e);
            }
        }
        let bytes = self.stats.sources[source_index].bytes - before;
        if let Some(record) = &mut self.record {
            record.push(ChunkRead {
                read: number,
                begin: flight.since,
                end: now,
                bytes,
                source: source_index as u32,
                priority: flight.priority,
                parts: chunk.payload.map(|payload| payload > 0),
            });
        }
        if let Some(shares) = &mut self.fleet.shares {
            shares.release(source_index, flight_bytes.saturating_sub(bytes));
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

    /// Puts a chunk or its rest back to the front of its slab.
    fn wait_again(&mut self, slab: SlabId, waiting: Waiting) {
        let job = self.jobs[slab.index()]
            .as_mut()
            .expect("a slab in flight is being filled");
        self.fleet.waiting_bytes[job.priority as usize] += waiting.len();
        job.waiting.push_front(waiting);
    }

    /// Handles a read that its copy cannot serve: another copy gets it, or the slab fails.
    fn fail(&mut self, flight: InFlight, e: io::Error) {
        let error = self.read_error(&flight, e);
        let InFlight {
            slab,
            mut waiting,
            copy,
            ..
        } = flight;
        waiting.failed |= 1 << copy;
        let copies = self.files[waiting.chunk.file as usize].len();
        if (0..copies).all(|c| waiting.failed & (1 << c) != 0) {
            self.count_failure(&error, copy);
            let job = self.jobs[slab.index()]
                .as_mut()
                .expect("a slab in flight is being filled");
            job.error.get_or_insert(error);
            return;
        }
        self.wait_again(slab, waiting);
        self.avoid(&error, copy);
    }

    fn read_error(&self, flight: &InFlight, source: io::Error) -> ReadError {
        let waiting = &flight.waiting;
        let route = &self.files[waiting.chunk.file as usize][flight.copy as usize];
        ReadError {
            file: waiting.chunk.file,
            path: route.replica.file.path().to_owned(),
            offset: waiting.chunk.offset + waiting.done,
            len: waiting.chunk.len - waiting.done,
            source,
        }
    }

    /// Counts a failure of a copy, which is avoided from now on. Returns its source, and whether it has failed before.
    fn count_failure(&mut self, error: &ReadError, copy: u8) -> (usize, bool) {
        let route = &mut self.files[error.file as usize][copy as usize];
        let source = route.replica.source;
        self.stats.sources[source].errors += 1;
        self.fleet.everywhere = false;
        (source, std::mem::replace(&mut route.failed, true))
    }

    /// Avoids a copy that has failed, and all others of its source, unless only the file is at fault.
    fn avoid(&mut self, error: &ReadError, copy: u8) {
        let (source, known) = self.count_failure(error, copy);
        // A truncated file says nothing about its neighbours; a failing drive does.
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

    /// Statistics of all reads that have ended.
    pub fn stats(&self) -> Stats {
        let direct = self
            .files
            .iter()
            .flatten()
            .all(|route| route.access.is_direct());
        Stats {
            direct,
            windows: self
                .fleet
                .drives
                .iter()
                .map(|drive| drive.window.bytes)
                .collect(),
            ..self.stats.clone()
        }
    }

    /// Ends the job of a slab if no device has a part of it and none will get one.
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
        self.fleet.waiting_bytes[priority] -= job.waiting_bytes();
        self.jobs[slab.index()] = None;
        self.queues[priority].retain(|s| *s != slab);
        events.push(event);
    }

    /// Drops the waiting chunks of every slab, and starts no more probes.
    pub(crate) fn drop_all(&mut self, events: &mut Vec<Event>) {
        self.probes = None;
        for slab in 0..self.jobs.len() {
            self.drop_waiting(SlabId(slab as u32), events);
        }
    }
}

#[cfg(test)]
mod tests;
