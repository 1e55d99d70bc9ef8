//! Runs a model: holds what exists once, and takes steps of many sequences through it in one pass.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::arch::Architecture;
use crate::model::attention::AttentionScratch;
use crate::model::batch::{Logits, Part, PassLogits, Step};
use crate::model::draft::DraftScratch;
use crate::model::error::ModelError;
use crate::model::indexer::Selection;
use crate::model::kv::{PagePool, PrefixTree};
use crate::model::layer::Sparsity;
use crate::model::limits::BatchLimits;
use crate::model::load::Weights;
use crate::model::mlp::MlpScratch;
use crate::model::moe::MoeScratch;
use crate::model::phase::Phase;
use crate::model::progress::{Meter, Progress};
use crate::model::rope::Angle;
use crate::model::rounding::Rounding;
use crate::model::sequence::Sequence;
use crate::model::timeline::Timeline;
use crate::model::timer::PhaseTimer;
use crate::pool::Pool;
use crate::quant::encode::Packing;
use crate::stream::ExpertStore;

/// How a runner works.
#[derive(Clone, Debug)]
pub struct RunnerOptions {
    /// Bytes that the buffers of a prefill may take, about.
    pub scratch_bytes: usize,
    /// Rows that go through the layers at once, where scratch allows as many; at least 1.
    pub slice: usize,
    /// Tokens that there are pages for, in all sequences together; `None` for the model's longest context.
    pub kv_tokens: Option<usize>,
    /// Where sequences are swapped to; `None` for the system's temporary directory.
    pub swap_dir: Option<PathBuf>,
    /// What float and FP8 experts are rounded to whenever they are computed; `None` keeps them. This is the only option that changes
    /// numbers.
    pub round_experts: Option<Packing>,
    /// When this becomes true, the running call soon ends with [`ModelError::Stopped`].
    pub stop: Option<Arc<AtomicBool>>,
}

impl Default for RunnerOptions {
    fn default() -> RunnerOptions {
        RunnerOptions {
            scratch_bytes: 16 << 20,
            slice: usize::MAX,
            kv_tokens: None,
            swap_dir: None,
            round_experts: None,
            stop: None,
        }
    }
}

/// The work of a runner so far.
#[derive(Clone, Debug)]
pub struct RunnerStats {
    /// Time by phase, with its name, in the order of [`Phase::ALL`].
    pub phases: Vec<(Phase, &'static str, Duration)>,
    /// Tokens computed.
    pub tokens: u64,
    /// Bytes of the allocated KV pages, indexer keys included.
    pub kv_bytes: u64,
}

/// Whether the model was made for a context of `tokens` tokens.
///
/// # Errors
/// [`ModelError::ContextTooLong`] beyond its `max_position_embeddings`.
pub fn check_context(config: &Architecture, tokens: usize) -> Result<(), ModelError> {
    let max = config.max_position_embeddings;
    if tokens > max {
        return Err(ModelError::ContextTooLong { tokens, max });
    }
    Ok(())
}

/// What exists once: the weights, the store that reads experts, compute threads, KV pages and scratch. Sequences are made by
/// [`Runner::sequence`] and live outside of it. A runner may move between threads, in the middle of a text too.
///
/// A row's bits depend on its sequence alone, never on what else is in a pass.
#[derive(Debug)]
pub struct Runner {
    pub(super) weights: Arc<Weights>,
    pub(super) store: ExpertStore,
    pub(super) pool: Arc<Pool>,
    pub(super) options: RunnerOptions,
    pub(super) limits: BatchLimits,
    pub(super) pages: PagePool,
    /// Pages of the prediction layer, where the model has one.
    pub(super) draft_pages: Option<PagePool>,
    pub(super) prefixes: PrefixTree,
    /// Sequences made so far.
    pub(super) born: u64,
    pub(super) timer: PhaseTimer,
    pub(super) meter: Meter,
    tokens: u64,
    warned_dense: bool,
    /// Residual [slice, hidden].
    pub(super) x: Vec<f32>,
    /// Its norm [slice, hidden].
    pub(super) normed: Vec<f32>,
    /// Output of a block [slice, hidden].
    pub(super) delta: Vec<f32>,
    pub(super) angles: Vec<Angle>,
    pub(super) selection: Selection,
    pub(super) attention: AttentionScratch,
    pub(super) moe: MoeScratch,
    pub(super) mlp: MlpScratch,
    pub(super) draft: DraftScratch,
    /// [rows, vocab_size] of the last pass.
    pub(super) logits: Vec<f32>,
    /// Row of `logits` after the last one of each step.
    ends: Vec<usize>,
}

impl Runner {
    /// A runner of `weights` whose experts are read by `store` and computed by `pool`.
    pub fn new(
        weights: impl Into<Arc<Weights>>,
        store: ExpertStore,
        pool: impl Into<Arc<Pool>>,
        options: RunnerOptions,
    ) -> Runner {
        let weights = weights.into();
        let config = weights.config();
        let top_k = match weights.sparsity() {
            Sparsity::Active(top_k) => Some(top_k),
            _ => None,
        };
        let mut limits = BatchLimits::new(config, top_k.is_some(), options.scratch_bytes);
        limits.slice = limits.slice.min(options.slice).max(1);
        let rounding = options.round_experts.map(Rounding::new);
        let tokens = options.kv_tokens.unwrap_or(config.max_position_embeddings);
        let (pages, draft_pages) = weights.page_pools(tokens);
        Runner {
            store,
            pool: pool.into(),
            options,
            limits,
            pages,
            draft_pages,
            prefixes: PrefixTree::default(),
            born: 0,
            timer: PhaseTimer::new(),
            meter: Meter::default(),
            tokens: 0,
            warned_dense: false,
            x: Vec::new(),
            normed: Vec::new(),
            delta: Vec::new(),
            angles: Vec::new(),
            selection: Selection::new(top_k),
            attention: AttentionScratch::new(),
            moe: MoeScratch::new(limits.slots, rounding),
            mlp: MlpScratch::default(),
            draft: DraftScratch::new(&weights, top_k),
            logits: Vec::new(),
            ends: Vec::new(),
            weights,
        }
    }

    /// Appends the tokens of every step to its sequence in one pass, reading each expert once for all rows that use it. Slices of
    /// the steps' rows go through the layers together, as long as scratch allows.
    ///
    /// # Errors
    /// No ids, an id outside the vocabulary, a context that becomes longer than the model allows, a sequence of another runner or one
    /// that is swapped out, and [`ModelError::OutOfPages`]: nothing is changed then. An expert that cannot be read, a number that is infinite
    /// or NaN, or a stop: every sequence then has the tokens of its complete slices.
    pub fn forward(&mut self, steps: &mut [Step<'_>]) -> Result<PassLogits<'_>, ModelError> {
        if steps.is_empty() {
            return Err(ModelError::NoTokens);
        }
        for step in &*steps {
            self.check(step.sequence, step.ids)?;
        }
        self.reserve(steps)?;
        self.ends.clear();
        let mut rows = 0;
        for step in &*steps {
            rows += step.logit_rows();
            self.ends.push(rows);
        }
        self.size_logits(rows);
        // One token a sequence, or a few drafts, are no prompt.
        let prompt = |step: &Step| step.ids.len() > 1 && step.logits != Logits::All;
        let prompt = steps.iter().any(prompt);
        self.measure(prompt.then(|| steps.iter().map(|step| step.ids.len()).sum()));
        let result = self.slices(steps);
        self.meter.stop();
        for step in steps {
            let sequence = &mut *step.sequence;
            sequence.kv.truncate(sequence.ids.len());
        }
        result?;
        Ok(PassLogits {
            values: &self.logits,
            vocab_size: self.weights.config().vocab_size,
            ends: &self.ends,
        })
    }

    /// Takes the steps through the layers, slice by slice.
    fn slices(&mut self, steps: &mut [Step<'_>]) -> Result<(), ModelError> {
        // The first step that is not complete, how many of its tokens are, and how many rows have logits.
        let (mut first, mut done, mut filled) = (0, 0, 0);
        while first < steps.len() {
            let (mut parts, mut wanted) = (Vec::new(), Vec::new());
            // Of the wanted rows, for messages.
            let mut positions = Vec::new();
            let (mut row, mut publish) = (0, Vec::new());
            let (start, mut from) = (first, done);
            for step in &mut steps[start..] {
                let rest = &step.ids[from..];
                let n = rest.len().min(self.limits.slice - row);
                let logits = match step.logits {
                    Logits::All => 0..n,
                    Logits::Last if n == rest.len() => n - 1..n,
                    Logits::Last | Logits::None => 0..0,
                };
                wanted.extend(logits.clone().map(|i| row + i));
                positions.extend(logits.map(|i| step.sequence.len() + i));
                // Drafts may be taken back.
                publish.push(step.logits != Logits::All);
                parts.push(Part {
                    position: step.sequence.len(),
                    sequence: &mut *step.sequence,
                    ids: &rest[..n],
                    computed: false,
                });
                row += n;
                (first, done) = match n == rest.len() {
                    true => (first + 1, 0),
                    false => (first, from + n),
                };
                from = 0;
                if row == self.limits.slice {
                    break;
                }
            }
            for part in &mut parts {
                self.publish_whole(part.sequence);
            }
            self.advance(&mut parts)?;
            let parts = parts.into_iter().zip(publish);
            for (part, _) in parts.filter(|(_, publish)| *publish) {
                self.publish_whole(part.sequence);
            }
            self.timer.skip();
            self.head(&wanted, &positions, filled)?;
            filled += wanted.len();
        }
        Ok(())
    }

    /// Appends `ids` to the sequence; the logits `[vocab_size]` after the last of them.
    ///
    /// # Errors
    /// As [`Runner::forward`].
    pub fn prefill(&mut self, sequence: &mut Sequence, ids: &[u32]) -> Result<&[f32], ModelError> {
        let logits = Logits::Last;
        let step = Step {
            sequence,
            ids,
            logits,
        };
        Ok(self.forward(&mut [step])?.of(0))
    }

    /// Appends one id to the sequence; the logits `[vocab_size]` after it.
    ///
    /// # Errors
    /// As [`Runner::forward`].
    pub fn decode(&mut self, sequence: &mut Sequence, id: u32) -> Result<&[f32], ModelError> {
        self.prefill(sequence, &[id])
    }

    /// Appends `ids` to the sequence and calls `each(i, logits)` with the logits `[vocab_size]` after each of them, of which only a few
    /// rows are in memory at a time. Computes the same bits as [`Runner::decode`] on one id after the other.
    ///
    /// # Errors
    /// As [`Runner::forward`].
    pub fn score(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        self.check(sequence, ids)?;
        let logits = Logits::None;
        let mut step = Step {
            sequence,
            ids,
            logits,
        };
        self.reserve(std::slice::from_mut(&mut step))?;
        self.measure((ids.len() > 1).then_some(ids.len()));
        let result = self.score_slices(step.sequence, ids, &mut each);
        self.meter.stop();
        let len = step.sequence.len();
        step.sequence.kv.truncate(len);
        result
    }

    fn score_slices(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        let vocab = self.weights.config().vocab_size;
        let mut done = 0;
        for slice in ids.chunks(self.limits.slice) {
            let position = sequence.len();
            self.advance(&mut [Part {
                position: sequence.len(),
                sequence: &mut *sequence,
                ids: slice,
                computed: false,
            }])?;
            self.publish_whole(sequence);
            for first in (0..slice.len()).step_by(self.limits.head) {
                let rows: Vec<usize> = (first..slice.len()).take(self.limits.head).collect();
                self.timer.skip();
                self.size_logits(rows.len());
                let positions: Vec<usize> = rows.iter().map(|row| position + row).collect();
                self.head(&rows, &positions, 0)?;
                for (i, logits) in self.logits.chunks(vocab).enumerate() {
                    each(done + first + i, logits);
                }
            }
            done += slice.len();
        }
        Ok(())
    }

    /// From now on tells `observer` the progress of a prompt, several times in every layer.
    pub fn observe(&mut self, observer: impl FnMut(Progress) + Send + 'static) {
        self.meter.observe(Box::new(observer));
    }

    /// Begins to count the steps of a prompt of `tokens` tokens, if there is one.
    fn measure(&mut self, tokens: Option<usize>) {
        match tokens {
            None => self.meter.stop(),
            Some(tokens) => {
                let layer = 2 * self.weights.config().router.top_k;
                self.meter.start(tokens * self.weights.layers.len() * layer);
            }
        }
    }

    /// Whether tokens can be drafted.
    pub fn can_draft(&self) -> bool {
        self.weights.can_draft()
    }

    /// The weights.
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// Bounds of the rows that are computed at once.
    pub fn limits(&self) -> BatchLimits {
        self.limits
    }

    /// The logits of the last pass: [rows, vocab_size], those of its first step first.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// The work done so far.
    pub fn stats(&self) -> RunnerStats {
        let phase = |(phase, name)| (phase, name, self.timer.spent(phase));
        let drafts = self.draft_pages.as_ref().map_or(0, PagePool::bytes);
        RunnerStats {
            phases: Phase::ALL.map(phase).to_vec(),
            tokens: self.tokens,
            kv_bytes: self.pages.bytes() + drafts,
        }
    }

    /// From now on records what is computed when, up to `capacity` spans.
    pub fn record_timeline(&mut self, capacity: usize) {
        self.timer.timeline = Some(Box::new(Timeline::new(capacity)));
    }

    /// Ends [`Runner::record_timeline`].
    pub fn take_timeline(&mut self) -> Option<Timeline> {
        self.timer.timeline.take().map(|timeline| *timeline)
    }

    /// The expert store.
    pub fn store(&self) -> &ExpertStore {
        &self.store
    }

    /// The expert store, whose engine is asked for its statistics.
    pub fn store_mut(&mut self) -> &mut ExpertStore {
        &mut self.store
    }

    /// Whether `ids` can be appended to the sequence.
    pub(super) fn check(&self, sequence: &Sequence, ids: &[u32]) -> Result<(), ModelError> {
        self.check_owned(sequence)?;
        self.check_ids(ids)?;
        check_context(self.weights.config(), sequence.len() + ids.len())
    }

    /// Whether the sequence is of this runner, and its pages are in memory.
    pub(super) fn check_owned(&self, sequence: &Sequence) -> Result<(), ModelError> {
        if !Arc::ptr_eq(sequence.kv.layout(), self.pages.layout()) {
            return Err(ModelError::ForeignSequence);
        }
        match sequence.is_swapped() {
            true => Err(ModelError::SwappedOut),
            false => Ok(()),
        }
    }

    pub(super) fn check_ids(&self, ids: &[u32]) -> Result<(), ModelError> {
        let vocab_size = self.weights.config().vocab_size;
        match ids.iter().find(|id| **id as usize >= vocab_size) {
            Some(&id) => Err(ModelError::Token { id, vocab_size }),
            None if ids.is_empty() => Err(ModelError::NoTokens),
            None => Ok(()),
        }
    }

    /// Takes a slice through the layers, after what drafting needs beforehand.
    fn advance(&mut self, parts: &mut [Part<'_>]) -> Result<(), ModelError> {
        for part in &mut *parts {
            if part.sequence.can_draft() {
                self.prepare_drafting(part.sequence, part.ids.first().copied())?;
            }
        }
        self.append(parts)?;
        for part in parts {
            self.tokens += part.ids.len() as u64;
            self.warn_if_dense(part.sequence.len());
        }
        Ok(())
    }

    /// Says once that a long context is attended densely by a model that was made for sparse attention.
    fn warn_if_dense(&mut self, tokens: usize) {
        let indexer = self.weights.config().indexer.as_ref();
        let top_k = indexer.map_or(usize::MAX, |indexer| indexer.top_k);
        if self.warned_dense || tokens <= top_k {
            return;
        }
        self.warned_dense = true;
        let why = match self.weights.sparsity() {
            Sparsity::Active(_) | Sparsity::Zero => return,
            Sparsity::Off => "sparse attention is switched off",
            Sparsity::Absent => "the model has no indexer tensors",
        };
        tracing::warn!("attention stays dense beyond {top_k} tokens: {why}");
    }
}

/// A runner may move between threads.
const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Runner>();
    is_send::<Sequence>();
};
