//! Watches a pass from inside: reports the progress of prompts, and stops the pass when all of its clients are gone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::request::Event;
use crate::model::Progress;

/// Time between two reports.
const INTERVAL: Duration = Duration::from_secs(1);

/// A request in the pass.
#[derive(Debug)]
pub struct Watched {
    pub events: UnboundedSender<Event>,
    /// Tokens of the prompt that are known, that the pass computes, and in all.
    pub done: usize,
    pub rows: usize,
    pub all: usize,
}

/// The requests of the running pass.
#[derive(Clone, Debug)]
pub struct Watch {
    pass: Arc<Mutex<Vec<Watched>>>,
    stop: Arc<AtomicBool>,
}

impl Watch {
    /// `stop` ends the running pass.
    pub fn new(stop: Arc<AtomicBool>) -> Watch {
        let pass = Arc::default();
        Watch { pass, stop }
    }

    /// Replaces the requests. Not called while a pass runs.
    pub fn set(&self, requests: Vec<Watched>) {
        *self.pass.lock().unwrap_or_else(PoisonError::into_inner) = requests;
    }

    /// What the runner tells its progress.
    pub fn observer(&self) -> impl FnMut(Progress) + Send + 'static {
        let watch = self.clone();
        let mut last = Instant::now();
        move |progress| {
            let pass = watch.pass.lock().unwrap_or_else(PoisonError::into_inner);
            if !pass.is_empty() && pass.iter().all(|request| request.events.is_closed()) {
                watch.stop.store(true, Ordering::Relaxed);
            }
            if last.elapsed() < INTERVAL {
                return;
            }
            last = Instant::now();
            for request in pass.iter().filter(|request| request.all > request.done) {
                let share = progress.done as f64 / progress.all as f64;
                let done = request.done + (request.rows as f64 * share) as usize;
                let all = request.all;
                let _ = request.events.send(Event::Prompt { done, all });
            }
        }
    }
}
