//! Holds requests until the engine takes them up.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::request::{Event, Refusal, Request};

/// A request that waits.
#[derive(Debug)]
pub struct Submission {
    pub request: Request,
    pub events: UnboundedSender<Event>,
    /// The client wants no more tokens.
    pub enough: Arc<AtomicBool>,
    pub at: Instant,
}

/// Requests in order of arrival, as many as may wait.
#[derive(Debug)]
pub struct Queue {
    capacity: usize,
    state: Mutex<State>,
    /// Something arrived, or no more will.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Submission>,
    closed: bool,
}

/// What [`Queue::wait`] waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// There is a request.
    Request,
    /// There is none, and none will come.
    Closed,
    /// There was none for the given time.
    Idle,
}

impl Queue {
    pub fn new(capacity: usize) -> Queue {
        Queue {
            capacity,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request at the end. `idle` requests are taken up at once, and do not count.
    ///
    /// # Errors
    /// [`Refusal::Full`] and [`Refusal::Draining`].
    pub fn push(&self, submission: Submission, idle: usize) -> Result<(), Refusal> {
        let mut state = self.state();
        if state.closed {
            return Err(Refusal::Draining);
        }
        let limit = self.capacity.saturating_add(idle);
        if state.waiting.len() >= limit {
            state.waiting.retain(|waiting| !waiting.events.is_closed());
        }
        if state.waiting.len() >= limit {
            let waiting = state.waiting.len();
            return Err(Refusal::Full { waiting });
        }
        state.waiting.push_back(submission);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// The next request whose client is there; `None` if there is none now.
    pub fn pop(&self) -> Option<Submission> {
        let mut state = self.state();
        loop {
            let next = state.waiting.pop_front()?;
            if !next.events.is_closed() {
                return Some(next);
            }
        }
    }

    /// Puts a request back to the front.
    pub fn put_back(&self, submission: Submission) {
        self.state().waiting.push_front(submission);
    }

    /// Waits until a request is there or none will come, for `time` at most.
    pub fn wait(&self, time: Option<Duration>) -> Waited {
        let state = self.state();
        let empty = |state: &mut State| state.waiting.is_empty() && !state.closed;
        // A year is as good as for ever.
        let time = time.unwrap_or(Duration::from_secs(365 * 24 * 3600));
        let waited = self.changed.wait_timeout_while(state, time, empty);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        match state.waiting.is_empty() {
            false => Waited::Request,
            true if timeout.timed_out() => Waited::Idle,
            true => Waited::Closed,
        }
    }

    /// Takes no more requests.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.state().waiting.len()
    }
}
