//! Runs something that may not come to an end, or may take all the memory.
//!
//! The fuel of the template engine bounds what a template does step by step, and not everything that one step does: to compare
//! lists whose elements are all the same list takes as long as there are ways through them, and to read an expression of many operators
//! as long as there are pairs of them.

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

/// The result of `run`, or `None` if it took too much. Then it goes on on a thread of its own: whoever gets `None` had better
/// end the program.
pub fn within<T: Send + 'static>(
    limits: Limits,
    run: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (send, receive) = channel();
    let start = Instant::now();
    let before = resident_bytes();
    let stack = limits.memory.saturating_add(STACK_BEYOND_MEMORY);
    let thread = Builder::new()
        .name("template".into())
        .stack_size(usize::try_from(stack.min(MAX_STACK)).ok()?);
    // Who has left does not wait for the result.
    let _thread = thread.spawn(move || drop(send.send(run()))).ok()?;
    loop {
        match receive.recv_timeout(LOOK) {
            Ok(result) => return Some(result),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
        let memory = resident_bytes().saturating_sub(before);
        if start.elapsed() > limits.time || memory > limits.memory {
            return None;
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
        assert_eq!(within(LIMITS, || 7), Some(7));
    }

    #[test]
    fn what_does_not_end_is_left() {
        let (keep, wait) = channel::<()>();
        let time = Duration::from_millis(1);
        let forever = move || wait.recv().is_ok();
        assert_eq!(within(Limits { time, ..LIMITS }, forever), None);
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
        assert_eq!(within(Limits { memory, ..LIMITS }, fill), None);
        drop(keep);
    }
}
