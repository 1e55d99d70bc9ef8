//! Tracks the states of slabs on the caller's thread, and sends reads to the scheduler and the device on the ring thread.
//!
//! A slab changes its state only here, on the thread that owns the [`Engine`]; the ring thread only sends [`Event`]s. A state
//! change needs `&mut Engine`, so a slab cannot change while a caller borrows its bytes.
//!
//! ```text
//!            read()                 last part is in               release()
//!   Free ───────────► Filling ─────────────────────────► Full ───────────────► Free
//!                        │  each part becomes readable by itself
//!                        └──── dropped or failed, when nothing is in flight ──► Free
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use crate::arena::{Arena, Class, SlabId};
use crate::command::{Command, Link};
use crate::devices;
use crate::error::EngineError;
use crate::event::{Event, Priority};
use crate::extent::{Layout, PARTS, Range};
use crate::inline::Inline;
use crate::options::Options;
use crate::record::Record;
use crate::replica::{Files, Replicas};
use crate::schedule::{Probes, Scheduler};
use crate::sim::{Clock, Sim, SimDrive};
use crate::stats::Stats;
use crate::thread::RingThread;

/// The state of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlabState {
    /// It holds nothing.
    Free,
    /// Reads write into it; the marked parts are complete.
    Filling([bool; PARTS]),
    /// All its parts are complete.
    Full,
}

#[derive(Debug)]
struct Slab {
    state: SlabState,
    /// Of the last read.
    layout: Option<Layout>,
}

impl Slab {
    const FREE: Slab = Slab {
        state: SlabState::Free,
        layout: None,
    };
}

/// Reads ranges of files into slabs.
pub struct Engine {
    // Dropping it waits for the reads in flight, which write into the arena.
    link: Box<dyn Link>,
    arena: Arc<Arena>,
    slabs: Vec<Slab>,
    /// Slabs in the state "filling". Every event belongs to one of them.
    filling: usize,
    /// Of each file; 0 without a copy.
    sizes: Vec<u64>,
    align: u64,
    chunk_bytes: u64,
    unsent: Vec<Command>,
    batch_begins: bool,
    /// Reads requested so far.
    reads: u64,
    /// See [`Engine::serving_drives`].
    serving: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("device", &self.device())
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Makes the slabs of all `classes`, numbered class after class, and starts the ring thread.
    ///
    /// # Errors
    /// [`EngineError`] when there is no memory for the slabs, or a device is not available.
    pub fn new(files: &Files, classes: &[Class], options: Options) -> Result<Engine, EngineError> {
        Engine::with_link(files, classes, options, |arena, scheduler| {
            let replicas = files.replicas.clone();
            let open =
                move |s: &Scheduler| devices::open(&replicas, &arena, s.max_in_flight(), options);
            let batch = options.batch_bytes;
            Ok(Box::new(RingThread::start(open, scheduler, batch)?))
        })
    }

    /// An engine without a ring thread, for a caller that only reads: reads start and end in [`Engine::wait`].
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn on_caller(
        files: &Files,
        classes: &[Class],
        options: Options,
    ) -> Result<Engine, EngineError> {
        Engine::with_link(files, classes, options, |arena, scheduler| {
            let capacity = scheduler.max_in_flight();
            let (name, device) = devices::open(&files.replicas, &arena, capacity, options)?;
            let batch = options.batch_bytes;
            Ok(Box::new(Inline::new(name, device, scheduler, batch, false)))
        })
    }

    /// An engine that reads nothing: `drives` are simulated on `clock`, and a copy on drive i of
    /// [`Replica::drive`](crate::Replica::drive) is read from `drives[i]`. Slabs hold zeros.
    ///
    /// # Errors
    /// When there is no memory for the slabs.
    ///
    /// # Panics
    /// When a file belongs to a drive that is not among `drives`.
    pub fn simulated(
        files: &Files,
        classes: &[Class],
        options: Options,
        drives: Vec<SimDrive>,
        clock: Clock,
    ) -> Result<Engine, EngineError> {
        let drive_of = |copies: &Replicas| copies.iter().map(|r| r.drive as usize).collect();
        let drive_of: Vec<Vec<usize>> = files.replicas.iter().map(drive_of).collect();
        assert!(
            drive_of.iter().flatten().all(|drive| *drive < drives.len()),
            "a file has a copy on a drive that is not simulated"
        );
        Engine::with_link(files, classes, options, |_, scheduler| {
            Ok(Box::new(Inline::new(
                "simulated",
                Box::new(Sim::new(drives, drive_of, clock)),
                scheduler,
                options.batch_bytes,
                true,
            )))
        })
    }

    fn with_link(
        files: &Files,
        classes: &[Class],
        options: Options,
        link: impl FnOnce(Arc<Arena>, Scheduler) -> Result<Box<dyn Link>, EngineError>,
    ) -> Result<Engine, EngineError> {
        let slabs: usize = classes.iter().map(|class| class.count).sum();
        let mut scheduler = Scheduler::new(slabs, files, options.window);
        let mut classes = classes.to_vec();
        if scheduler.needs_probes() {
            classes.push(Class {
                bytes: Probes::BYTES as usize,
                count: scheduler.drives(),
            });
            scheduler.probe_into(SlabId(slabs as u32));
        }
        let arena = Arc::new(Arena::new(&classes)?);
        scheduler.set_prefetch_share(options.prefetch_share);
        if let Some(bounds) = options.search {
            scheduler.search_windows(bounds);
        }
        if options.record > 0 {
            scheduler.record(options.record);
        }
        let serving = scheduler.serving();
        let size = |copies: &Replicas| copies.first().map_or(0, |copy| copy.file.size());
        Ok(Engine {
            link: link(arena.clone(), scheduler)?,
            slabs: (0..slabs).map(|_| Slab::FREE).collect(),
            serving,
            filling: 0,
            sizes: files.replicas.iter().map(size).collect(),
            arena,
            align: files.align(),
            chunk_bytes: options.chunk_bytes,
            unsent: Vec::new(),
            batch_begins: false,
            reads: 0,
        })
    }

    /// "uring", "pread", "uring+pread" or "simulated".
    pub fn device(&self) -> &'static str {
        self.link.device()
    }

    /// How many drives have lately read at least an eighth of what the busiest has read. The others hardly matter: slow ones, and
    /// those that have no copy of what is read. Does not wait for the ring thread.
    pub fn serving_drives(&self) -> usize {
        self.serving.load(Ordering::Relaxed)
    }

    /// Touches the memory of all slabs, so that the first reads do not: for measurements.
    pub fn populate(&self) {
        self.arena.populate();
    }

    /// Number of slabs. They are numbered from 0, class after class.
    pub fn slabs(&self) -> usize {
        self.slabs.len()
    }

    /// Whether any slab is being filled.
    pub fn is_reading(&self) -> bool {
        self.filling > 0
    }

    /// The state of a slab.
    pub fn state(&self, slab: SlabId) -> SlabState {
        self.slabs[slab.index()].state
    }

    /// Starts a batch: the reads that follow are needed together. The first completions of a batch are reported one by one, also
    /// where [`Options::batch_bytes`] saves system calls.
    pub fn begin_batch(&mut self) {
        self.batch_begins = true;
    }

    /// Requests a read of the ranges of `layout` into a free slab. It starts at the next [`Engine::flush`] or [`Engine::wait`].
    /// Returns the number of reads requested before it: its number in a [`Record`].
    ///
    /// # Panics
    /// When the slab is not free, the layout is larger than the slab, or [`Files::layout`] of other files made it.
    pub fn read(&mut self, slab: SlabId, priority: Priority, layout: Layout) -> u64 {
        assert!(
            layout.footprint() <= self.arena.slab_bytes(slab) as u64,
            "{slab:?} is too small"
        );
        assert!(
            self.serves(&layout),
            "the layout for {slab:?} belongs to other files"
        );
        let chunks = layout.chunks(self.chunk_bytes);
        let held = &mut self.slabs[slab.index()];
        assert_eq!(
            held.state,
            SlabState::Free,
            "{slab:?} is read into while it is used"
        );
        *held = Slab {
            state: SlabState::Filling([false; PARTS]),
            layout: Some(layout),
        };
        self.filling += 1;
        if std::mem::take(&mut self.batch_begins) {
            self.unsent.push(Command::BeginBatch);
        }
        self.unsent.push(Command::Push(slab, priority, chunks));
        self.reads += 1;
        self.reads - 1
    }

    /// Whether every range lies inside a file of this engine, and suits its alignment.
    fn serves(&self, layout: &Layout) -> bool {
        let inside = |range: &Range| {
            let size = self.sizes.get(range.file as usize);
            range.len == 0 || size.is_some_and(|size| range.offset + range.len <= *size)
        };
        layout.align() >= self.align && layout.ranges().iter().all(inside)
    }

    /// Turns a prefetch or preload into a demand, also one that was abandoned and has not ended. A slab that is not being filled
    /// stays as it is.
    pub fn promote(&mut self, slab: SlabId) {
        self.send_for(slab, Command::Promote(slab));
    }

    /// Drops those chunks of a read that no drive has. The slab is free after [`Event::Dropped`], or full after [`Event::Full`] if
    /// the drives had all chunks. A slab that is not being filled stays as it is.
    pub fn abandon(&mut self, slab: SlabId) {
        self.send_for(slab, Command::DropWaiting(slab));
    }

    fn send_for(&mut self, slab: SlabId, command: Command) {
        if matches!(self.state(slab), SlabState::Filling(_)) {
            self.unsent.push(command);
        }
    }

    /// Frees a full slab.
    ///
    /// # Panics
    /// When it is not full.
    pub fn release(&mut self, slab: SlabId) {
        let held = &mut self.slabs[slab.index()];
        assert_eq!(
            held.state,
            SlabState::Full,
            "{slab:?} is released while it is not full"
        );
        *held = Slab::FREE;
    }

    /// Sends the requests since the last flush to the ring thread, together.
    pub fn flush(&mut self) {
        if !self.unsent.is_empty() {
            self.link.send(&mut self.unsent);
        }
    }

    /// The next event, without waiting.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] when the device cannot go on.
    pub fn poll(&mut self) -> Result<Option<Event>, EngineError> {
        let event = self.link.receive(false)?;
        Ok(event.inspect(|event| self.apply(event)))
    }

    /// Flushes, and sleeps until the next event.
    ///
    /// # Errors
    /// [`EngineError::NothingPending`] when no slab is being filled, [`EngineError::Stopped`] when the device cannot go on.
    pub fn wait(&mut self) -> Result<Event, EngineError> {
        self.flush();
        let event = self.link.receive(self.filling > 0)?;
        let event = event.ok_or(EngineError::NothingPending)?;
        self.apply(&event);
        Ok(event)
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Part(slab, part) => match &mut self.slabs[slab.index()].state {
                SlabState::Filling(ready) => ready[*part as usize] = true,
                other => unreachable!("{slab:?} is {other:?} while it is read"),
            },
            Event::Full(slab) => {
                self.filling -= 1;
                self.slabs[slab.index()].state = SlabState::Full;
            }
            Event::Dropped(slab) | Event::Failed(slab, _) => {
                self.filling -= 1;
                self.slabs[slab.index()] = Slab::FREE;
            }
        }
    }

    /// Whether a part of a slab is complete.
    pub fn ready(&self, slab: SlabId, part: u8) -> bool {
        match self.slabs[slab.index()].state {
            SlabState::Free => false,
            SlabState::Filling(ready) => ready[part as usize],
            SlabState::Full => true,
        }
    }

    /// The bytes of the range at index `range` of the slab's layout.
    ///
    /// # Panics
    /// When the part of the range is not complete, or the layout has no such range.
    pub fn payload(&self, slab: SlabId, range: usize) -> &[u8] {
        let layout = self.slabs[slab.index()]
            .layout
            .as_ref()
            .expect("the slab is not free");
        let Range { part, len, .. } = layout.ranges()[range];
        assert!(self.ready(slab, part), "{slab:?} is used before it is read");
        // SAFETY: the part is complete, and a `Layout` puts each of its ranges inside the chunks of its part, so that all ops on
        // these bytes have ended. More come only after the slab is free, which needs `&mut self` and so the end of this borrow.
        unsafe { self.arena.borrow(slab, layout.places()[range], len) }
    }

    /// Takes the record of the chunks that have ended so far. `None` without [`Options::record`], at the second call, and when the
    /// device cannot go on.
    pub fn take_record(&mut self) -> Option<Record> {
        let (sender, receiver) = channel();
        self.unsent.push(Command::Record(sender));
        self.flush();
        receiver.recv().ok().flatten()
    }

    /// Counts of the reads so far; `None` when the device cannot go on.
    pub fn stats(&mut self) -> Option<Stats> {
        let (sender, receiver) = channel();
        self.unsent.push(Command::Stats(sender));
        self.flush();
        receiver.recv().ok()
    }
}

#[cfg(test)]
mod tests;
