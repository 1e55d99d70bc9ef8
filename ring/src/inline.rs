//! Drives a device on the caller's thread, whenever the caller waits.
//!
//! This suits a caller that only reads: there is no other thread to wake, and one system call submits requests and waits for the
//! next completion. A caller that computes between waits leaves the drives idle, and needs the ring thread.

use std::collections::VecDeque;

use crate::command::{self, Command, Link};
use crate::device::Device;
use crate::driver::Driver;
use crate::error::EngineError;
use crate::event::Event;
use crate::kernel::DeviceError;
use crate::schedule::Scheduler;

/// A driver on the caller's thread. Dropping it drains what is in flight, as its device does.
pub(crate) struct Inline {
    name: &'static str,
    driver: Driver,
    events: VecDeque<Event>,
    new: Vec<Event>,
    /// Requests start when they are sent: the device is simulated, and the clock may advance before the next call.
    eager: bool,
    /// Why the device cannot go on.
    failed: Option<DeviceError>,
}

impl Inline {
    pub(crate) fn new(
        name: &'static str,
        device: Box<dyn Device>,
        scheduler: Scheduler,
        batch_bytes: u64,
        eager: bool,
    ) -> Inline {
        Inline {
            name,
            driver: Driver::new(device, scheduler, batch_bytes),
            events: VecDeque::new(),
            new: Vec::new(),
            eager,
            failed: None,
        }
    }

    /// Takes all completions up to the clock's time.
    fn catch_up(&mut self) -> Result<(), EngineError> {
        loop {
            let in_flight = self.driver.scheduler.in_flight();
            self.step(false)?;
            let quiet = self.driver.scheduler.in_flight() == in_flight;
            if quiet && !self.driver.lags_clock() {
                return Ok(());
            }
        }
    }

    fn step(&mut self, wait: bool) -> Result<(), EngineError> {
        if let Some(error) = self.failed {
            return Err(error.into());
        }
        let result = self.driver.step(wait, &mut self.new);
        self.events.extend(self.new.drain(..));
        self.failed = result.err();
        Ok(result?)
    }
}

impl Link for Inline {
    fn device(&self) -> &'static str {
        self.name
    }

    fn send(&mut self, commands: &mut Vec<Command>) {
        // Earlier requests come first. A failure shows at the next receive.
        if self.eager {
            let _ = self.catch_up();
        }
        command::apply(commands, &mut self.driver, &mut self.new);
        self.events.extend(self.new.drain(..));
        if self.eager {
            let _ = self.catch_up();
        }
    }

    fn receive(&mut self, wait: bool) -> Result<Option<Event>, EngineError> {
        if self.eager {
            self.catch_up()?;
        }
        while wait && self.events.is_empty() {
            if self.driver.scheduler.is_idle() {
                return Err(EngineError::NothingPending);
            }
            self.step(true)?;
        }
        Ok(self.events.pop_front())
    }
}
