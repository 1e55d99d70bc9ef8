//! Runs the ring thread, which owns the scheduler and the device, takes commands and sends events.
//!
//! It sleeps in the device while drives read, and on a condition variable while they are idle.

use std::collections::VecDeque;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::command::{self, Command, Link};
use crate::device::{Device, Waker};
use crate::driver::Driver;
use crate::error::EngineError;
use crate::event::Event;
use crate::kernel::{DeviceError, KernelCall, KernelError};
use crate::schedule::Scheduler;

/// Commands on their way to the ring thread.
#[derive(Default)]
struct Outbox {
    commands: Vec<Command>,
    stop: bool,
    /// The ring thread has ended.
    stopped: bool,
    /// The ring thread sleeps in the device, whose waker wakes it.
    in_device: bool,
    /// It returns at the next completion and can start nothing before: every window is full. A wake would cost as much as the read.
    returns_without_wake: bool,
}

/// Events on their way back.
#[derive(Default)]
struct Inbox {
    events: VecDeque<Event>,
    /// Why the ring thread has ended.
    stopped: Option<DeviceError>,
}

#[derive(Default)]
struct Shared {
    outbox: Mutex<Outbox>,
    sent: Condvar,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

/// Every change under these locks is complete at once, so a poisoned lock is as good as any.
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
    /// Starts it, and waits until it has opened its device: a ring belongs to the thread that makes it.
    pub(crate) fn start<F>(
        open: F,
        scheduler: Scheduler,
        batch_bytes: u64,
    ) -> Result<RingThread, EngineError>
    where
        F: FnOnce(&Scheduler) -> Result<(&'static str, Box<dyn Device>), EngineError>,
        F: Send + 'static,
    {
        let shared = Arc::new(Shared::default());
        let (report, ready) = channel();
        let for_thread = shared.clone();
        let run = move || {
            // Ends the waits of the engine's owner in every case, a panic included.
            let _stopped = Stopped(for_thread.clone());
            match open(&scheduler) {
                Ok((name, device)) => {
                    let _ = report.send(Ok((name, device.waker())));
                    serve(Driver::new(device, scheduler, batch_bytes), &for_thread);
                }
                Err(error) => {
                    let _ = report.send(Err(error));
                }
            }
        };
        let handle = std::thread::Builder::new()
            .name("colibri-ring".into())
            .spawn(run)
            .map_err(|e| EngineError::Device {
                device: "a ring thread",
                source: KernelError::new(KernelCall::Spawn, &e),
            })?;
        let opened = ready.recv();
        let (device, waker) = opened.unwrap_or(Err(DeviceError::Panicked.into()))?;
        Ok(RingThread {
            shared,
            waker,
            device,
            handle: Some(handle),
        })
    }

    fn wake(&self, outbox: MutexGuard<'_, Outbox>) {
        let in_device = outbox.in_device;
        let returns_without_wake = outbox.returns_without_wake && !outbox.stop;
        drop(outbox);
        if returns_without_wake {
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
            // Dropped with their senders, which ends a wait for the answers.
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
            if let Some(error) = inbox.stopped {
                return Err(error.into());
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

/// Tells the engine's owner, when it is dropped, that the ring thread has ended.
struct Stopped(Arc<Shared>);

impl Drop for Stopped {
    fn drop(&mut self) {
        let mut outbox = lock(&self.0.outbox);
        outbox.stopped = true;
        outbox.commands.clear();
        drop(outbox);
        let mut inbox = lock(&self.0.inbox);
        inbox.stopped.get_or_insert(DeviceError::Panicked);
        self.0.arrived.notify_all();
    }
}

/// Whether no command has come meanwhile. From now on a sender knows how to wake the thread.
fn may_sleep(driver: &Driver, min: usize, stop: bool, shared: &Shared) -> bool {
    let mut outbox = lock(&shared.outbox);
    let quiet = outbox.commands.is_empty() && outbox.stop == stop;
    if quiet {
        outbox.in_device = true;
        outbox.returns_without_wake = min == 1 && driver.scheduler.all_full();
    }
    quiet
}

/// The ring thread's loop.
fn serve(mut driver: Driver, shared: &Shared) {
    let mut events = Vec::new();
    let mut commands = Vec::new();
    // Several drives are measured before the first demand. An error comes again below.
    let _ = driver.fill();
    loop {
        let stop = {
            let mut outbox = lock(&shared.outbox);
            (outbox.in_device, outbox.returns_without_wake) = (false, false);
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
        let mut result = driver.fill();
        let min = driver.completions_to_wait_for();
        if result.is_ok() && min > 0 && may_sleep(&driver, min, stop, shared) {
            result = driver.wait(min, &mut events);
        }
        if !events.is_empty() || result.is_err() {
            let mut inbox = lock(&shared.inbox);
            inbox.events.extend(events.drain(..));
            if let Err(e) = &result {
                inbox.stopped = Some(*e);
            }
            shared.arrived.notify_one();
        }
        if result.is_err() || (stop && driver.scheduler.in_flight() == 0) {
            return;
        }
    }
}
