//! Reads with pread on a few threads, one read at a time each: for kernels and file systems without io_uring.

use std::io;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::arena::Arena;
use crate::device::{Completion, Device, Op, Waker};
use crate::file::{Advice, MAX_READ};
use crate::kernel::{DeviceError, KernelCall, KernelError};
use crate::replica::Replicas;

/// What the threads and the waker send to the device's owner.
enum Message {
    Ended(Completion),
    Wake,
}

/// Carries one op out.
type ReadOp = fn(&Arena, &[Replicas], &Op) -> io::Result<u64>;

/// A pool of reading threads.
pub(crate) struct Pread {
    work: Option<Sender<Op>>,
    done: Receiver<Message>,
    sender: Sender<Message>,
    threads: Vec<JoinHandle<()>>,
    start: Instant,
}

impl Pread {
    /// Starts `threads` reading threads. Each calls `notify`, if there is one, after every read.
    pub(crate) fn new(
        arena: &Arc<Arena>,
        files: &Arc<[Replicas]>,
        threads: usize,
        notify: Option<&Waker>,
    ) -> Result<Pread, KernelError> {
        Pread::with(read, arena, files, threads, notify)
    }

    /// [`Pread::new`] with another function than pread, which keeps the contract of a [`Device`].
    pub(crate) fn with(
        read: ReadOp,
        arena: &Arc<Arena>,
        files: &Arc<[Replicas]>,
        threads: usize,
        notify: Option<&Waker>,
    ) -> Result<Pread, KernelError> {
        let (work, take) = channel::<Op>();
        let take = Arc::new(Mutex::new(take));
        let (sender, done) = channel();
        let mut pool = Pread {
            work: Some(work),
            done,
            sender,
            threads: Vec::new(),
            start: Instant::now(),
        };
        for i in 0..threads {
            let reader = Reader {
                read,
                arena: arena.clone(),
                files: files.clone(),
                take: take.clone(),
                sender: pool.sender.clone(),
                notify: notify.cloned(),
            };
            let thread = std::thread::Builder::new()
                .name(format!("pread-{i}"))
                .spawn(move || reader.run())
                .map_err(|e| KernelError::new(KernelCall::Spawn, &e))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }
}

/// What a reading thread owns.
struct Reader {
    read: ReadOp,
    arena: Arc<Arena>,
    files: Arc<[Replicas]>,
    take: Arc<Mutex<Receiver<Op>>>,
    sender: Sender<Message>,
    notify: Option<Waker>,
}

impl Reader {
    fn run(self) {
        loop {
            let op = self.take.lock().expect("no reader panics").recv();
            let Ok(op) = op else { return };
            // A read that panics ends with an error: the owner waits for its end.
            let result = catch_unwind(AssertUnwindSafe(|| {
                (self.read)(&self.arena, &self.files, &op)
            }))
            .unwrap_or_else(|_| Err(io::Error::other("the reading thread panicked")));
            let ended = Message::Ended(Completion { id: op.id, result });
            if self.sender.send(ended).is_err() {
                return;
            }
            if let Some(notify) = &self.notify {
                notify();
            }
        }
    }
}

fn read(arena: &Arena, files: &[Replicas], op: &Op) -> io::Result<u64> {
    let file = &files[op.file as usize][op.copy as usize].file;
    let direct = if op.direct {
        file.direct_fd().ok()
    } else {
        None
    };
    let fd: BorrowedFd<'_> = direct.map_or(file.buffered_fd(), |(fd, _)| fd);
    let len = op.len.min(MAX_READ as u64);
    let address = arena.address(op.slab, op.slab_offset, len);
    // SAFETY: `address` has checked that the bytes lie inside the slab. By the contract of `submit` nothing else uses them
    // before the completion, which is sent after this borrow.
    let buf = unsafe { std::slice::from_raw_parts_mut(address, len as usize) };
    let read = rustix::io::pread(fd, buf, op.offset)?;
    if direct.is_none() {
        file.advise(op.offset, op.len, Advice::DontNeed);
    }
    Ok(read as u64)
}

// SAFETY: `read` writes only the bytes of its op, before the completion is sent; drop joins all threads.
unsafe impl Device for Pread {
    unsafe fn submit(&mut self, op: Op) -> Result<(), DeviceError> {
        let work = self.work.as_ref().expect("only drop takes it");
        work.send(op).map_err(|_| DeviceError::Panicked)
    }

    fn wait(&mut self, min: usize, ended: &mut Vec<Completion>) -> Result<(), DeviceError> {
        let target = ended.len() + min;
        loop {
            let message = if ended.len() < target {
                self.done.recv().map_err(|_| DeviceError::Panicked)?
            } else if let Ok(message) = self.done.try_recv() {
                message
            } else {
                return Ok(());
            };
            match message {
                Message::Ended(completion) => ended.push(completion),
                Message::Wake => return Ok(()),
            }
        }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn waker(&self) -> Waker {
        let sender = Mutex::new(self.sender.clone());
        Arc::new(move || {
            let _ = sender.lock().expect("no waker panics").send(Message::Wake);
        })
    }

    fn syscalls(&self) -> u64 {
        0
    }
}

impl Drop for Pread {
    fn drop(&mut self) {
        // The threads finish the reads that they have, then see that no more come.
        self.work = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
