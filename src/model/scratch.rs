//! Reuses buffers, so that a layer allocates nothing once the first one has run.

use std::sync::{Mutex, PoisonError};

/// The first `len` values of `buffer`, which grows if it is shorter. Their values are unspecified.
pub fn resize_scratch(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        // Exactly: a vector that doubles would exceed the planned scratch.
        buffer.reserve_exact(len - buffer.len());
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// Buffers for the tiles of a parallel loop: as many as tiles run at the same time.
#[derive(Debug)]
pub struct ScratchPool<T>(Mutex<Vec<T>>);

impl<T: Default> ScratchPool<T> {
    /// An empty pool.
    pub fn new() -> ScratchPool<T> {
        ScratchPool(Mutex::new(Vec::new()))
    }

    /// Runs `f` with a buffer that no other tile uses meanwhile.
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut item = lock().pop().unwrap_or_default();
        let result = f(&mut item);
        lock().push(item);
        result
    }
}
