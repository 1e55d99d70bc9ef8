//! Puts the sequences of requests into common passes.
//!
//! Every pass has the last token of each sequence that decodes, and rows of prompts: as many as [`Budget`] allows while others decode, and
//! a whole slice otherwise. When KV pages run out, the youngest sequence is swapped to a file until there is room again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::active::{Active, Share};
use super::beginnings::Beginnings;
use super::budget::Budget;
use super::engine::EngineOptions;
use super::metrics::{Metrics, SourceReads};
use super::queue::{Queue, Waited};
use super::request::{Event, ServeError};
use super::watch::{Watch, Watched};
use crate::model::draft::Mode;
use crate::model::{ModelError, PAGE, Phase, Step, swap_victim};
use crate::runtime::TextRunner;

/// Time without requests after which beginnings are saved.
const IDLE: Duration = Duration::from_secs(3);
/// Time between two looks at the statistics of reads.
const STATISTICS: Duration = Duration::from_millis(500);

pub struct Scheduler {
    runner: TextRunner,
    options: EngineOptions,
    beginnings: Option<Beginnings>,
    /// Whether some texts may not be in their files.
    unsaved: bool,
    mode: Mode,
    queue: Arc<Queue>,
    metrics: Arc<Metrics>,
    stop: Arc<AtomicBool>,
    ending: Arc<AtomicBool>,
    watch: Watch,
    budget: Budget,
    /// In order of admission: the oldest first.
    active: Vec<Active>,
    counted: Option<Instant>,
}

/// A pass: the share of each active request, if it has one.
type Plan = Vec<Option<Share>>;

impl Scheduler {
    pub fn new(
        mut runner: TextRunner,
        options: EngineOptions,
        beginnings: Option<Beginnings>,
        queue: Arc<Queue>,
        metrics: Arc<Metrics>,
        stop: Arc<AtomicBool>,
        ending: Arc<AtomicBool>,
    ) -> Scheduler {
        let watch = Watch::new(Arc::clone(&stop));
        runner.observe(watch.observer());
        let mut scheduler = Scheduler {
            mode: runner.drafts(),
            budget: Budget::new(options.max_stall),
            runner,
            options,
            beginnings,
            unsaved: false,
            queue,
            metrics,
            stop,
            ending,
            watch,
            active: Vec::new(),
            counted: None,
        };
        scheduler.count();
        scheduler
    }

    /// Serves until the queue is closed and empty, or the engine is stopped.
    pub fn run(mut self) {
        let mut failed = false;
        while !self.ending.load(Ordering::SeqCst) {
            self.remove_ended();
            self.admit();
            if self.active.is_empty() {
                self.counted = None;
                self.count();
                if !self.wait() {
                    break;
                }
                continue;
            }
            failed |= self.pass().is_err();
            self.count();
        }
        let ending = Arc::clone(&self.ending);
        self.save_beginnings(|| ending.load(Ordering::SeqCst));
        // Uses of a run whose drive failed say little.
        if !failed {
            self.runner.save_usage();
        }
    }

    /// Waits for a request; false if no more will come. Saves beginnings meanwhile.
    fn wait(&mut self) -> bool {
        loop {
            let saving = self.beginnings.is_some() && self.unsaved;
            match self.queue.wait(saving.then_some(IDLE)) {
                Waited::Request => return true,
                Waited::Closed => return false,
                Waited::Idle => {
                    let queue = Arc::clone(&self.queue);
                    self.save_beginnings(|| queue.len() > 0);
                }
            }
        }
    }

    fn save_beginnings(&mut self, interrupted: impl Fn() -> bool) {
        if let Some(beginnings) = &mut self.beginnings
            && self.unsaved
        {
            self.unsaved = !beginnings.save(&mut self.runner, interrupted);
        }
    }

    /// Drops requests that are over; what they computed can be reused.
    fn remove_ended(&mut self) {
        self.active.iter_mut().for_each(Active::end_if_enough);
        let (over, active) = std::mem::take(&mut self.active)
            .into_iter()
            .partition(|active| active.is_over());
        self.active = active;
        let over: Vec<Active> = over;
        for mut ended in over {
            if ended.sequence.is_swapped() {
                continue;
            }
            self.unsaved = true;
            if let Err(error) = self.runner.publish(&mut ended.sequence) {
                tracing::debug!("the end of a text is not kept: {error}");
            }
        }
        self.metrics.running.set(self.active.len() as u64);
    }

    /// Takes sequences back from their files, the oldest first, and then requests from the queue.
    fn admit(&mut self) {
        let resident = |active: &&Active| !active.sequence.is_swapped();
        for index in 0..self.active.len() {
            // A row for each of the others, and one more.
            let others = self.active.iter().filter(resident).count();
            let active = &mut self.active[index];
            if !active.sequence.is_swapped() {
                continue;
            }
            let needed = active.sequence.len().div_ceil(PAGE) + 1;
            if others > 0 && self.runner.free_pages() < needed + others {
                return;
            }
            match self.runner.swap_in(&mut active.sequence) {
                Ok(()) => {}
                Err(ModelError::OutOfPages { .. }) if others > 0 => return,
                Err(error) => recompute(&mut self.runner, active, &error),
            }
        }
        while self.active.len() < self.options.parallel.max(1) {
            let Some(submission) = self.queue.pop() else {
                return;
            };
            let needed = submission.request.ids.len().div_ceil(PAGE) + 1;
            let others = self.active.len();
            if others > 0 && self.runner.free_pages() < needed + others {
                return self.queue.put_back(submission);
            }
            let events = submission.events.clone();
            match Active::new(&mut self.runner, submission, self.mode) {
                Ok(active) => {
                    let summary = active.summary();
                    self.metrics.prompt_tokens.add(summary.prompt_tokens as u64);
                    self.metrics.cached_tokens.add(summary.cached_tokens as u64);
                    self.active.push(active);
                }
                Err(error) => {
                    let _ = events.send(Event::Failed(error));
                }
            }
            self.metrics.running.set(self.active.len() as u64);
        }
    }

    /// One pass. An error has ended the requests that need what failed.
    fn pass(&mut self) -> Result<(), ()> {
        let (mut start, before) = (Instant::now(), self.io_wait());
        let mut plan = self.plan();
        let result = loop {
            match self.forward(&plan) {
                Err(ModelError::OutOfPages { .. }) if self.make_room() => {
                    start = Instant::now();
                    plan = self.plan();
                }
                result => break result,
            }
        };
        match result {
            Ok(()) => {
                let waited = self.io_wait().saturating_sub(before);
                self.passed(&plan, start.elapsed(), waited);
                Ok(())
            }
            Err(ModelError::Stopped) => {
                // The clients of this pass are gone, or the engine ends.
                if !self.ending.load(Ordering::SeqCst) {
                    self.stop.store(false, Ordering::SeqCst);
                }
                self.rewind();
                Ok(())
            }
            Err(error) => {
                self.rewind();
                self.isolate(plan, error);
                Err(())
            }
        }
    }

    /// What the next pass has.
    fn plan(&mut self) -> Plan {
        let limits = self.runner.limits();
        let takes_part = |active: &Active| !active.is_over() && !active.sequence.is_swapped();
        let alone = self
            .active
            .iter()
            .filter(|active| takes_part(active))
            .count()
            == 1;
        // Rows of decoding requests always fit.
        let most = (limits.slice / self.active.len().max(1)).max(1);
        let mut plan = Plan::new();
        let mut rows = 0;
        for active in &mut self.active {
            let mut share = None;
            if takes_part(active) && active.decodes() {
                match active.decode_share(&mut self.runner, most, alone) {
                    Ok(decoding) => share = Some(decoding),
                    Err(ModelError::Stopped) => {}
                    Err(error) => active.fail(error.into()),
                }
            }
            rows += share.as_ref().map_or(0, |share| share.ids.len());
            plan.push(share);
        }
        let mut left = match rows {
            0 => limits.slice,
            rows => (self.budget.rows()).min(limits.slice.saturating_sub(rows).max(1)),
        };
        for (active, share) in self.active.iter().zip(&mut plan) {
            if !takes_part(active) || active.decodes() || left == 0 {
                continue;
            }
            let most = match active.wants_all_logits() {
                true => left.min(limits.head),
                false => left,
            };
            let prompt = active.prompt_share(most);
            left -= prompt.ids.len();
            *share = Some(prompt);
        }
        plan
    }

    /// Computes the pass. The logits stay in the runner.
    fn forward(&mut self, plan: &Plan) -> Result<(), ModelError> {
        let mut watched = Vec::new();
        let mut steps = Vec::new();
        for (active, share) in self.active.iter_mut().zip(plan) {
            let Some(share) = share else { continue };
            let (done, all) = active.progress();
            watched.push(Watched {
                events: active.events.clone(),
                done,
                rows: share.ids.len(),
                all,
            });
            steps.push(Step {
                sequence: &mut active.sequence,
                ids: &share.ids,
                logits: share.logits,
            });
        }
        if steps.is_empty() {
            return Ok(());
        }
        self.watch.set(watched);
        let result = self.runner.forward(&mut steps).map(drop);
        self.watch.set(Vec::new());
        result
    }

    /// After a pass of `time`: gives each request its logits.
    fn passed(&mut self, plan: &Plan, time: Duration, waited: Duration) {
        let vocabulary = self.runner.weights().config().vocab_size;
        let shares = plan.iter().flatten();
        let (mut decoding, mut prompt) = (0, 0);
        let alone = shares.clone().count() == 1;
        let mut row = 0;
        for (active, share) in self.active.iter_mut().zip(plan) {
            let Some(share) = share else { continue };
            match active.decodes_with(share) {
                true => decoding += share.ids.len(),
                false => prompt += share.ids.len(),
            }
            let rows = share.logits.rows(share.ids.len());
            let logits = &self.runner.logits()[row * vocabulary..][..rows * vocabulary];
            row += rows;
            let before = active.tokens();
            active.waited(waited);
            active.passed(share, logits, vocabulary, time, alone);
            let tokens = active.tokens() - before;
            self.metrics.generated_tokens.add(tokens as u64);
        }
        if decoding > 0 {
            self.budget.passed(prompt, time);
        }
        let compute = time.saturating_sub(waited);
        self.metrics.pass(decoding + prompt, waited, compute);
    }

    /// Swaps the youngest sequence to a file; false if there is only one.
    fn make_room(&mut self) -> bool {
        let mut resident: Vec<&mut Active> = (self.active.iter_mut())
            .filter(|active| !active.sequence.is_swapped())
            .collect();
        if resident.len() < 2 {
            return false;
        }
        let Some(victim) = swap_victim(resident.iter().map(|active| &active.sequence)) else {
            return false;
        };
        let active = &mut resident[victim];
        if let Err(error) = self.runner.swap_out(&mut active.sequence) {
            recompute(&mut self.runner, active, &error);
        }
        self.metrics.swaps.add(1);
        true
    }

    /// Before a pass is repeated.
    fn rewind(&mut self) {
        self.active.iter_mut().for_each(Active::rewind);
    }

    /// After a pass that failed with `error`: repeats it for each request alone, and ends those for which it fails again.
    fn isolate(&mut self, mut plan: Plan, error: ModelError) {
        let alone = plan.iter().flatten().count() == 1;
        if alone {
            let failed = self
                .active
                .iter_mut()
                .zip(&plan)
                .find(|(_, share)| share.is_some());
            if let Some((active, _)) = failed {
                active.fail(error.into());
            }
            return;
        }
        tracing::debug!("a pass is repeated for each request alone: {error}");
        for index in 0..plan.len() {
            let Some(share) = plan[index].take() else {
                continue;
            };
            let mut single: Plan = plan.iter().map(|_| None).collect();
            single[index] = Some(share);
            let start = Instant::now();
            match self.forward(&single) {
                Ok(()) => self.passed(&single, start.elapsed(), Duration::ZERO),
                Err(ModelError::Stopped) => return self.rewind(),
                Err(error) => {
                    self.active[index].rewind();
                    self.active[index].fail(error.into());
                }
            }
        }
    }

    /// Time that passes waited for reads so far.
    fn io_wait(&self) -> Duration {
        let phases = self.runner.stats().phases;
        let waiting = phases.iter().filter(|(phase, ..)| *phase == Phase::IoWait);
        waiting.map(|(.., time)| *time).sum()
    }

    /// Updates what others may ask for, now and then.
    fn count(&mut self) {
        let swapped = |active: &&Active| active.sequence.is_swapped();
        let swapped = self.active.iter().filter(swapped).count();
        self.metrics.swapped.set(swapped as u64);
        self.metrics.free_pages.set(self.runner.free_pages() as u64);
        if (self.counted).is_some_and(|counted| counted.elapsed() < STATISTICS) {
            return;
        }
        self.counted = Some(Instant::now());
        self.metrics.pages.set(self.runner.pages() as u64);
        let stats = self.runner.store().stats();
        self.metrics.hits.set(stats.hits);
        self.metrics.misses.set(stats.misses);
        let Some(reads) = self.runner.store_mut().read_stats() else {
            return;
        };
        let sources = (self.options.sources.iter()).zip(&reads.sources);
        let sources = sources.map(|(source, reads)| SourceReads {
            dir: source.dir.clone(),
            bytes: reads.bytes,
            reads: reads.reads,
            errors: reads.errors,
        });
        self.metrics.set_sources(sources.collect());
    }
}

/// Tells all requests of the end, also after a panic.
impl Drop for Scheduler {
    fn drop(&mut self) {
        self.queue.close();
        for mut active in self.active.drain(..) {
            if !active.is_over() {
                active.fail(ServeError::Stopped);
            }
        }
        while let Some(waiting) = self.queue.pop() {
            let _ = waiting.events.send(Event::Failed(ServeError::Stopped));
        }
        self.metrics.running.set(0);
    }
}

/// Makes a sequence that could not be swapped begin anew: its rows have the same bits when they are computed again.
fn recompute(runner: &mut TextRunner, active: &mut Active, error: &ModelError) {
    tracing::warn!("a text is computed again: {error}");
    active.sequence = runner.sequence();
    if runner.drafts() == Mode::Off {
        active.sequence.stop_drafting();
    }
}
