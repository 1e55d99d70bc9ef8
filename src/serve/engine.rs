//! Starts the engine's thread, and gives it requests.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::beginnings::Beginnings;
use super::metrics::Metrics;
use super::queue::{Queue, Submission};
use super::request::{Event, Refusal, Request};
use super::scheduler::Scheduler;
use crate::model::ModelError;
use crate::runtime::kv_file::Fingerprint;
use crate::runtime::{Source, TextRunner};

/// How requests are scheduled.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Requests in a pass at most, at least 1.
    pub parallel: usize,
    /// Requests that may wait.
    pub queue: usize,
    /// Tokens of a request's context.
    pub context: usize,
    /// How long a pass with rows of a prompt may take while others decode.
    pub max_stall: Duration,
    /// Where beginnings of prompts are kept over restarts, and what they depend on.
    pub kept: Option<(PathBuf, Fingerprint)>,
    /// The directories that the runner reads, as [`Model::sources`](crate::Model::sources) lists them.
    pub sources: Vec<Source>,
}

/// Where the events of a request arrive. Dropping it cancels the request.
#[derive(Debug)]
pub struct Ticket {
    events: UnboundedReceiver<Event>,
    enough: Arc<AtomicBool>,
}

impl Ticket {
    /// The next event; `None` after the last one.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// Ends the text as a stop token does. A few more tokens may come before [`Event::End`].
    pub fn finish(&self) {
        self.enough.store(true, Ordering::Relaxed);
    }

    /// As [`Ticket::next`], for threads without a runtime.
    pub fn wait(&mut self) -> Option<Event> {
        self.events.blocking_recv()
    }
}

/// A model that serves requests on a thread of its own.
#[derive(Debug)]
pub struct Engine {
    queue: Arc<Queue>,
    metrics: Arc<Metrics>,
    /// No running request is finished.
    ending: Arc<AtomicBool>,
    /// Ends the running pass.
    stop: Arc<AtomicBool>,
    options: EngineOptions,
    vocabulary: usize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts serving with `runner`, whose passes `stop` ends: the flag of [`RunOptions::stop`](crate::RunOptions).
    ///
    /// # Errors
    /// The thread cannot be started, or the directory of beginnings cannot be used.
    pub fn start(
        mut runner: TextRunner,
        stop: Arc<AtomicBool>,
        options: EngineOptions,
    ) -> io::Result<Engine> {
        let queue = Arc::new(Queue::new(options.queue));
        let mut beginnings = match &options.kept {
            Some((dir, fingerprint)) => Some(Beginnings::open(dir, *fingerprint)?),
            None => None,
        };
        if let Some(beginnings) = &mut beginnings {
            beginnings.restore(&mut runner);
        }
        let (metrics, ending) = (Arc::<Metrics>::default(), Arc::<AtomicBool>::default());
        let vocabulary = runner.weights().config().vocab_size;
        let scheduler = Scheduler::new(
            runner,
            options.clone(),
            beginnings,
            Arc::clone(&queue),
            Arc::clone(&metrics),
            Arc::clone(&stop),
            Arc::clone(&ending),
        );
        let thread = thread::Builder::new().name("engine".into());
        let thread = thread.spawn(move || scheduler.run())?;
        Ok(Engine {
            queue,
            metrics,
            ending,
            stop,
            options,
            vocabulary,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Queues a request. A limit of new tokens beyond the context becomes what is left of it.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn submit(&self, mut request: Request) -> Result<Ticket, Refusal> {
        if request.ids.is_empty() {
            return Err(ModelError::NoTokens.into());
        }
        let vocab_size = self.vocabulary;
        if let Some(&id) = (request.ids.iter()).find(|id| **id as usize >= vocab_size) {
            return Err(ModelError::Token { id, vocab_size }.into());
        }
        let (prompt, context) = (request.ids.len(), self.options.context);
        let too_long = |max_tokens| Refusal::TooLong {
            prompt,
            max_tokens,
            context,
        };
        if request.max_tokens == usize::MAX {
            let left = context.saturating_sub(prompt);
            request.max_tokens = left;
            if left == 0 {
                return Err(too_long(1));
            }
        } else if prompt.saturating_add(request.max_tokens) > context {
            return Err(too_long(request.max_tokens));
        }
        let (sender, events) = unbounded_channel();
        let enough = Arc::<AtomicBool>::default();
        let running = self.metrics.running.get();
        let idle = self.options.parallel.saturating_sub(running as usize);
        let at = Instant::now();
        let submission = Submission {
            request,
            events: sender,
            enough: Arc::clone(&enough),
            at,
        };
        self.queue.push(submission, idle)?;
        Ok(Ticket { events, enough })
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// What has been done so far.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// How it schedules.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Takes no more requests; those that wait and run are finished.
    pub fn drain(&self) {
        self.queue.close();
    }

    /// Ends all requests with an error, within a layer.
    pub fn stop(&self) {
        self.queue.close();
        self.ending.store(true, Ordering::SeqCst);
        self.stop.store(true, Ordering::SeqCst);
    }

    /// Waits for the end after [`Engine::drain`] or [`Engine::stop`]. Usage is then saved.
    pub fn join(&self) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the engine has panicked");
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
        self.join();
    }
}
