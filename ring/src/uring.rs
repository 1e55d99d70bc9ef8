//! Reads through io_uring: READ_FIXED into registered slabs, registered files, batched submission.

use std::fs::File as StdFile;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, cqueue, opcode, squeue};

use crate::arena::Arena;
use crate::device::{Completion, Device, Op, Waker};
use crate::file::{Advice, MAX_READ};
use crate::kernel::{DeviceError, KernelCall, KernelError};
use crate::limits;
use crate::replica::Replicas;

/// `user_data` of the polls on the eventfd that other threads wake the ring by.
const WAKE: u64 = u64::MAX;

/// How long the kernel may refuse to take entries (EAGAIN, EBUSY) before reading stops with its error.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pause between two attempts while it refuses them.
const PAUSE: Duration = Duration::from_millis(1);

// A process that makes many rings meets the same limit each time and warns once.
static FILES_REFUSED: Once = Once::new();
static REGIONS_REFUSED: Once = Once::new();

/// An io_uring that belongs to the thread that made it.
pub(crate) struct Uring {
    ring: IoUring,
    arena: Arc<Arena>,
    files: Arc<[Replicas]>,
    /// Index in the registered files of the first copy of each file; two entries a copy, buffered and direct.
    first_slot: Option<Vec<u32>>,
    /// The first so many regions of the arena are registered.
    registered: usize,
    wake: Arc<StdFile>,
    /// Polls on the eventfd that have not ended.
    polls: usize,
    /// Reads that have not ended, by id.
    ops: Vec<Option<Op>>,
    in_flight: usize,
    /// Scratch for the completion queue.
    entries: Vec<cqueue::Entry>,
    syscalls: u64,
    start: Instant,
    /// Since when the kernel has refused entries.
    refused: Option<Instant>,
    patience: Duration,
}

impl Uring {
    /// Makes a ring for `entries` reads at once, on the thread that will use it. Files and regions that the kernel does not
    /// register (limits on descriptors or locked memory) are read unregistered, with one warning.
    pub(crate) fn new(
        arena: Arc<Arena>,
        files: Arc<[Replicas]>,
        entries: usize,
    ) -> Result<Uring, KernelError> {
        let setup = |e: &io::Error| KernelError::new(KernelCall::Setup, e);
        // As many again for the polls on the eventfd.
        let ring = build((2 * entries.max(1)).next_power_of_two() as u32).map_err(|e| setup(&e))?;
        let wake = rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
        )
        .map_err(|e| setup(&e.into()))?;
        // A seccomp filter may allow a process to make rings and forbid it to enter them.
        ring.submit()
            .map_err(|e| KernelError::new(KernelCall::Enter, &e))?;
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
            syscalls: 0,
            start: Instant::now(),
            refused: None,
            patience: PATIENCE,
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
                fds.push(
                    replica
                        .file
                        .direct_fd()
                        .map_or(-1, |(fd, _)| fd.as_raw_fd()),
                );
            }
        }
        match self.ring.submitter().register_files(&fds) {
            Ok(()) => self.first_slot = Some(first_slot),
            Err(e) => FILES_REFUSED.call_once(|| {
                let error = KernelError::new(KernelCall::RegisterFiles, &e);
                tracing::warn!("files are not registered with io_uring: {error}");
            }),
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
                    let fewer_may_fit = e.raw_os_error() == Some(libc::ENOMEM);
                    refused = Some(KernelError::new(KernelCall::RegisterBuffers, &e));
                    // Every attempt touches what it registers, so few are made.
                    count = if fewer_may_fit { count / 2 } else { 0 };
                }
            }
        }
        if let Some(error) = refused {
            let (some, all) = (self.registered, regions.len());
            REGIONS_REFUSED.call_once(|| {
                tracing::warn!(
                    "{some} of {all} slab regions are registered with io_uring: {error}"
                );
            });
        }
    }

    fn read_entry(&self, op: &Op) -> squeue::Entry {
        let address = self.arena.address(op.slab, op.slab_offset, op.len);
        let len = op.len.min(MAX_READ as u64) as u32;
        let region = self.arena.region_of(op.slab);
        let fixed_buffer = (region < self.registered).then_some(region as u16);
        let replica = &self.files[op.file as usize][op.copy as usize];
        let fd = match (op.direct, replica.file.direct_fd()) {
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

    /// Queues a read.
    ///
    /// # Safety
    /// As [`Device::submit`].
    unsafe fn push_read(&mut self, op: &Op) -> Result<(), KernelError> {
        let entry = self.read_entry(op);
        // SAFETY: the memory belongs to a slab of the arena, which the ring holds until it has drained; `Arena::address` has
        // checked the bounds, and the caller promises that nothing else uses these bytes.
        unsafe { self.push(&entry) }
    }

    /// Queues a poll on the eventfd.
    fn push_poll(&mut self) -> Result<(), KernelError> {
        let poll = opcode::PollAdd::new(Fd(self.wake.as_raw_fd()), libc::POLLIN as u32);
        // SAFETY: a poll touches no memory, and the ring holds the eventfd.
        unsafe { self.push(&poll.build().user_data(WAKE))? };
        self.polls += 1;
        Ok(())
    }

    /// # Safety
    /// Whatever the entry refers to is valid until its completion.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> Result<(), KernelError> {
        // SAFETY: as the caller promises.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            // The queue holds all reads that may be in flight, so it is full only of entries that the kernel has not taken yet.
            self.enter(0)?;
        }
        Ok(())
    }

    /// One io_uring_enter: submits the queued entries and waits for `min` completions. May return early.
    fn enter(&mut self, min: usize) -> Result<(), KernelError> {
        self.syscalls += 1;
        let error = match self.ring.submit_and_wait(min) {
            Ok(_) => {
                self.refused = None;
                return Ok(());
            }
            Err(error) => error,
        };
        match error.raw_os_error() {
            // A signal ended the wait.
            Some(libc::EINTR) => return Ok(()),
            // These pass: completions have to be reaped first, or memory is short.
            Some(libc::EBUSY | libc::EAGAIN) => {
                let since = *self.refused.get_or_insert_with(Instant::now);
                if since.elapsed() < self.patience {
                    if self.ring.completion().is_empty() {
                        thread::sleep(PAUSE);
                    }
                    return Ok(());
                }
            }
            _ => {}
        }
        Err(KernelError::new(KernelCall::Enter, &error))
    }

    fn reap(&mut self, ended: &mut Vec<Completion>) {
        // The queue borrows the ring, so its entries are taken out first.
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
            .expect("only submitted reads end");
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

// SAFETY: the kernel writes into the bytes of a read until its completion, which `reap` returns; drop waits for all completions or
// leaks the arena.
unsafe impl Device for Uring {
    unsafe fn submit(&mut self, op: Op) -> Result<(), DeviceError> {
        // SAFETY: the caller keeps the contract.
        unsafe { self.push_read(&op)? };
        let id = op.id as usize;
        if self.ops.len() <= id {
            self.ops.resize(id + 1, None);
        }
        self.ops[id] = Some(op);
        self.in_flight += 1;
        Ok(())
    }

    fn wait(&mut self, min: usize, ended: &mut Vec<Completion>) -> Result<(), DeviceError> {
        // The kernel counts completions of any kind, so as many polls end with a wake as reads are waited for.
        while self.polls < min.max(1) {
            self.push_poll()?;
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
            // Fails only when the counter is full, which wakes the ring as well.
            let _ = (&*wake).write(&1u64.to_ne_bytes());
        })
    }

    fn syscalls(&self) -> u64 {
        self.syscalls
    }
}

impl Drop for Uring {
    /// The kernel goes on writing into slabs after a ring is closed, so this waits for all reads.
    fn drop(&mut self) {
        let mut ended = Vec::new();
        while self.in_flight > 0 {
            if let Err(e) = self.enter(1) {
                // Nothing tells when the reads end, so the memory is never freed.
                // The owner has the same error from the read that it waited for.
                tracing::debug!(
                    "the memory of the slabs is leaked, because reads cannot be waited for: {e}"
                );
                std::mem::forget(self.arena.clone());
                return;
            }
            self.reap(&mut ended);
        }
        // The kernel tears a closed ring down later, on a thread of its own. Until then registered files would keep their file system from
        // being unmounted, and registered memory would stay pinned.
        let submitter = self.ring.submitter();
        if self.first_slot.is_some() {
            let _ = submitter.unregister_files();
        }
        if self.registered > 0 {
            let _ = submitter.unregister_buffers();
        }
    }
}

/// Makes the most capable ring that this kernel has. Single issuer and deferred task work run completions on the thread that asks
/// for them. Each attempt needs an older kernel than the one before it.
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
    use crate::arena::{Class, SlabId};
    use crate::denied::deny;
    use crate::file::File;
    use crate::replica::Replica;

    fn uring(files: Vec<Replicas>) -> Option<Uring> {
        let class = Class {
            bytes: 4096,
            count: 8,
        };
        let arena = Arc::new(Arena::new(&[class]).unwrap());
        let uring = Uring::new(arena, files.into(), 8).ok();
        if uring.is_none() {
            eprintln!("skipped: no io_uring");
        }
        uring
    }

    #[test]
    fn a_wake_ends_a_wait_for_any_number_of_reads() {
        let Some(mut uring) = uring(Vec::new()) else {
            return;
        };
        let (waker, mut ended) = (uring.waker(), Vec::new());
        // Nothing is in flight, so that only a wake ends these.
        for min in [1, 8, 3, 8] {
            waker();
            uring.wait(min, &mut ended).unwrap();
            assert!(ended.is_empty());
        }
    }

    #[test]
    fn a_kernel_that_refuses_entries_for_ever_is_an_error() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        temp.as_file().set_len(4096).unwrap();
        for errno in [libc::EAGAIN, libc::EBUSY, libc::EPERM] {
            let file = Arc::new(File::open(temp.path()).unwrap());
            // The filter stays with its thread, and ends with it.
            let refused = thread::spawn(move || {
                let mut uring = uring(vec![vec![Replica::new(file, 0)]])?;
                uring.patience = Duration::from_millis(20);
                deny(libc::SYS_io_uring_enter, errno);
                let op = |id| Op {
                    id,
                    file: 0,
                    copy: 0,
                    direct: false,
                    offset: 0,
                    len: 4096,
                    slab: SlabId(id % 8),
                    slab_offset: 0,
                };
                // SAFETY: nothing borrows the slabs, and the kernel takes none of these.
                let full = (0..1000).find_map(|id| unsafe { uring.submit(op(id)) }.err());
                let waited = (0..1000).find_map(|_| uring.wait(1, &mut Vec::new()).err());
                // Dropping it ends, too.
                Some([full, waited])
            });
            let Some(refused) = refused.join().unwrap() else {
                return;
            };
            let call = KernelCall::Enter;
            let error = DeviceError::Kernel(KernelError { call, errno });
            assert_eq!(refused, [Some(error); 2]);
        }
    }
}
