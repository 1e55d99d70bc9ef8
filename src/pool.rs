//! Runs loops on a small pool of compute threads, which claim tiles by an atomic counter.
//!
//! The calling thread works too and never waits for a helper that has not started. A helper that wakes late, or is preempted between tiles,
//! costs its part of the work and nothing else. Idle helpers spin for a few microseconds, about the gap between two products of one
//! layer, and then sleep on a condition variable.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a helper polls for the next loop before it sleeps.
const SPIN_IDLE: Duration = Duration::from_micros(5);
/// How long the caller polls for the end of the helpers' last tiles before it sleeps.
const SPIN_DONE: Duration = Duration::from_micros(20);

/// `threads` compute threads, the calling one included. Dropping it joins the helpers.
pub struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

/// The state that the caller and the helpers share.
struct Shared {
    state: Mutex<Posted>,
    /// Signalled on a new loop, and to stop.
    work: Condvar,
    /// Signalled when the last helper leaves a loop.
    done: Condvar,
    /// Number of loops published so far. Written under `state`, read without it while spinning.
    epoch: AtomicUsize,
    /// Helpers inside the current loop. Written under `state`, read without it while spinning.
    active: AtomicUsize,
    /// A loop is running: a second one, nested or from another thread, runs inline.
    busy: AtomicBool,
}

/// The loop on offer, written under the lock.
struct Posted {
    /// The loop that helpers may enter.
    task: Option<TaskPtr>,
    sleeping: usize,
    stop: bool,
}

/// One parallel loop. It lives on the stack of [`Pool::run`].
struct Task<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    tiles: usize,
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A [`Task`] whose lifetime is erased. [`Pool::run`] keeps the task alive while any helper may use it.
#[derive(Clone, Copy)]
struct TaskPtr(*const Task<'static>);

// SAFETY: a Task may be shared by threads (its body is Sync, the rest are atomics and a mutex), and the pointer is
// only dereferenced where `Pool::run` guarantees that the task is alive.
unsafe impl Send for TaskPtr {}

impl Pool {
    /// A pool of `threads` threads (at least 1). When the system refuses a thread, the pool has fewer.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            state: Mutex::new(Posted {
                task: None,
                sleeping: 0,
                stop: false,
            }),
            work: Condvar::new(),
            done: Condvar::new(),
            epoch: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
        });
        let helpers = (1..threads)
            .map_while(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("compute-{i}"))
                    .spawn(move || shared.help())
                    .ok()
            })
            .collect();
        Pool { shared, helpers }
    }

    /// Number of threads, the calling one included.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `f(i)` once for every `i` in `0..tiles`, spread over the threads, and returns when all are done.
    ///
    /// A call from inside a tile, or while another thread is in `run`, does its loop on the calling thread.
    ///
    /// # Panics
    /// `f` panics: the first panic goes on in the caller once no thread is inside `f` any more. Tiles that no thread had claimed by then
    /// do not run.
    pub fn run(&self, tiles: usize, f: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        if tiles <= 1 || self.helpers.is_empty() || shared.busy.swap(true, Ordering::Acquire) {
            return (0..tiles).for_each(f);
        }
        let task = Task {
            body: f,
            tiles,
            next: AtomicUsize::new(0),
            panic: Mutex::new(None),
        };
        // Only the lifetime is erased. The pointer is published here and withdrawn in `retire`, which returns when
        // no helper is inside the task and none can enter it; nothing between the two unwinds.
        shared.publish(TaskPtr((&raw const task).cast()), tiles - 1);
        task.work();
        shared.retire();
        shared.busy.store(false, Ordering::Release);
        let panic = task
            .panic
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Calls `f(i, chunk)` once for every chunk of `len` elements of `data` (the last may be shorter), spread over
    /// the threads: [`Pool::run`] for loops whose tiles write to disjoint parts of `data`.
    ///
    /// # Panics
    /// `f` panics, as for [`Pool::run`], or `len` is 0.
    pub fn run_chunks<T: Send>(
        &self,
        data: &mut [T],
        len: usize,
        f: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        struct Base<T>(*mut T);
        // SAFETY: the threads get disjoint parts of a `&mut [T]`, and T may move between threads.
        unsafe impl<T: Send> Sync for Base<T> {}
        impl<T> Base<T> {
            fn at(&self, i: usize) -> *mut T {
                self.0.wrapping_add(i)
            }
        }

        let total = data.len();
        let base = Base(data.as_mut_ptr());
        self.run(total.div_ceil(len), &|i| {
            let start = i * len;
            // SAFETY: `run` passes every i below ceil(total / len) once, so start < total, the ranges
            // start..min(start + len, total) are disjoint parts of `data`, and `data` is borrowed until `run` returns.
            let chunk =
                unsafe { std::slice::from_raw_parts_mut(base.at(start), len.min(total - start)) };
            f(i, chunk);
        });
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Posted> {
        // Nothing that can panic runs under this lock, so a poisoned state is still a valid one.
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn publish(&self, task: TaskPtr, helpers: usize) {
        let mut state = self.lock();
        state.task = Some(task);
        self.epoch.fetch_add(1, Ordering::Relaxed);
        let sleeping = state.sleeping;
        drop(state);
        for _ in 0..helpers.min(sleeping) {
            self.work.notify_one();
        }
    }

    /// Closes the loop to helpers and waits for those inside.
    fn retire(&self) {
        self.lock().task = None;
        // A helper enters under the lock, so `active` can only fall from here on. The Acquire pairs with the
        // Release of the helper's last step: what its tiles wrote is visible.
        if spin(SPIN_DONE, || self.active.load(Ordering::Acquire) == 0) {
            return;
        }
        let mut state = self.lock();
        while self.active.load(Ordering::Acquire) != 0 {
            state = self
                .done
                .wait(state)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Helps with one loop after another, until the pool stops: the body of a helper thread.
    fn help(&self) {
        let mut seen = 0;
        while let Some(task) = self.next_task(&mut seen) {
            // SAFETY: this helper was counted in `active` under the lock while the task was published, and the
            // task's owner waits in `retire` until that count is zero.
            unsafe { &*task.0 }.work();
            let state = self.lock();
            let left = self.active.fetch_sub(1, Ordering::Release) - 1;
            drop(state);
            if left == 0 {
                self.done.notify_one();
            }
        }
    }

    /// Waits for a loop newer than `seen` and enters it; `None` when the pool stops.
    fn next_task(&self, seen: &mut usize) -> Option<TaskPtr> {
        spin(SPIN_IDLE, || self.epoch.load(Ordering::Relaxed) != *seen);
        let mut state = self.lock();
        loop {
            if state.stop {
                return None;
            }
            let epoch = self.epoch.load(Ordering::Relaxed);
            if epoch != *seen {
                *seen = epoch;
                if let Some(task) = state.task {
                    self.active.fetch_add(1, Ordering::Relaxed);
                    return Some(task);
                }
            }
            state.sleeping += 1;
            state = self
                .work
                .wait(state)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            state.sleeping -= 1;
        }
    }
}

impl Task<'_> {
    /// Claims and runs tiles until none is left. Never unwinds.
    fn work(&self) {
        loop {
            let tile = self.next.fetch_add(1, Ordering::Relaxed);
            if tile >= self.tiles {
                return;
            }
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (self.body)(tile))) {
                self.next.store(self.tiles, Ordering::Relaxed);
                let mut first = self
                    .panic
                    .lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                if first.is_none() {
                    *first = Some(payload);
                } else if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
                    // Dropping this one might panic without end.
                    std::mem::forget(again);
                }
            }
        }
    }
}

/// Polls `done` for at most `limit`, and returns its last answer.
fn spin(limit: Duration, done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..8 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() >= limit {
            return done();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper never unwinds, so its result is always Ok.
            let _ = helper.join();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Miri, which checks these tests for data races (docs/contributing.md), is slow.
    const ROUNDS: usize = if cfg!(miri) { 20 } else { 20_000 };

    fn counts(pool: &Pool, tiles: usize) -> Vec<usize> {
        let counts: Vec<_> = (0..tiles).map(|_| AtomicUsize::new(0)).collect();
        pool.run(tiles, &|i| {
            counts[i].fetch_add(1, Ordering::Relaxed);
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_tile_runs_once() {
        for threads in [0, 1, 2, 3, 8] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads.max(1));
            for tiles in [0, 1, 2, 3, 17, ROUNDS.min(1000)] {
                assert!(counts(&pool, tiles).iter().all(|&n| n == 1));
            }
        }
    }

    #[test]
    fn loops_back_to_back_and_after_sleep() {
        let pool = Pool::new(4);
        for round in 0..ROUNDS {
            let sum = AtomicUsize::new(0);
            pool.run(round % 7, &|i| {
                sum.fetch_add(i + 1, Ordering::Relaxed);
            });
            let tiles = round % 7;
            assert_eq!(sum.into_inner(), tiles * (tiles + 1) / 2);
            if round % (ROUNDS / 20) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn nested_and_concurrent_loops_run_inline() {
        let pool = Pool::new(3);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..ROUNDS / 100 + 1 {
                        let sum = AtomicUsize::new(0);
                        pool.run(5, &|_| {
                            pool.run(7, &|_| {
                                sum.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                        assert_eq!(sum.into_inner(), 35);
                    }
                });
            }
        });
    }

    #[test]
    fn chunks_are_disjoint_and_complete() {
        let pool = Pool::new(3);
        for (total, len) in [(0, 4), (1, 4), (4, 4), (5, 4), (ROUNDS.min(1000) + 1, 10)] {
            let mut data = vec![0usize; total];
            pool.run_chunks(&mut data, len, &|i, chunk| {
                for (k, value) in chunk.iter_mut().enumerate() {
                    *value += i * len + k + 1;
                }
            });
            assert!(data.iter().enumerate().all(|(i, &value)| value == i + 1));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(4);
        for round in 0..ROUNDS / 100 + 1 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(50, &|i| assert_ne!(i, round % 50, "tile {i}"));
            }));
            let payload = result.unwrap_err();
            let message = payload.downcast_ref::<String>().unwrap();
            assert!(message.contains(&format!("tile {}", round % 50)));
            assert!(counts(&pool, 50).iter().all(|&n| n == 1));
        }
        let all = catch_unwind(AssertUnwindSafe(|| pool.run(50, &|_| panic!("all"))));
        assert!(all.is_err());
    }
}
