//! Runs a function on a thread, with limits on time and memory.
//!
//! The fuel of the template engine bounds the number of steps, but not the work of one step. Comparing lists that share elements takes
//! exponential time. Parsing an expression takes quadratic time in its operators.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use crate::memory::process_bytes;

/// The engine recurses over expressions and values: one level for each byte of an expression, and without end for a value that contains
/// itself. So the stack exceeds the memory limit by what can be touched between two checks. Untouched pages cost nothing.
const STACK_BEYOND_MEMORY: u64 = 1 << 30;
/// Some systems refuse more.
const MAX_STACK: u64 = 4 << 30;
/// Time between two checks.
const LOOK: Duration = Duration::from_millis(2);

/// Bounds of a run.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub time: Duration,
    /// Bytes by which the resident memory of the process may grow.
    pub memory: u64,
}

/// Why there is no result.
#[derive(Debug)]
pub enum NoResult {
    /// A limit was exceeded. The function keeps running on its thread, so the program should end soon.
    Exhausted,
    /// No thread with a stack of so many bytes can be made.
    NoThread(u64, io::Error),
}

/// Runs `run` within `limits`.
pub fn within<T: Send + 'static>(
    limits: Limits,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NoResult> {
    let (send, receive) = channel();
    let start = Instant::now();
    let before = process_bytes();
    let stack = limits.memory.saturating_add(STACK_BEYOND_MEMORY);
    let stack = stack.min(MAX_STACK);
    let thread = Builder::new()
        .name("template".into())
        .stack_size(usize::try_from(stack).unwrap_or(usize::MAX));
    // Sending fails when the limits were exceeded before.
    let spawned = thread.spawn(move || drop(send.send(run())));
    spawned.map_err(|error| NoResult::NoThread(stack, error))?;
    loop {
        match receive.recv_timeout(LOOK) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => return Err(NoResult::Exhausted),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let memory = process_bytes().saturating_sub(before);
        if start.elapsed() > limits.time || memory > limits.memory {
            return Err(NoResult::Exhausted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        time: Duration::from_secs(60),
        memory: 1 << 40,
    };

    #[test]
    fn what_ends_has_a_result() {
        assert!(matches!(within(LIMITS, || 7), Ok(7)));
    }

    #[test]
    fn what_does_not_end_is_left() {
        let (keep, wait) = channel::<()>();
        let time = Duration::from_millis(1);
        let forever = move || wait.recv().is_ok();
        let outcome = within(Limits { time, ..LIMITS }, forever);
        assert!(matches!(outcome, Err(NoResult::Exhausted)));
        drop(keep);
    }

    #[test]
    fn what_takes_memory_is_left() {
        let (keep, wait) = channel::<()>();
        let fill = move || {
            let bytes = vec![1u8; 256 << 20];
            let _ = wait.recv();
            bytes.len()
        };
        let memory = 64 << 20;
        let outcome = within(Limits { memory, ..LIMITS }, fill);
        assert!(matches!(outcome, Err(NoResult::Exhausted)));
        drop(keep);
    }
}
