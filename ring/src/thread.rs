//! The ring thread: it owns the scheduler and the device, takes commands and sends events.
//!
//! It sleeps in the device while reads are under way, and on a condition variable when there are none.

use std::collections::VecDeque;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::arena::Arena;
use crate::command::{self, Command, Link};
use crate::device::{self, Device, Waker};
use crate::driver::Driver;
use crate::error::EngineError;
use crate::options::Options;
use crate::replica::Files;
use crate::schedule::{Event, Scheduler};

/// Commands on their way to the ring thread.
#[derive(Default)]
struct Outbox {
    commands: Vec<Command>,
    stop: bool,
    /// Nobody takes commands any more.
    stopped: bool,
    /// The ring thread is inside the device and has to be woken through it.
    in_device: bool,
    /// It is, and will come out at the next completion, before which it could do nothing: every window is full. Then it need
    /// not be woken, which would cost as much as the read.
    comes_soon: bool,
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
pub(crate) struct RingThread {
    shared: Arc<Shared>,
    waker: Waker,
    /// "uring" or "pread".
    device: &'static str,
    handle: Option<JoinHandle<()>>,
}

impl RingThread {
    /// Starts it, and waits until it has made its device.
    pub(crate) fn start(
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
            match device::open(&files, arena, &scheduler, options) {
                Ok((name, device)) => {
                    let _ = report.send(Ok((name, device.waker())));
                    serve(
                        Driver::new(device, scheduler, options.batch_bytes),
                        &for_thread,
                    );
                }
                Err(error) => {
                    let _ = report.send(Err(error));
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

    fn wake(&self, outbox: MutexGuard<'_, Outbox>) {
        let (in_device, comes_soon) = (outbox.in_device, outbox.comes_soon && !outbox.stop);
        drop(outbox);
        if comes_soon {
            return;
        }
        if in_device {
            (self.waker)();
        } else {
            self.shared.sent.notify_one();
        }
    }
}

impl Link for RingThread {
    fn device(&self) -> &'static str {
        self.device
    }

    fn send(&mut self, commands: &mut Vec<Command>) {
        let mut outbox = lock(&self.shared.outbox);
        if outbox.stopped {
            // Dropped, so that nobody waits for an answer to them.
            commands.clear();
            return;
        }
        outbox.commands.append(commands);
        self.wake(outbox);
    }

    fn receive(&mut self, wait: bool) -> Result<Option<Event>, EngineError> {
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

/// Tells the engine's owner that the ring thread has ended, however it does.
struct Stopped(Arc<Shared>);

impl Drop for Stopped {
    fn drop(&mut self) {
        let mut outbox = lock(&self.0.outbox);
        outbox.stopped = true;
        outbox.commands.clear();
        drop(outbox);
        let mut inbox = lock(&self.0.inbox);
        inbox.stopped.get_or_insert_with(|| "it panicked".into());
        self.0.arrived.notify_all();
    }
}

/// Whether nothing has come up meanwhile. From now on whoever sends something knows how the thread is woken.
fn may_sleep<D: Device>(driver: &Driver<D>, min: usize, stop: bool, shared: &Shared) -> bool {
    let mut outbox = lock(&shared.outbox);
    let quiet = outbox.commands.is_empty() && outbox.stop == stop;
    if quiet {
        outbox.in_device = true;
        outbox.comes_soon = min == 1 && driver.scheduler.all_full();
    }
    quiet
}

/// The ring thread's loop: sleeps in the device while reads are under way, on the condition variable otherwise.
fn serve<D: Device>(mut driver: Driver<D>, shared: &Shared) {
    let mut events = Vec::new();
    let mut commands = Vec::new();
    loop {
        let stop = {
            let mut outbox = lock(&shared.outbox);
            (outbox.in_device, outbox.comes_soon) = (false, false);
            let idle = driver.scheduler.is_idle();
            while idle && outbox.commands.is_empty() && !outbox.stop {
                outbox = shared
                    .sent
                    .wait(outbox)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            commands.append(&mut outbox.commands);
            outbox.stop
        };
        command::apply(&mut commands, &mut driver, &mut events);
        if stop {
            driver.scheduler.drop_all(&mut events);
        }
        driver.fill();
        let min = driver.completions_to_wait_for();
        let mut result = Ok(());
        if min > 0 && may_sleep(&driver, min, stop, shared) {
            result = driver.wait(min, &mut events);
        }
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
