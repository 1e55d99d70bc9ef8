//! The engine: slabs and their states on the caller's thread, scheduler and device on a thread of their own.
//!
//! Every state change of a slab happens here, on the thread that owns the [`Engine`]; the ring thread only sends
//! [`Event`]s. So a borrowed slab cannot change under its reader: changing a state needs `&mut Engine`.
//!
//! ```text
//!            read()                 last part is in               release()
//!   Free ───────────► Filling ─────────────────────────► Full ───────────────► Free
//!                        │  each part becomes readable by itself
//!                        └──── dropped or failed, when nothing is in flight ──► Free
//! ```

use std::sync::Arc;
use std::sync::mpsc::channel;

use crate::arena::{Arena, Class, SlabId};
use crate::command::{Command, Link};
use crate::device;
use crate::extent::{Layout, PARTS};
use crate::inline::Inline;
use crate::record::Record;
use crate::replica::{Files, Replicas, Stats};
use crate::schedule::{Event, Priority, Scheduler};
use crate::sim::{Clock, Sim, SimDrive};
use crate::thread::RingThread;

pub use crate::device::EngineKind;
pub use crate::error::EngineError;
pub use crate::options::Options;

/// The state of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlabState {
    /// Nobody uses it.
    Free,
    /// Reads write into it; parts that are marked are complete.
    Filling([bool; PARTS]),
    /// Everything is in.
    Full,
}

#[derive(Debug)]
struct Slab {
    state: SlabState,
    /// What is in it, or is being read into it.
    layout: Option<Layout>,
}

/// Reads ranges of files into slabs.
pub struct Engine {
    // Declared before the arena: dropping it drains what is in flight.
    link: Box<dyn Link>,
    arena: Arc<Arena>,
    slabs: Vec<Slab>,
    align: u64,
    chunk_bytes: u64,
    unsent: Vec<Command>,
    /// The next read begins a batch.
    batch_begins: bool,
    /// Reads asked for so far.
    reads: u64,
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
    /// [`EngineError`] when there is no memory for the slabs, or the device that was insisted on is not available.
    pub fn new(files: &Files, classes: &[Class], options: Options) -> Result<Engine, EngineError> {
        Engine::with_link(files, classes, options, |arena, scheduler| {
            Ok(Box::new(RingThread::start(
                files, arena, scheduler, options,
            )?))
        })
    }

    /// An engine without a ring thread, for somebody who does nothing but read: the caller's thread drives the device, and nothing
    /// happens but in [`Engine::wait`].
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn on_caller(
        files: &Files,
        classes: &[Class],
        options: Options,
    ) -> Result<Engine, EngineError> {
        Engine::with_link(files, classes, options, |arena, scheduler| {
            let (name, device) = device::open(&files.replicas, arena, &scheduler, options)?;
            let batch = options.batch_bytes;
            Ok(Box::new(Inline::new(name, device, scheduler, batch, false)))
        })
    }

    /// An engine that reads nothing: `drives` are simulated on `clock`, and the copy of a file that belongs to drive i
    /// of [`Replica::drive`](crate::replica::Replica) is read from `drives[i]`. Slabs hold zeros.
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
            "a drive is missing"
        );
        Engine::with_link(files, classes, options, |_, scheduler| {
            Ok(Box::new(Inline::new(
                "simulated",
                Sim::new(drives, drive_of, clock),
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
        let arena = Arc::new(Arena::new(classes)?);
        let mut scheduler = Scheduler::new(arena.slabs(), files, options.window);
        scheduler.share_ahead(options.ahead_share);
        if let Some(bounds) = options.search {
            scheduler.search_windows(bounds);
        }
        if options.record > 0 {
            scheduler.record(options.record);
        }
        let free = || Slab {
            state: SlabState::Free,
            layout: None,
        };
        Ok(Engine {
            link: link(arena.clone(), scheduler)?,
            slabs: (0..arena.slabs()).map(|_| free()).collect(),
            arena,
            align: files.align(),
            chunk_bytes: options.chunk_bytes,
            unsent: Vec::new(),
            batch_begins: false,
            reads: 0,
        })
    }

    /// "uring", "pread" or "simulated".
    pub fn device(&self) -> &'static str {
        self.link.device()
    }

    /// Touches the memory of all slabs, which the reads would do otherwise: for measuring.
    pub fn populate(&self) {
        self.arena.populate();
    }

    /// Number of slabs.
    pub fn slabs(&self) -> usize {
        self.slabs.len()
    }

    /// The state of a slab.
    pub fn state(&self, slab: SlabId) -> SlabState {
        self.slabs[slab.index()].state
    }

    /// The reads asked for from here on are one batch: what somebody needs together, and waits for. A device that
    /// saves on entries into the kernel returns the first completions of a batch one by one.
    pub fn begin_batch(&mut self) {
        self.batch_begins = true;
    }

    /// Asks for `layout` to be read into a free slab. Nothing starts before [`Engine::flush`]. Returns how
    /// many reads were asked for before this one: its number in a [`Record`].
    ///
    /// # Panics
    /// When the slab is not free, or too small.
    pub fn read(&mut self, slab: SlabId, priority: Priority, layout: Layout) -> u64 {
        assert!(
            layout.footprint <= self.arena.slab_bytes(slab) as u64,
            "{slab:?} is too small"
        );
        let chunks = layout.chunks(self.chunk_bytes, self.align);
        let Slab {
            state,
            layout: held,
        } = &mut self.slabs[slab.index()];
        assert_eq!(
            *state,
            SlabState::Free,
            "{slab:?} is read into while it is used"
        );
        *state = SlabState::Filling([false; PARTS]);
        *held = Some(layout);
        if std::mem::take(&mut self.batch_begins) {
            self.unsent.push(Command::BeginBatch);
        }
        self.unsent.push(Command::Push(slab, priority, chunks));
        self.reads += 1;
        self.reads - 1
    }

    /// A speculative read is wanted now (also one that was abandoned and has not ended).
    pub fn promote(&mut self, slab: SlabId) {
        self.unsent.push(Command::Promote(slab));
    }

    /// A read is not wanted any more: what is waiting of it is dropped. The slab is free after
    /// [`Event::Dropped`], or full after all.
    pub fn abandon(&mut self, slab: SlabId) {
        self.unsent.push(Command::DropWaiting(slab));
    }

    /// Frees a full slab.
    ///
    /// # Panics
    /// When it is not full.
    pub fn release(&mut self, slab: SlabId) {
        let slab_ = &mut self.slabs[slab.index()];
        assert_eq!(
            slab_.state,
            SlabState::Full,
            "{slab:?} is released while it is not full"
        );
        *slab_ = Slab {
            state: SlabState::Free,
            layout: None,
        };
    }

    /// Hands everything asked for since the last flush to the ring thread, as one batch.
    pub fn flush(&mut self) {
        if !self.unsent.is_empty() {
            self.link.send(&mut self.unsent);
        }
    }

    /// The next event, without waiting.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] when the ring thread has ended.
    pub fn poll(&mut self) -> Result<Option<Event>, EngineError> {
        let event = self.link.receive(false)?;
        Ok(event.inspect(|event| self.apply(event)))
    }

    /// The next event; sleeps until there is one. Something must be under way.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] when the ring thread has ended.
    pub fn wait(&mut self) -> Result<Event, EngineError> {
        let event = self.link.receive(true)?.expect("waits for one");
        self.apply(&event);
        Ok(event)
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Part(slab, part) => match &mut self.slabs[slab.index()].state {
                SlabState::Filling(ready) => ready[*part as usize] = true,
                other => unreachable!("{slab:?} is {other:?} while it is read"),
            },
            Event::Full(slab) => self.slabs[slab.index()].state = SlabState::Full,
            Event::Dropped(slab) | Event::Failed(slab, _) => {
                self.slabs[slab.index()] = Slab {
                    state: SlabState::Free,
                    layout: None,
                };
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

    /// The bytes of range `range` of the layout that a slab was read with.
    ///
    /// # Panics
    /// When the range's part is not complete, or there is no such range.
    pub fn payload(&self, slab: SlabId, range: usize) -> &[u8] {
        let layout = self.slabs[slab.index()]
            .layout
            .as_ref()
            .expect("the slab is not free");
        let wanted = layout.ranges[range];
        assert!(
            self.ready(slab, wanted.part),
            "{slab:?} is used before it is read"
        );
        // SAFETY: the part is complete: no chunk that overlaps it will be read again before the slab is free, which
        // needs `&mut self` and so the end of this borrow.
        unsafe { self.arena.borrow(slab, layout.places[range], wanted.len) }
    }

    /// Takes the record that [`Options::record`] asked for, of what has ended so far. `None` when there is none (any more), or the ring thread has ended.
    pub fn take_record(&mut self) -> Option<Record> {
        let (sender, receiver) = channel();
        self.unsent.push(Command::Record(sender));
        self.flush();
        receiver.recv().ok().flatten()
    }

    /// What the reads did so far; `None` when the ring thread has ended.
    pub fn stats(&mut self) -> Option<Stats> {
        let (sender, receiver) = channel();
        self.unsent.push(Command::Stats(sender));
        self.flush();
        receiver.recv().ok()
    }
}
