//! Runs something that may not come to an end, or may take all the memory.
//!
//! The fuel of the template engine bounds what a template does step by step, and not everything that one step does: to compare
//! lists whose elements are all the same list takes as long as there are ways through them, and to read an expression of many operators
//! as long as there are pairs of them.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Expressions and values are taken apart recursively: an expression may have a level for each of its bytes, a value some 100,000, and one
/// that contains itself has no end of them. So the stack is larger than the memory that may be taken, by as much as can be touched before
/// somebody looks. What is not touched costs nothing.
const STACK_BEYOND_MEMORY: u64 = 1 << 30;
/// Some systems refuse more.
const MAX_STACK: u64 = 4 << 30;
const LOOK: Duration = Duration::from_millis(2);

/// What it may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub time: Duration,
    /// Bytes that become resident meanwhile, in the whole process.
    pub memory: u64,
}

/// Why there is no result.
#[derive(Debug)]
pub enum NoResult {
    /// It took too much, and goes on on a thread of its own: whoever gets this had better end the program.
    Exhausted,
    /// There is no room for a thread with this stack, in bytes.
    NoThread(u64, io::Error),
}

/// The result of `run`, or why there is none.
pub fn within<T: Send + 'static>(
    limits: Limits,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NoResult> {
    let (send, receive) = channel();
    let start = Instant::now();
    let before = resident_bytes();
    let stack = limits.memory.saturating_add(STACK_BEYOND_MEMORY);
    let stack = stack.min(MAX_STACK);
    let thread = Builder::new()
        .name("template".into())
        .stack_size(usize::try_from(stack).unwrap_or(usize::MAX));
    // Who has left does not wait for the result.
    let spawned = thread.spawn(move || drop(send.send(run())));
    spawned.map_err(|error| NoResult::NoThread(stack, error))?;
    loop {
        match receive.recv_timeout(LOOK) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => return Err(NoResult::Exhausted),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let memory = resident_bytes().saturating_sub(before);
        if start.elapsed() > limits.time || memory > limits.memory {
            return Err(NoResult::Exhausted);
        }
    }
}

/// What is resident, in bytes; 0 where /proc does not say.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse::<u64>().ok());
    pages
        .unwrap_or(0)
        .saturating_mul(rustix::param::page_size() as u64)
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
