//! Defines what the driver needs of a device: io_uring, pread threads or a simulation.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::arena::SlabId;
use crate::kernel::DeviceError;

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

/// One read for a device: aligned bytes of one copy of a file, into a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// Comes back with the completion.
    pub id: u32,
    /// Index of the file.
    pub file: u32,
    /// Index of its copy.
    pub copy: u8,
    /// Read through the O_DIRECT descriptor.
    pub direct: bool,
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// The slab that it fills.
    pub slab: SlabId,
    /// First byte in the slab.
    pub slab_offset: u64,
}

/// The end of an [`Op`].
#[derive(Debug)]
pub struct Completion {
    /// The op's id.
    pub id: u32,
    /// Bytes read: fewer than the op's at the end of the file, and occasionally elsewhere.
    pub result: io::Result<u64>,
}

/// Ends a [`Device::wait`] from another thread.
pub(crate) type Waker = Arc<dyn Fn() + Send + Sync>;

/// Reads the ops that it gets, without a policy: the driver decides which and when.
///
/// # Safety
/// An implementation writes only the bytes of an op, and only until it returns the op's completion. It has stopped writing when
/// its drop returns, or it never frees the slabs.
pub(crate) unsafe trait Device: Send {
    /// Takes one op; it starts at the next wait at the latest. The driver keeps the number of ops below the capacity that the
    /// device was made with.
    ///
    /// # Errors
    /// [`DeviceError`] when the device cannot take ops any more.
    ///
    /// # Safety
    /// Until the completion of the op, nothing else reads or writes its bytes of the slab.
    unsafe fn submit(&mut self, op: Op) -> Result<(), DeviceError>;

    /// Starts the ops and waits until at least `min` have ended, a signal came or the waker was called. Appends the ended ones to
    /// `ended`. With `min` 0 it does not wait.
    ///
    /// # Errors
    /// [`DeviceError`] when the device cannot go on; a failed read is a completion.
    fn wait(&mut self, min: usize, ended: &mut Vec<Completion>) -> Result<(), DeviceError>;

    /// Time since a fixed start: real or simulated.
    fn now(&self) -> Duration;

    /// Ends a wait from another thread.
    fn waker(&self) -> Waker;

    /// Calls of io_uring_enter so far.
    fn syscalls(&self) -> u64;

    /// Whether its time is behind a clock that the caller advances.
    fn lags_clock(&self) -> bool {
        false
    }
}
