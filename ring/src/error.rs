//! Why an engine does not run.

use std::io;

use crate::arena::ArenaError;
use crate::schedule::ReadError;

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
