//! Opens the devices of an engine and joins them into one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::arena::Arena;
use crate::device::{Completion, Device, EngineKind, Op, Waker};
use crate::error::EngineError;
use crate::kernel::{DeviceError, KernelError};
use crate::options::Options;
use crate::pread::Pread;
use crate::replica::{Replica, Replicas};
use crate::uring::Uring;

/// The most reads at once where each takes a thread.
const MAX_PREAD_THREADS: usize = 64;

/// Opens the devices that the copies of `files` need, for at most `capacity` reads at once, and returns them with their name. A
/// ring belongs to the thread that makes it.
pub(crate) fn open(
    files: &Arc<[Replicas]>,
    arena: &Arc<Arena>,
    capacity: usize,
    options: Options,
) -> Result<(&'static str, Box<dyn Device>), EngineError> {
    let kind = |replica: &Replica| replica.device.unwrap_or(options.kind);
    let any = |wanted| files.iter().flatten().any(|r| kind(r) == wanted);
    let mut ring = None;
    if options.kind != EngineKind::Pread || any(EngineKind::Uring) || any(EngineKind::Auto) {
        match Uring::new(arena.clone(), files.clone(), capacity) {
            Ok(uring) => ring = Some(uring),
            Err(source) => {
                let error = unavailable("io_uring", source);
                if options.kind == EngineKind::Uring || any(EngineKind::Uring) {
                    return Err(error);
                }
                tracing::warn!("{error}; reading with pread");
            }
        }
    }
    let by_pread = |replica: &Replica| ring.is_none() || kind(replica) == EngineKind::Pread;
    let drives: BTreeSet<u64> = (files.iter().flatten().filter(|r| by_pread(r)))
        .map(|replica| replica.drive)
        .collect();
    let routes = (files.iter())
        .map(|copies| copies.iter().map(&by_pread).collect())
        .collect();
    let threads = (drives.len() * options.depth()).clamp(1, MAX_PREAD_THREADS);
    let pread = |notify: Option<&Waker>| {
        Pread::new(arena, files, threads, notify).map_err(|e| unavailable("pread", e))
    };
    Ok(match ring {
        Some(ring) if drives.is_empty() => ("uring", Box::new(ring)),
        Some(ring) => {
            let pread = pread(Some(&ring.waker()))?;
            let pair = Pair {
                ring,
                pread,
                by_pread: routes,
            };
            ("uring+pread", Box::new(pair))
        }
        None => ("pread", Box::new(pread(None)?)),
    })
}

fn unavailable(device: &'static str, source: KernelError) -> EngineError {
    EngineError::Device { device, source }
}

/// A ring for some copies and pread threads for the others. Its owner sleeps in the ring, which the threads wake.
struct Pair {
    ring: Uring,
    pread: Pread,
    /// For each file and copy, whether the threads read it.
    by_pread: Vec<Vec<bool>>,
}

// SAFETY: each op goes to one device, and both keep the contract.
unsafe impl Device for Pair {
    unsafe fn submit(&mut self, op: Op) -> Result<(), DeviceError> {
        // SAFETY: the caller keeps the contract.
        unsafe {
            match self.by_pread[op.file as usize][op.copy as usize] {
                true => self.pread.submit(op),
                false => self.ring.submit(op),
            }
        }
    }

    fn wait(&mut self, min: usize, ended: &mut Vec<Completion>) -> Result<(), DeviceError> {
        let target = ended.len() + min;
        self.pread.wait(0, ended)?;
        // A thread that ends a read from here on wakes the ring.
        self.ring.wait(target.saturating_sub(ended.len()), ended)?;
        self.pread.wait(0, ended)
    }

    fn now(&self) -> Duration {
        self.ring.now()
    }

    fn waker(&self) -> Waker {
        self.ring.waker()
    }

    fn syscalls(&self) -> u64 {
        self.ring.syscalls()
    }
}
