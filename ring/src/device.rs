//! What the scheduler needs of something that reads: io_uring, a pool of pread threads, or a simulation.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::arena::{Arena, SlabId};
use crate::error::EngineError;
use crate::options::Options;
use crate::pread::Pread;
use crate::replica::Replicas;
use crate::schedule::Scheduler;
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

/// One read that is handed to a device: aligned bytes of one copy of a file, into a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// Given back with the completion.
    pub id: u32,
    /// Index of the file.
    pub file: u32,
    /// Which copy of it.
    pub copy: u8,
    /// Read through the O_DIRECT descriptor.
    pub direct: bool,
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Where it goes.
    pub slab: SlabId,
    /// First byte in the slab.
    pub at: u64,
}

/// The end of an [`Op`].
#[derive(Debug)]
pub struct Completion {
    /// The op's id.
    pub id: u32,
    /// How many bytes were read: fewer than asked for at the end of the file, or for no reason at all.
    pub result: io::Result<u64>,
}

/// Ends a [`Device::wait`] from another thread.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Reads what it is given. It hides no queue and no policy: what is submitted is started at the next wait.
///
/// A device must have stopped writing into the slabs when its drop returns.
pub trait Device {
    /// Takes one read. The caller keeps the number of unfinished reads within the room it asked for when
    /// it made the device.
    fn submit(&mut self, op: Op);

    /// Starts what was submitted and waits until at least `min` reads have ended, or a signal came, or somebody called the
    /// waker. Appends the ended reads to `ended`. With `min` 0 it does not wait.
    ///
    /// # Errors
    /// When the kernel interface itself fails; a failed read is no error here.
    fn wait(&mut self, min: usize, ended: &mut Vec<Completion>) -> io::Result<()>;

    /// Time since some fixed start: real, or simulated.
    fn now(&self) -> Duration;

    /// Ends a wait from another thread.
    fn waker(&self) -> Waker;

    /// How many times the kernel was entered to submit or to wait, for devices that batch.
    fn enters(&self) -> u64;

    /// Whether its time is behind a clock that somebody else advances.
    fn behind(&self) -> bool {
        false
    }
}

impl Device for Box<dyn Device> {
    fn submit(&mut self, op: Op) {
        (**self).submit(op);
    }

    fn wait(&mut self, min: usize, ended: &mut Vec<Completion>) -> io::Result<()> {
        (**self).wait(min, ended)
    }

    fn now(&self) -> Duration {
        (**self).now()
    }

    fn waker(&self) -> Waker {
        (**self).waker()
    }

    fn enters(&self) -> u64 {
        (**self).enters()
    }

    fn behind(&self) -> bool {
        (**self).behind()
    }
}

/// The most reads at once where each takes a thread.
const MAX_PREAD_THREADS: usize = 64;

/// The device of an engine, with its name. A ring belongs to the thread that makes it.
pub(crate) fn open(
    files: &Arc<[Replicas]>,
    arena: Arc<Arena>,
    scheduler: &Scheduler,
    options: Options,
) -> Result<(&'static str, Box<dyn Device>), EngineError> {
    let failed = |device, source| EngineError::Device { device, source };
    if options.kind != EngineKind::Pread {
        match Uring::new(arena.clone(), files.clone(), scheduler.max_in_flight()) {
            Ok(device) => return Ok(("uring", Box::new(device))),
            Err(source) => {
                let error = failed("io_uring", source);
                if options.kind == EngineKind::Uring {
                    return Err(error);
                }
                tracing::warn!("{error}; reading with pread");
            }
        }
    }
    let threads = (scheduler.drives() * options.depth()).clamp(1, MAX_PREAD_THREADS);
    match Pread::new(arena, files.clone(), threads) {
        Ok(device) => Ok(("pread", Box::new(device))),
        Err(source) => Err(failed("pread", source)),
    }
}
