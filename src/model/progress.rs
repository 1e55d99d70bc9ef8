//! Reports the progress of a prompt to an observer.

use std::fmt;

/// How much of a prompt is computed. All rows of a slice go through a layer together, so steps are counted instead of tokens: a
/// step is one expert of one token, or an equal part of the rest of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Steps computed so far.
    pub done: u64,
    /// Steps of the prompt, at least 1.
    pub all: u64,
}

/// Counts steps and calls the observer.
#[derive(Default)]
pub struct Meter {
    observer: Option<Box<dyn FnMut(Progress) + Send>>,
    /// Steps of the running prompt; `None` while tokens are decoded.
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
    /// Replaces the observer.
    pub fn observe(&mut self, observer: Box<dyn FnMut(Progress) + Send>) {
        self.observer = Some(observer);
    }

    /// Begins a prompt of `steps` steps.
    pub fn start(&mut self, steps: usize) {
        self.progress = Some(Progress {
            done: 0,
            all: (steps as u64).max(1),
        });
    }

    /// Counts `steps` more. Those of the prediction layer exceed the announced number and are cut off.
    pub fn add(&mut self, steps: usize) {
        if let (Some(progress), Some(observer)) = (&mut self.progress, &mut self.observer) {
            progress.done = (progress.done + steps as u64).min(progress.all);
            observer(*progress);
        }
    }

    /// Ends the prompt.
    pub fn stop(&mut self) {
        self.progress = None;
    }
}
