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

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::arena::{Arena, ArenaError, Class, SlabId};
use crate::device::{Device, Waker};
use crate::driver::Driver;
use crate::extent::{Chunk, Layout, PARTS};
use crate::pread::Pread;
use crate::replica::{Files, Stats, Window};
use crate::schedule::{Event, Priority, ReadError, Scheduler};
use crate::uring::Uring;

/// Which device reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EngineKind {
    /// io_uring where the kernel allows it, else pread.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads that call pread.
    Pread,
}

/// How an engine reads.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The device.
    pub kind: EngineKind,
    /// How much each drive has at once.
    pub window: Window,
    /// Spans are read in pieces of about this many bytes.
    pub chunk_bytes: u64,
    /// Reads of about this many bytes may be waited for at once, which saves entries into the kernel; 0: every read that ends
    /// is noticed at once.
    pub batch_bytes: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            kind: EngineKind::Auto,
            window: Window::default(),
            chunk_bytes: 2 << 20,
            batch_bytes: 4 << 20,
        }
    }
}

impl Options {
    /// How many reads a drive can have at once.
    fn depth(&self) -> usize {
        let by_bytes = self.window.bytes.div_ceil(self.chunk_bytes.max(1));
        (self.window.reads).min(usize::try_from(by_bytes).unwrap_or(usize::MAX))
    }
}

/// Why there is no engine, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// No memory for the slabs.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The device could not be made.
    #[error("{device} is not available: {source}{}", hint(source))]
    Device {
        /// Its name.
        device: &'static str,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The ring thread ended because its kernel interface failed.
    #[error("the reading thread stopped: {0}")]
    Stopped(String),
    /// A read failed on every copy.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// What to do about a refused io_uring.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            " (disabled by the sysctl kernel.io_uring_disabled or by a seccomp filter, as in most containers)"
        }
        Some(libc::ENOSYS) => " (the kernel is older than 5.1 or built without it)",
        Some(libc::ENOMEM) => " (the limit on locked memory is too low: see ulimit -l)",
        _ => "",
    }
}

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
    thread: RingThread,
    arena: Arc<Arena>,
    slabs: Vec<Slab>,
    align: u64,
    chunk_bytes: u64,
    unsent: Vec<Command>,
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
        let arena = Arc::new(Arena::new(classes)?);
        let scheduler = Scheduler::new(arena.slabs(), files, options.window);
        let slabs = (0..arena.slabs())
            .map(|_| Slab {
                state: SlabState::Free,
                layout: None,
            })
            .collect();
        let thread = RingThread::start(files, arena.clone(), scheduler, options)?;
        Ok(Engine {
            thread,
            arena,
            slabs,
            align: files.align(),
            chunk_bytes: options.chunk_bytes,
            unsent: Vec::new(),
        })
    }

    /// "uring" or "pread".
    pub fn device(&self) -> &'static str {
        self.thread.device
    }

    /// Number of slabs.
    pub fn slabs(&self) -> usize {
        self.slabs.len()
    }

    /// Bytes of memory that the slabs take.
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
    }

    /// The state of a slab.
    pub fn state(&self, slab: SlabId) -> SlabState {
        self.slabs[slab.index()].state
    }

    /// Asks for `layout` to be read into a free slab. Nothing starts before [`Engine::flush`].
    ///
    /// # Panics
    /// When the slab is not free, or too small.
    pub fn read(&mut self, slab: SlabId, priority: Priority, layout: Layout) {
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
        self.unsent.push(Command::Push(slab, priority, chunks));
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
            self.thread.send(&mut self.unsent);
        }
    }

    /// The next event, without waiting.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] when the ring thread has ended.
    pub fn poll(&mut self) -> Result<Option<Event>, EngineError> {
        let event = self.thread.receive(false)?;
        Ok(event.inspect(|event| self.apply(event)))
    }

    /// The next event; sleeps until there is one. Something must be under way.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] when the ring thread has ended.
    pub fn wait(&mut self) -> Result<Event, EngineError> {
        let event = self.thread.receive(true)?.expect("waits for one");
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

    /// What the reads did so far.
    pub fn stats(&mut self) -> Option<Stats> {
        let (sender, receiver) = channel();
        self.unsent.push(Command::Stats(sender));
        self.flush();
        receiver.recv().ok()
    }
}

/// What the engine tells the ring thread.
enum Command {
    Push(SlabId, Priority, Vec<Chunk>),
    Promote(SlabId),
    DropWaiting(SlabId),
    Stats(Sender<Stats>),
}

/// Commands on their way to the ring thread.
#[derive(Default)]
struct Outbox {
    commands: Vec<Command>,
    stop: bool,
    /// The ring thread is inside the device and has to be woken through it.
    in_device: bool,
}

/// Events on their way back.
#[derive(Default)]
struct Inbox {
    events: VecDeque<Event>,
    /// The ring thread has ended, and why.
    stopped: Option<String>,
}

#[derive(Default)]
struct Shared {
    outbox: Mutex<Outbox>,
    sent: Condvar,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

/// Nothing is left half-done under these locks, so one that a panic has poisoned is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread that owns the scheduler and the device. Dropping it drains what is in flight.
struct RingThread {
    shared: Arc<Shared>,
    waker: Waker,
    device: &'static str,
    handle: Option<JoinHandle<()>>,
}

impl RingThread {
    fn start(
        files: &Files,
        arena: Arc<Arena>,
        scheduler: Scheduler,
        options: Options,
    ) -> Result<RingThread, EngineError> {
        let shared = Arc::new(Shared::default());
        let (report, ready) = channel();
        let (files, for_thread) = (files.replicas.clone(), shared.clone());
        // A ring belongs to the thread that makes it.
        let run = move || {
            // Ends the waits of the owner in every case, a panic included.
            let _stopped = Stopped(for_thread.clone());
            let room = scheduler.max_in_flight();
            let threads = (scheduler.drives() * options.depth()).clamp(1, MAX_PREAD_THREADS);
            let (kind, batch) = (options.kind, options.batch_bytes);
            if kind != EngineKind::Pread {
                match Uring::new(arena.clone(), files.clone(), room) {
                    Ok(device) => {
                        let _ = report.send(Ok(("uring", device.waker())));
                        return serve(Driver::new(device, scheduler, batch), &for_thread);
                    }
                    Err(source) => {
                        let error = EngineError::Device {
                            device: "io_uring",
                            source,
                        };
                        if kind == EngineKind::Uring {
                            let _ = report.send(Err(error));
                            return;
                        }
                        tracing::warn!("{error}; reading with pread");
                    }
                }
            }
            match Pread::new(arena, files, threads) {
                Ok(device) => {
                    let _ = report.send(Ok(("pread", device.waker())));
                    serve(Driver::new(device, scheduler, batch), &for_thread);
                }
                Err(source) => {
                    let _ = report.send(Err(EngineError::Device {
                        device: "pread",
                        source,
                    }));
                }
            }
        };
        let handle = std::thread::Builder::new()
            .name("colibri-ring".into())
            .spawn(run)
            .map_err(|source| EngineError::Device {
                device: "a thread",
                source,
            })?;
        let (device, waker) = ready.recv().unwrap_or_else(|_| {
            Err(EngineError::Stopped(
                "it panicked while it made the device".into(),
            ))
        })?;
        Ok(RingThread {
            shared,
            waker,
            device,
            handle: Some(handle),
        })
    }

    fn send(&self, commands: &mut Vec<Command>) {
        let mut outbox = lock(&self.shared.outbox);
        outbox.commands.append(commands);
        self.wake(outbox);
    }

    fn wake(&self, outbox: MutexGuard<'_, Outbox>) {
        let in_device = outbox.in_device;
        drop(outbox);
        if in_device {
            (self.waker)();
        } else {
            self.shared.sent.notify_one();
        }
    }

    fn receive(&self, wait: bool) -> Result<Option<Event>, EngineError> {
        let mut inbox = lock(&self.shared.inbox);
        loop {
            if let Some(event) = inbox.events.pop_front() {
                return Ok(Some(event));
            }
            if let Some(why) = &inbox.stopped {
                return Err(EngineError::Stopped(why.clone()));
            }
            if !wait {
                return Ok(None);
            }
            inbox = self
                .shared
                .arrived
                .wait(inbox)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for RingThread {
    fn drop(&mut self) {
        let mut outbox = lock(&self.shared.outbox);
        outbox.stop = true;
        self.wake(outbox);
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

/// The most reads at once where each takes a thread.
const MAX_PREAD_THREADS: usize = 64;

/// Tells the engine's owner that the ring thread has ended, however it does.
struct Stopped(Arc<Shared>);

impl Drop for Stopped {
    fn drop(&mut self) {
        let mut inbox = lock(&self.0.inbox);
        inbox.stopped.get_or_insert_with(|| "it panicked".into());
        self.0.arrived.notify_all();
    }
}

/// The ring thread's loop: sleeps in the device while reads are under way, on the condition variable otherwise.
fn serve<D: Device>(mut driver: Driver<D>, shared: &Shared) {
    let mut events = Vec::new();
    let mut commands = Vec::new();
    loop {
        let stop = {
            let mut outbox = lock(&shared.outbox);
            outbox.in_device = false;
            let idle = driver.scheduler.is_idle();
            while idle && outbox.commands.is_empty() && !outbox.stop {
                outbox = shared
                    .sent
                    .wait(outbox)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            commands.append(&mut outbox.commands);
            outbox.in_device = true;
            outbox.stop
        };
        for command in commands.drain(..) {
            match command {
                Command::Push(slab, priority, chunks) => {
                    driver.scheduler.push(slab, priority, &chunks, &mut events);
                }
                Command::Promote(slab) => driver.scheduler.promote(slab),
                Command::DropWaiting(slab) => driver.scheduler.drop_waiting(slab, &mut events),
                Command::Stats(reply) => {
                    let _ = reply.send(driver.scheduler.stats.clone());
                }
            }
        }
        if stop {
            driver.scheduler.drop_all(&mut events);
        }
        let result = driver.step(&mut events);
        if !events.is_empty() || result.is_err() {
            let mut inbox = lock(&shared.inbox);
            inbox.events.extend(events.drain(..));
            if let Err(e) = &result {
                inbox.stopped = Some(e.to_string());
            }
            shared.arrived.notify_one();
        }
        if result.is_err() || (stop && driver.scheduler.in_flight() == 0) {
            return;
        }
    }
}
