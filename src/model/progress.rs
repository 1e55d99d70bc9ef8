//! How far a prompt has come, for whoever waits for it.

use std::fmt;

/// How much of a prompt is computed. All tokens of a slice go through a layer together, so that what is counted are not tokens: a
/// step is one expert of one token, or as much of its way through the rest of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Steps that are done.
    pub done: u64,
    /// Steps of the prompt, at least 1.
    pub all: u64,
}

/// Counts steps, and tells who wants to know.
#[derive(Default)]
pub struct Meter {
    observer: Option<Box<dyn FnMut(Progress) + Send>>,
    /// Those of the running prompt; of nothing else.
    progress: Option<Progress>,
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter")
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

impl Meter {
    /// From now on tells this one.
    pub fn observe(&mut self, observer: Box<dyn FnMut(Progress) + Send>) {
        self.observer = Some(observer);
    }

    /// A prompt of so many steps begins.
    pub fn start(&mut self, steps: usize) {
        self.progress = Some(Progress {
            done: 0,
            all: (steps as u64).max(1),
        });
    }

    /// So many more are done. The prediction layer's are beyond what was announced.
    pub fn add(&mut self, steps: usize) {
        if let (Some(progress), Some(observer)) = (&mut self.progress, &mut self.observer) {
            progress.done = (progress.done + steps as u64).min(progress.all);
            observer(*progress);
        }
    }

    /// The prompt is computed, or will not be.
    pub fn stop(&mut self) {
        self.progress = None;
    }
}
