//! The device on io_uring: READ_FIXED into registered slabs, registered files, batched submission.
//!
//! Everything that is `unsafe` about the ring is in this file.

use std::fs::File as StdFile;
use std::io;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, cqueue, opcode, squeue};

use crate::arena::Arena;
use crate::device::{Completion, Device, Op, Waker};
use crate::file::{Advice, MAX_READ};
use crate::limits;
use crate::replica::Replicas;

/// `user_data` of the polls on the eventfd that other threads wake the ring by.
const WAKE: u64 = u64::MAX;

/// What was warned about already: a process that makes a ring for each of many measurements hits the same limit each time.
static FILES_REFUSED: Once = Once::new();
static REGIONS_REFUSED: Once = Once::new();

fn warn_once(warned: &Once, message: String) {
    warned.call_once(|| tracing::warn!("{message}"));
}

/// io_uring, owned by the thread that made it.
pub struct Uring {
    ring: IoUring,
    arena: Arc<Arena>,
    files: Arc<[Replicas]>,
    /// Index in the registered files of the first copy of each file; two entries a copy, buffered and direct.
    first_slot: Option<Vec<u32>>,
    /// How many of the arena's regions are registered, counted from the first.
    registered: usize,
    wake: Arc<StdFile>,
    /// Polls on it that have not ended.
    polls: usize,
    /// Reads that the kernel has or will get, by id.
    ops: Vec<Option<Op>>,
    in_flight: usize,
    /// Scratch: what was taken out of the completion queue.
    entries: Vec<cqueue::Entry>,
    enters: u64,
    start: Instant,
}

impl Uring {
    /// Makes a ring with room for `entries` reads at once, on the calling thread, which must be the one that uses it.
    /// Files and regions that the kernel does not register (descriptor or locked-memory limit) are read
    /// unregistered, with one warning.
    ///
    /// # Errors
    /// When the kernel refuses a ring.
    pub fn new(arena: Arc<Arena>, files: Arc<[Replicas]>, entries: usize) -> io::Result<Uring> {
        // As many again for the polls on the eventfd.
        let ring = build((2 * entries.max(1)).next_power_of_two() as u32)?;
        let wake = rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
        )?;
        // A seccomp filter may allow to make rings and deny to enter them.
        ring.submit()?;
        let mut uring = Uring {
            ring,
            arena,
            files,
            first_slot: None,
            registered: 0,
            wake: Arc::new(StdFile::from(wake)),
            polls: 0,
            ops: vec![None; entries],
            in_flight: 0,
            entries: Vec::with_capacity(2 * entries),
            enters: 0,
            start: Instant::now(),
        };
        uring.register_files();
        uring.register_regions();
        Ok(uring)
    }

    fn register_files(&mut self) {
        let mut fds: Vec<RawFd> = Vec::new();
        let mut first_slot = Vec::new();
        for replicas in self.files.iter() {
            first_slot.push(fds.len() as u32);
            for replica in replicas {
                fds.push(replica.file.buffered_fd().as_raw_fd());
                // -1 leaves the slot empty.
                fds.push(replica.file.direct().map_or(-1, |(fd, _)| fd.as_raw_fd()));
            }
        }
        match self.ring.submitter().register_files(&fds) {
            Ok(()) => self.first_slot = Some(first_slot),
            Err(e) => warn_once(
                &FILES_REFUSED,
                format!("files are not registered with io_uring: {e}"),
            ),
        }
    }

    /// Registers as many regions as the limit on locked memory allows.
    fn register_regions(&mut self) {
        if let Err(e) = limits::raise_locked_memory() {
            tracing::debug!("the limit on locked memory stays as it is: {e}");
        }
        let regions: Vec<libc::iovec> = self
            .arena
            .regions()
            .map(|(address, bytes)| libc::iovec {
                iov_base: address.cast(),
                iov_len: bytes,
            })
            .collect();
        let mut refused = None;
        let mut count = regions.len();
        while count > 0 {
            // SAFETY: the regions stay mapped as long as the ring: the ring holds the arena, and drains before it drops.
            match unsafe { self.ring.submitter().register_buffers(&regions[..count]) } {
                Ok(()) => {
                    self.registered = count;
                    break;
                }
                Err(e) => {
                    let fewer_may_do = e.raw_os_error() == Some(libc::ENOMEM);
                    refused = Some(e);
                    // Every attempt touches what it registers, so few are made.
                    count = if fewer_may_do { count / 2 } else { 0 };
                }
            }
        }
        if let Some(e) = refused {
            let advice = match e.raw_os_error() {
                Some(libc::ENOMEM) => {
                    "; raise the limit on locked memory (ulimit -l, or LimitMEMLOCK= of the service)"
                }
                _ => "",
            };
            let (some, all) = (self.registered, regions.len());
            warn_once(
                &REGIONS_REFUSED,
                format!("{some} of {all} slab regions are registered with io_uring: {e}{advice}"),
            );
        }
    }

    fn read_entry(&self, op: &Op) -> squeue::Entry {
        let address = self.arena.address(op.slab, op.at, op.len);
        let len = op.len.min(MAX_READ as u64) as u32;
        let region = self.arena.region_of(op.slab);
        let fixed_buffer = (region < self.registered).then_some(region as u16);
        let replica = &self.files[op.file as usize][op.copy as usize];
        let fd = match (op.direct, replica.file.direct()) {
            (true, Ok((fd, _))) => fd.as_raw_fd(),
            _ => replica.file.buffered_fd().as_raw_fd(),
        };
        let slot = self.first_slot.as_ref().map(|first| {
            Fixed(first[op.file as usize] + 2 * u32::from(op.copy) + u32::from(op.direct))
        });
        let entry = match (fixed_buffer, slot) {
            (Some(buffer), Some(slot)) => opcode::ReadFixed::new(slot, address, len, buffer)
                .offset(op.offset)
                .build(),
            (Some(buffer), None) => opcode::ReadFixed::new(Fd(fd), address, len, buffer)
                .offset(op.offset)
                .build(),
            (None, Some(slot)) => opcode::Read::new(slot, address, len)
                .offset(op.offset)
                .build(),
            (None, None) => opcode::Read::new(Fd(fd), address, len)
                .offset(op.offset)
                .build(),
        };
        entry.user_data(u64::from(op.id))
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: a read's memory belongs to a slab of the arena, which the ring holds until everything has been drained,
        // and `Arena::address` has checked the bounds; the scheduler hands out each byte of a slab to one read at a
        // time. The poll touches no memory.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            // The queue has room for all reads the caller may have in flight, so it is full only of entries
            // that the kernel has not taken yet.
            let _ = self.enter(0);
        }
    }

    /// One io_uring_enter: hands over what was pushed and waits for `min` completions.
    fn enter(&mut self, min: usize) -> io::Result<()> {
        self.enters += 1;
        match self.ring.submit_and_wait(min) {
            Ok(_) => Ok(()),
            // EBUSY: the completion queue is full and has to be reaped first.
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)
                ) =>
            {
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    fn reap(&mut self, ended: &mut Vec<Completion>) {
        // Taken out first: the queue is borrowed from the ring.
        let mut entries = std::mem::take(&mut self.entries);
        entries.extend(self.ring.completion());
        if entries.iter().any(|entry| entry.user_data() == WAKE) {
            let _ = (&*self.wake).read(&mut [0; 8]);
        }
        for entry in entries.drain(..) {
            self.end(&entry, ended);
        }
        self.entries = entries;
    }

    fn end(&mut self, entry: &cqueue::Entry, ended: &mut Vec<Completion>) {
        if entry.user_data() == WAKE {
            self.polls -= 1;
            return;
        }
        let id = entry.user_data() as u32;
        let op = self.ops[id as usize]
            .take()
            .expect("only what was submitted ends");
        self.in_flight -= 1;
        let result = match entry.result() {
            n if n >= 0 => Ok(n as u64),
            e => Err(io::Error::from_raw_os_error(-e)),
        };
        if !op.direct {
            let file = &self.files[op.file as usize][op.copy as usize].file;
            file.advise(op.offset, op.len, Advice::DontNeed);
        }
        ended.push(Completion { id, result });
    }
}

impl Device for Uring {
    fn submit(&mut self, op: Op) {
        let entry = self.read_entry(&op);
        if self.ops.len() <= op.id as usize {
            self.ops.resize(op.id as usize + 1, None);
        }
        self.ops[op.id as usize] = Some(op);
        self.in_flight += 1;
        self.push(&entry);
    }

    fn wait(&mut self, min: usize, ended: &mut Vec<Completion>) -> io::Result<()> {
        // The kernel counts what ends, whatever it is, so as many polls end with a wake as reads are waited for.
        while self.polls < min.max(1) {
            self.polls += 1;
            let poll = opcode::PollAdd::new(Fd(self.wake.as_raw_fd()), libc::POLLIN as u32);
            self.push(&poll.build().user_data(WAKE));
        }
        self.enter(min)?;
        self.reap(ended);
        Ok(())
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn waker(&self) -> Waker {
        let wake = self.wake.clone();
        Arc::new(move || {
            // Fails only when the counter is full, and then the ring is being woken already.
            let _ = (&*wake).write(&1u64.to_ne_bytes());
        })
    }

    fn enters(&self) -> u64 {
        self.enters
    }
}

impl Drop for Uring {
    /// The kernel goes on writing into slabs after a ring is closed, so nothing may be in flight then.
    fn drop(&mut self) {
        let mut ended = Vec::new();
        while self.in_flight > 0 {
            if let Err(e) = self.enter(1) {
                // No way to learn when the reads end: the memory must never be reused.
                tracing::error!("cannot drain io_uring: {e}");
                std::mem::forget(self.arena.clone());
                return;
            }
            self.reap(&mut ended);
        }
    }
}

/// The most capable ring that this kernel makes. Single issuer and deferred task work keep completions off other
/// threads' backs; each needs a newer kernel than the next.
fn build(entries: u32) -> io::Result<IoUring> {
    let mut defer = IoUring::builder();
    defer
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_coop_taskrun()
        .setup_taskrun_flag();
    let mut coop = IoUring::builder();
    coop.setup_coop_taskrun().setup_taskrun_flag();
    let plain = IoUring::builder();
    let invalid = |e: &io::Error| e.raw_os_error() == Some(libc::EINVAL);
    match defer.build(entries) {
        Err(e) if invalid(&e) => match coop.build(entries) {
            Err(e) if invalid(&e) => plain.build(entries),
            other => other,
        },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_ends_a_wait_for_any_number_of_reads() {
        let arena = Arc::new(Arena::new(&[]).unwrap());
        let Ok(mut uring) = Uring::new(arena, Vec::new().into(), 8) else {
            eprintln!("skipped: no io_uring");
            return;
        };
        let (waker, mut ended) = (uring.waker(), Vec::new());
        // Without the wake these would wait for ever: nothing is under way.
        for min in [1, 8, 3, 8] {
            waker();
            uring.wait(min, &mut ended).unwrap();
            assert!(ended.is_empty());
        }
    }
}
