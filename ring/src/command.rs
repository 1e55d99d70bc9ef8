//! Carries requests of the engine to the thread that owns the driver.

use std::sync::mpsc::Sender;

use crate::arena::SlabId;
use crate::driver::Driver;
use crate::error::EngineError;
use crate::event::{Event, Priority};
use crate::extent::Chunk;
use crate::record::Record;
use crate::stats::Stats;

/// One request.
pub(crate) enum Command {
    BeginBatch,
    Push(SlabId, Priority, Vec<Chunk>),
    Promote(SlabId),
    DropWaiting(SlabId),
    Stats(Sender<Stats>),
    Record(Sender<Option<Record>>),
}

/// The engine's connection to a driver, on the ring thread or on the caller's.
pub(crate) trait Link: Send {
    /// Name of the device.
    fn device(&self) -> &'static str;

    /// Sends commands together.
    fn send(&mut self, commands: &mut Vec<Command>);

    /// The next event; sleeps until there is one if `wait` is set.
    fn receive(&mut self, wait: bool) -> Result<Option<Event>, EngineError>;
}

/// Carries commands out.
pub(crate) fn apply(commands: &mut Vec<Command>, driver: &mut Driver, events: &mut Vec<Event>) {
    for command in commands.drain(..) {
        match command {
            Command::BeginBatch => driver.begin_batch(),
            Command::Push(slab, priority, chunks) => {
                driver.scheduler.push(slab, priority, &chunks, events);
            }
            Command::Promote(slab) => driver.scheduler.promote(slab),
            Command::DropWaiting(slab) => driver.scheduler.drop_waiting(slab, events),
            Command::Stats(reply) => {
                let _ = reply.send(driver.scheduler.stats());
            }
            Command::Record(reply) => {
                let _ = reply.send(driver.scheduler.record.take());
            }
        }
    }
}
