//! A driver on the caller's thread, which moves on when the caller waits.
//!
//! Right where the caller does nothing but read: there is no other thread to wake, and requests start with the wait for the next
//! completion, one entry into the kernel for both. Somebody who computes between two calls leaves the drives idle meanwhile, and needs
//! the ring thread.

use std::collections::VecDeque;

use crate::command::{self, Command, Link};
use crate::device::Device;
use crate::driver::Driver;
use crate::error::EngineError;
use crate::schedule::{Event, Scheduler};

/// A driver without a thread of its own. Dropping it drains what is in flight, as its device does.
pub(crate) struct Inline<D> {
    name: &'static str,
    driver: Driver<D>,
    events: VecDeque<Event>,
    new: Vec<Event>,
    /// Requests start when they are sent: the device is simulated, and time may pass before the next call.
    eager: bool,
    /// The device failed while nobody could be told.
    failed: Option<String>,
}

impl<D: Device> Inline<D> {
    pub(crate) fn new(
        name: &'static str,
        device: D,
        scheduler: Scheduler,
        batch_bytes: u64,
        eager: bool,
    ) -> Inline<D> {
        Inline {
            name,
            driver: Driver::new(device, scheduler, batch_bytes),
            events: VecDeque::new(),
            new: Vec::new(),
            eager,
            failed: None,
        }
    }

    /// Does everything that happened up to now.
    fn catch_up(&mut self) -> Result<(), EngineError> {
        loop {
            let in_flight = self.driver.scheduler.in_flight();
            self.step(false)?;
            let quiet = self.driver.scheduler.in_flight() == in_flight;
            if quiet && !self.driver.behind() {
                return Ok(());
            }
        }
    }

    fn step(&mut self, wait: bool) -> Result<(), EngineError> {
        if let Some(why) = &self.failed {
            return Err(EngineError::Stopped(why.clone()));
        }
        let result = self.driver.step(wait, &mut self.new);
        self.events.extend(self.new.drain(..));
        result.map_err(|e| EngineError::Stopped(self.failed.insert(e.to_string()).clone()))
    }
}

impl<D: Device> Link for Inline<D> {
    fn device(&self) -> &'static str {
        self.name
    }

    fn send(&mut self, commands: &mut Vec<Command>) {
        // What was asked for earlier happened before now. A failure shows when events are asked for.
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
                return Err(EngineError::Stopped(
                    "nothing is being read, and somebody waits".into(),
                ));
            }
            self.step(true)?;
        }
        Ok(self.events.pop_front())
    }
}
