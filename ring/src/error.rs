//! Says why an engine does not run.

use crate::event::ReadError;
use crate::kernel::{DeviceError, KernelError};
use crate::region::ArenaError;

/// Why there is no engine, or why it has stopped.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// No memory for the slabs.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The kernel refused the device.
    #[error("{device} is not available: {source}")]
    Device {
        /// Its name.
        device: &'static str,
        /// The kernel's answer.
        source: KernelError,
    },
    /// The device cannot go on.
    #[error("reading stopped: {0}")]
    Stopped(#[from] DeviceError),
    /// [`Engine::wait`](crate::Engine::wait) was called while no slab is being filled.
    #[error("nothing is being read: call Engine::read before Engine::wait")]
    NothingPending,
    /// A read failed on every copy.
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl EngineError {
    /// Whether the kernel refuses io_uring, so that [`EngineKind::Pread`](crate::EngineKind::Pread) helps.
    pub fn is_of_uring(&self) -> bool {
        match self {
            EngineError::Device { source, .. } => source.is_of_uring(),
            EngineError::Stopped(DeviceError::Kernel(error)) => error.is_of_uring(),
            _ => false,
        }
    }
}
