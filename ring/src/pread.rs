//! The device on pread: a few threads that each do one read at a time. For kernels without io_uring.

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
use crate::replica::Replicas;

/// What the threads and the waker tell the device's owner.
enum Message {
    Ended(Completion),
    Wake,
}

/// Threads that read.
pub struct Pread {
    work: Option<Sender<Op>>,
    done: Receiver<Message>,
    sender: Sender<Message>,
    threads: Vec<JoinHandle<()>>,
    start: Instant,
}

impl Pread {
    /// Starts `threads` reading threads.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn new(arena: Arc<Arena>, files: Arc<[Replicas]>, threads: usize) -> io::Result<Pread> {
        let (work, take) = channel::<Op>();
        let take = Arc::new(Mutex::new(take));
        let (sender, done) = channel();
        let threads = (0..threads)
            .map(|i| {
                let (arena, files) = (arena.clone(), files.clone());
                let (take, sender) = (take.clone(), sender.clone());
                std::thread::Builder::new()
                    .name(format!("pread-{i}"))
                    .spawn(move || {
                        loop {
                            let op = take.lock().expect("no reader panics").recv();
                            let Ok(op) = op else { return };
                            // A reader that panics must not leave its read unfinished for ever.
                            let result =
                                catch_unwind(AssertUnwindSafe(|| read(&arena, &files, &op)))
                                    .unwrap_or_else(|_| {
                                        Err(io::Error::other("the reading thread panicked"))
                                    });
                            if sender
                                .send(Message::Ended(Completion { id: op.id, result }))
                                .is_err()
                            {
                                return;
                            }
                        }
                    })
            })
            .collect::<io::Result<_>>()?;
        Ok(Pread {
            work: Some(work),
            done,
            sender,
            threads,
            start: Instant::now(),
        })
    }
}

fn read(arena: &Arena, files: &[Replicas], op: &Op) -> io::Result<u64> {
    let file = &files[op.file as usize][op.copy as usize].file;
    let direct = if op.direct { file.direct().ok() } else { None };
    let fd: BorrowedFd<'_> = direct.map_or(file.buffered_fd(), |(fd, _)| fd);
    let len = op.len.min(MAX_READ as u64);
    // SAFETY: `address` has checked that the bytes lie inside the slab; the scheduler hands them to one read at a time, and
    // nobody borrows them before that read has ended.
    let buf =
        unsafe { std::slice::from_raw_parts_mut(arena.address(op.slab, op.at, len), len as usize) };
    let read = rustix::io::pread(fd, buf, op.offset)?;
    if direct.is_none() {
        file.advise(op.offset, op.len, Advice::DontNeed);
    }
    Ok(read as u64)
}

impl Device for Pread {
    fn submit(&mut self, op: Op) {
        let work = self.work.as_ref().expect("only drop takes it");
        work.send(op)
            .expect("the threads live as long as the device");
    }

    fn wait(&mut self, min: usize, ended: &mut Vec<Completion>) -> io::Result<()> {
        let target = ended.len() + min;
        loop {
            let message = if ended.len() < target {
                self.done
                    .recv()
                    .map_err(|_| io::Error::other("the reading threads have ended"))?
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

    fn enters(&self) -> u64 {
        0
    }
}

impl Drop for Pread {
    fn drop(&mut self) {
        // The threads finish what was submitted, then see that nothing more comes.
        self.work = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
