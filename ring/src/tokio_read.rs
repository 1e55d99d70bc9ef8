//! Reads through tokio-uring as an async program does, for comparison with the [`Engine`](crate::Engine): a task and a buffer for
//! each read, no registration.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::task::JoinSet;
use tokio_uring::buf::BoundedBuf;

use crate::probe::try_ring;
use crate::region::SLAB_ALIGN;
use crate::replica::Files;
use crate::stats::latencies;

/// A read: index of the file, offset and length in bytes.
pub type Block = (u32, u64, u64);

/// Counts of the measured time.
#[derive(Debug)]
pub struct Reads {
    /// Measured time.
    pub elapsed: Duration,
    /// Processor time in it.
    pub cpu: Duration,
    /// Bytes read.
    pub bytes: u64,
    /// Time of each read, in microseconds.
    pub latency_us: Histogram<u64>,
}

/// State of all tasks, which run on one thread.
struct Shared<N, C> {
    next: N,
    cpu: C,
    buffers: VecDeque<Vec<u8>>,
    counting: Option<(Instant, Duration)>,
    done: Option<(Duration, Duration)>,
    bytes: u64,
    latency_us: Histogram<u64>,
}

/// Offset of the first byte of `buf` that O_DIRECT can read into.
fn aligned(buf: &[u8]) -> usize {
    buf.as_ptr().align_offset(SLAB_ALIGN)
}

/// Keeps `depth` reads in flight for `warm_up` and then for `time`, from the first copy of each file, into `places` buffers of
/// `longest` bytes in turn (at least `depth` of them). `next` returns the next read, `cpu` the processor time so far.
///
/// # Errors
/// When there is no io_uring, or a read fails.
pub fn read(
    files: &Files,
    depth: usize,
    (places, longest): (usize, u64),
    (warm_up, time): (Duration, Duration),
    next: impl FnMut() -> Block + 'static,
    cpu: impl Fn() -> Duration + 'static,
) -> io::Result<Reads> {
    let entries = (depth.max(8) * 2).next_power_of_two() as u32;
    // A runtime waits for ever if its ring cannot be entered.
    try_ring()?;
    let runtime = tokio_uring::Runtime::new(tokio_uring::builder().entries(entries))?;
    let opened = (files.replicas.iter().zip(&files.access))
        .map(|(copies, access)| {
            let (Some(copy), Some(access)) = (copies.first(), access.first()) else {
                return Err(io::Error::from(io::ErrorKind::NotFound));
            };
            let fd = match (access.is_direct(), copy.file.direct_fd()) {
                (true, Ok((fd, _))) => fd,
                _ => copy.file.buffered_fd(),
            };
            Ok(std::fs::File::from(fd.try_clone_to_owned()?))
        })
        .collect::<io::Result<Vec<_>>>()?;
    let shared = Rc::new(RefCell::new(Shared {
        next,
        cpu,
        buffers: VecDeque::new(),
        counting: None,
        done: None,
        bytes: 0,
        latency_us: latencies(),
    }));
    // Touched before the measured time.
    let capacity = longest as usize + SLAB_ALIGN;
    let buffers: VecDeque<Vec<u8>> = (0..places.max(depth)).map(|_| vec![1; capacity]).collect();
    shared.borrow_mut().buffers = buffers;
    let start = Instant::now();
    let for_tasks = shared.clone();
    runtime.block_on(async move {
        let opened: Rc<Vec<_>> = Rc::new(
            opened
                .into_iter()
                .map(tokio_uring::fs::File::from_std)
                .collect(),
        );
        let mut tasks = JoinSet::new();
        for _ in 0..depth {
            let (opened, shared) = (opened.clone(), for_tasks.clone());
            tasks.spawn_local(async move {
                loop {
                    let (file, offset, len) = (shared.borrow_mut().next)();
                    let buf = shared.borrow_mut().buffers.pop_front();
                    let buf = buf.expect("one for each task at least");
                    let at = aligned(&buf);
                    let since = Instant::now();
                    let slice = buf.slice(at..at + len as usize);
                    let (read, slice) = opened[file as usize].read_at(slice, offset).await;
                    shared.borrow_mut().buffers.push_back(slice.into_inner());
                    let (read, now) = (read?, Instant::now());
                    let mut shared = shared.borrow_mut();
                    let shared = &mut *shared;
                    match shared.counting {
                        None if now >= start + warm_up => {
                            shared.counting = Some((now, (shared.cpu)()));
                        }
                        None => {}
                        Some((begin, cpu)) if shared.done.is_none() => {
                            shared.bytes += read as u64;
                            let latency = (now - since).as_micros() as u64;
                            shared.latency_us.saturating_record(latency);
                            if now >= begin + time {
                                shared.done = Some((now - begin, (shared.cpu)() - cpu));
                            }
                        }
                        Some(_) => {}
                    }
                    if shared.done.is_some() {
                        return Ok::<(), io::Error>(());
                    }
                }
            });
        }
        let mut outcome = Ok(());
        while let Some(task) = tasks.join_next().await {
            let task = task.unwrap_or_else(|e| std::panic::resume_unwind(e.into_panic()));
            if task.is_err() {
                outcome = task;
                break;
            }
        }
        outcome
    })?;
    let shared = shared.borrow();
    let (elapsed, cpu) = shared.done.unwrap_or_default();
    Ok(Reads {
        elapsed,
        cpu,
        bytes: shared.bytes,
        latency_us: shared.latency_us.clone(),
    })
}
