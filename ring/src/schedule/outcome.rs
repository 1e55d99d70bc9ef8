//! Classifies the end of a read.

use std::io;

use crate::kernel::is_refusal;

/// What the end of a read means.
#[derive(Debug)]
pub(super) enum Outcome {
    /// All requested bytes are in; so many were read.
    Done(u64),
    /// Some are; the rest is read from the last aligned byte on.
    Short(u64),
    /// Nothing useful came, for a reason that passes.
    Interrupted(io::Error),
    /// The kernel refuses the request itself.
    Refused(io::Error),
    /// The copy cannot serve it.
    Failed(io::Error),
}

impl Outcome {
    /// Bytes that came.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Outcome::Done(n) | Outcome::Short(n) => *n,
            Outcome::Interrupted(_) | Outcome::Refused(_) | Outcome::Failed(_) => 0,
        }
    }
}

pub(super) fn outcome(result: io::Result<u64>, requested: u64, align: u64) -> Outcome {
    match result {
        Ok(n) if n >= requested => Outcome::Done(n),
        Ok(n) if n >= align => Outcome::Short(n),
        Ok(0) => Outcome::Failed(truncated()),
        Ok(_) => Outcome::Interrupted(truncated()),
        Err(e) => match e.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => Outcome::Interrupted(e),
            _ if is_refusal(&e) => Outcome::Refused(e),
            _ => Outcome::Failed(e),
        },
    }
}

fn truncated() -> io::Error {
    let why = "the file ended: it was truncated after it was opened";
    io::Error::new(io::ErrorKind::UnexpectedEof, why)
}
