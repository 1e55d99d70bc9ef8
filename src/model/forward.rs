//! A context and the forward pass through it.
//!
//! Tokens go through the model in slices, layer by layer, so that a layer's experts are read once a slice; the
//! slice is as long as its scratch allows. Inside a layer, attention takes the slice's tokens a few at a
//! time. No number depends on either size.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::model::attention::AttentionScratch;
use crate::model::clock::{Clock, Phase};
use crate::model::draft::Drafting;
use crate::model::error::ModelError;
use crate::model::indexer::Selection;
use crate::model::kv::{KvCache, KvShape, LayerWidths};
use crate::model::laps::Laps;
use crate::model::load::{Block, Model, Sparsity};
use crate::model::mlp::MlpScratch;
use crate::model::moe::{MoeScratch, Next};
use crate::model::ops;
use crate::model::pass::{Pass, Tokens};
use crate::model::progress::{Meter, Progress};
use crate::model::rope::Angle;
use crate::model::rounding::Rounding;
use crate::model::scratch::sized;
use crate::model::sizes::Sizes;
use crate::pool::Pool;
use crate::quant::encode::Packing;
use crate::stream::ExpertStore;

mod context;

pub use context::{check_context, reusable};

/// How a session works.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Bytes that the buffers of a prefill may take, about.
    pub scratch_bytes: usize,
    /// Tokens of a prompt that go through the layers at once, where scratch allows as many; at least 1.
    pub slice: usize,
    /// What float and FP8 experts are rounded to whenever they are computed; `None` keeps them. This alone does change numbers.
    pub round_experts: Option<Packing>,
    /// When this becomes true, the running call soon ends with [`ModelError::Stopped`].
    pub stop: Option<Arc<AtomicBool>>,
}

impl Default for SessionOptions {
    fn default() -> SessionOptions {
        SessionOptions {
            scratch_bytes: 16 << 20,
            slice: usize::MAX,
            round_experts: None,
            stop: None,
        }
    }
}

/// What a session has done so far.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Time by phase, with its name, in the order of [`Phase::ALL`].
    pub phases: Vec<(Phase, &'static str, Duration)>,
    /// Tokens computed.
    pub tokens: u64,
    /// Bytes of the KV cache, indexer keys included.
    pub kv_bytes: u64,
}

/// One context of a model, with the store that brings its experts.
#[derive(Debug)]
pub struct Session<'m> {
    pub(super) model: &'m Model,
    store: ExpertStore,
    pub(super) pool: &'m Pool,
    pub(super) options: SessionOptions,
    pub(super) sizes: Sizes,
    /// Tokens that went through all layers.
    pub(super) ids: Vec<u32>,
    pub(super) cache: KvCache,
    pub(super) clock: Clock,
    meter: Meter,
    tokens: u64,
    warned_dense: bool,
    /// Residual [slice, hidden].
    pub(super) x: Vec<f32>,
    /// Its norm [slice, hidden].
    pub(super) normed: Vec<f32>,
    /// Output of a block [slice, hidden].
    delta: Vec<f32>,
    pub(super) angles: Vec<Angle>,
    selection: Selection,
    /// What drafting needs beside; `None` where the model has no prediction layer.
    pub(super) drafting: Option<Drafting>,
    attention: AttentionScratch,
    moe: MoeScratch,
    mlp: MlpScratch,
    /// [tokens, vocab_size] of the last call.
    logits: Vec<f32>,
}

impl<'m> Session<'m> {
    /// An empty context.
    pub fn new(
        model: &'m Model,
        store: ExpertStore,
        pool: &'m Pool,
        options: SessionOptions,
    ) -> Session<'m> {
        let config = model.config();
        let top_k = match model.sparsity() {
            Sparsity::Active(top_k) => Some(top_k),
            _ => None,
        };
        let mut sizes = Sizes::new(config, top_k.is_some(), options.scratch_bytes);
        sizes.slice = sizes.slice.min(options.slice).max(1);
        let rounding = options.round_experts.map(Rounding::new);
        let mtp = model.mtp.as_ref();
        let all = model.layers.iter().chain(mtp.map(|mtp| &mtp.layer));
        let layers = all.map(|layer| LayerWidths {
            kv: config.kv_width(),
            index_key: (layer.attention.indexer.as_ref()).map(|_| config.index_head_dim),
            // The rows of the prediction layer depend on the token after their own.
            ahead: usize::from(mtp.is_some_and(|mtp| std::ptr::eq(layer, &mtp.layer))),
        });
        Session {
            model,
            store,
            pool,
            options,
            sizes,
            ids: Vec::new(),
            cache: KvCache::new(&KvShape(layers.collect())),
            clock: Clock::new(),
            meter: Meter::default(),
            tokens: 0,
            warned_dense: false,
            x: Vec::new(),
            normed: Vec::new(),
            delta: Vec::new(),
            angles: Vec::new(),
            selection: Selection::new(top_k),
            drafting: mtp.map(|mtp| Drafting::new(mtp, top_k)),
            attention: AttentionScratch::new(),
            moe: MoeScratch::new(sizes.slots, rounding),
            mlp: MlpScratch::default(),
            logits: Vec::new(),
        }
    }

    /// Appends `ids` to the context; the logits [vocab_size] after the last of them.
    ///
    /// # Errors
    /// No ids, an id outside the vocabulary, a context that becomes longer than the model allows, an expert that cannot be
    /// read, or a stop. The context is then as long as before, or ends with the last complete slice.
    pub fn prefill(&mut self, ids: &[u32]) -> Result<&[f32], ModelError> {
        self.check(ids)?;
        let mut last = 0;
        self.measure(ids.len());
        for slice in ids.chunks(self.sizes.slice) {
            self.advance(slice)?;
            last = slice.len() - 1;
        }
        self.meter.stop();
        self.clock.skip();
        self.head(last, 1);
        Ok(&self.logits)
    }

    /// Appends one id to the context; the logits [vocab_size] after it.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, id: u32) -> Result<&[f32], ModelError> {
        self.prefill(&[id])
    }

    /// Appends `ids` to the context and calls `each(i, logits)` with the logits [vocab_size] after each of
    /// them. Computes the same numbers as [`Session::decode`] on one id after the other.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn score(
        &mut self,
        ids: &[u32],
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        self.check(ids)?;
        let mut done = 0;
        self.measure(ids.len());
        for slice in ids.chunks(self.sizes.slice) {
            self.advance(slice)?;
            for first in (0..slice.len()).step_by(self.sizes.head) {
                let n = self.sizes.head.min(slice.len() - first);
                self.clock.skip();
                self.head(first, n);
                let vocab = self.model.config.vocab_size;
                for (i, logits) in self.logits.chunks(vocab).enumerate() {
                    each(done + first + i, logits);
                }
            }
            done += slice.len();
        }
        self.meter.stop();
        Ok(())
    }

    /// From now on tells `observer` how far a prompt has come, several times in every layer.
    pub fn observe(&mut self, observer: impl FnMut(Progress) + Send + 'static) {
        self.meter.observe(Box::new(observer));
    }

    /// Begins to count the steps of a prompt of `tokens` tokens. One token alone is soon there.
    fn measure(&mut self, tokens: usize) {
        match tokens {
            1 => self.meter.stop(),
            _ => {
                let layer = 2 * self.model.config.num_experts_per_tok;
                self.meter.start(tokens * self.model.layers.len() * layer);
            }
        }
    }

    /// Whether tokens can be drafted.
    pub fn can_draft(&self) -> bool {
        self.drafting.is_some()
    }

    /// The logits of the last call: [vocab_size] after its last token, or of every token of [`Session::speculate`].
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let phase = |(phase, name)| (phase, name, self.clock.spent(phase));
        Stats {
            phases: Phase::ALL.map(phase).to_vec(),
            tokens: self.tokens,
            kv_bytes: self.cache.bytes(),
        }
    }

    /// From now on keeps what is computed when, up to `room` laps.
    pub fn record_laps(&mut self, room: usize) {
        self.clock.laps = Some(Box::new(Laps::new(room)));
    }

    /// Ends [`Session::record_laps`].
    pub fn take_laps(&mut self) -> Option<Laps> {
        self.clock.laps.take().map(|laps| *laps)
    }

    /// The expert store.
    pub fn store(&self) -> &ExpertStore {
        &self.store
    }

    /// The expert store, whose engine is asked for its statistics.
    pub fn store_mut(&mut self) -> &mut ExpertStore {
        &mut self.store
    }

    /// Whether `ids` can be appended to the context.
    pub(super) fn check(&self, ids: &[u32]) -> Result<(), ModelError> {
        self.check_ids(ids)?;
        check_context(&self.model.config, self.len() + ids.len())
    }

    fn check_ids(&self, ids: &[u32]) -> Result<(), ModelError> {
        let vocab_size = self.model.config.vocab_size;
        match ids.iter().find(|id| **id as usize >= vocab_size) {
            Some(&id) => Err(ModelError::Token { id, vocab_size }),
            None if ids.is_empty() => Err(ModelError::NoTokens),
            None => Ok(()),
        }
    }

    /// Takes one slice through all layers. Its final residual is left in `x`.
    pub(super) fn advance(&mut self, ids: &[u32]) -> Result<(), ModelError> {
        self.prepare_drafting(ids.first().copied())?;
        self.append(ids)?;
        self.tokens += ids.len() as u64;
        self.warn_if_dense();
        Ok(())
    }

    /// As [`Session::advance`], whatever the prediction layer has seen.
    pub(super) fn append(&mut self, ids: &[u32]) -> Result<(), ModelError> {
        let result = self.layers(ids);
        if result.is_ok() {
            self.ids.extend_from_slice(ids);
            self.remember_hidden(ids.len());
        }
        // Of an interrupted slice some layers have rows and some have not.
        self.cache.truncate(self.ids.len());
        result
    }

    fn layers(&mut self, ids: &[u32]) -> Result<(), ModelError> {
        let (n, len) = (ids.len(), self.len());
        let model = self.model;
        self.clock.skip();
        self.clock.pass(len, n);
        let x = sized(&mut self.x, n * model.config.hidden_size);
        x.fill(0.0);
        for (id, x) in ids.iter().zip(x.chunks_mut(model.config.hidden_size)) {
            model.embed.matrix().add_row(*id as usize, 1.0, x);
        }
        self.angles.clear();
        for position in len..len + n {
            model.rope.angles(position, &mut self.angles);
        }
        self.selection.prepare(n, len + n - 1);
        self.clock.lap(Phase::Embed);
        // The drives have the dense layers to read in, for what the embedding alone foretells.
        let first_sparse = (0..model.layers.len()).find(|layer| sparse(model, *layer).is_some());
        if let Some(layer) = first_sparse.filter(|first| *first > 0) {
            self.look_at(layer, n)?;
        }
        (0..model.layers.len()).try_for_each(|layer| self.layer(layer, n, len))
    }

    /// Takes the n tokens from `position` on, whose residual is in `x` and whose angles are prepared, through one layer.
    pub(super) fn layer(
        &mut self,
        layer: usize,
        n: usize,
        position: usize,
    ) -> Result<(), ModelError> {
        self.clock.layer(layer);
        self.look_at(layer, n)?;
        self.attend(layer, n, position)?;
        self.feed_forward(layer, n)
    }

    /// Looks at the router of a layer, if it is sparse, with the residual as it is now.
    fn look_at(&mut self, layer: usize, n: usize) -> Result<(), ModelError> {
        let model = self.model;
        let Some(next) = sparse(model, layer) else {
            return Ok(());
        };
        let mut pass = Pass {
            pool: self.pool,
            clock: &mut self.clock,
            store: &mut self.store,
            meter: &mut self.meter,
            stop: self.options.stop.as_deref(),
        };
        let residual = &self.x[..n * model.config.hidden_size];
        next.look(&mut pass, residual, &mut self.moe)?;
        self.clock.lap(Phase::Router);
        Ok(())
    }

    /// x += attention(norm(x)).
    fn attend(&mut self, layer: usize, n: usize, position: usize) -> Result<(), ModelError> {
        let model = self.model;
        let hidden = model.config.hidden_size;
        let pairs = model.config.qk_rope_head_dim / 2;
        let (weights, cache) = (model.layer(layer), &mut self.cache.layers[layer]);
        let selection = match &mut self.drafting {
            Some(drafting) if layer == model.layers.len() => &mut drafting.selection,
            _ => &mut self.selection,
        };
        let mut pass = Pass {
            pool: self.pool,
            clock: &mut self.clock,
            store: &mut self.store,
            meter: &mut self.meter,
            stop: self.options.stop.as_deref(),
        };
        for row in (0..n).step_by(self.sizes.attention) {
            pass.check_stop()?;
            let count = self.sizes.attention.min(n - row);
            let x = &mut self.x[row * hidden..(row + count) * hidden];
            let normed = sized(&mut self.normed, count * hidden);
            norm_rows(x, &weights.input_norm, model.config.rms_norm_eps, normed);
            let tokens = Tokens {
                n: count,
                row,
                position: position + row,
                x: normed,
                angles: &self.angles[row * pairs..(row + count) * pairs],
            };
            let delta = sized(&mut self.delta, count * hidden);
            weights.attention.forward(
                &mut pass,
                tokens,
                cache,
                selection,
                &mut self.attention,
                delta,
            );
            x.iter_mut().zip(&*delta).for_each(|(x, d)| *x += d);
            pass.meter.add(count * model.config.num_experts_per_tok);
        }
        self.clock.lap(Phase::Attention);
        Ok(())
    }

    /// x += mlp(norm(x)).
    fn feed_forward(&mut self, layer: usize, n: usize) -> Result<(), ModelError> {
        let model = self.model;
        let hidden = model.config.hidden_size;
        let weights = model.layer(layer);
        let x = &mut self.x[..n * hidden];
        let normed = sized(&mut self.normed, n * hidden);
        norm_rows(x, &weights.post_norm, model.config.rms_norm_eps, normed);
        let delta = sized(&mut self.delta, n * hidden);
        let mut pass = Pass {
            pool: self.pool,
            clock: &mut self.clock,
            store: &mut self.store,
            meter: &mut self.meter,
            stop: self.options.stop.as_deref(),
        };
        match &weights.mlp {
            Block::Dense(mlp) => {
                let done = |n| self.meter.add(n * model.config.num_experts_per_tok);
                mlp.forward(self.pool, normed, &mut self.mlp, delta, done);
                self.clock.lap(Phase::Dense);
            }
            Block::Sparse(moe) => {
                let next = (layer + 1..model.layers.len()).find_map(|next| sparse(model, next));
                moe.forward(&mut pass, normed, x, next, &mut self.moe, delta)?;
            }
        }
        x.iter_mut().zip(&*delta).for_each(|(x, d)| *x += d);
        Ok(())
    }

    /// Fills `logits` [n, vocab_size] for the rows of `x` from `first` on.
    pub(super) fn head(&mut self, first: usize, n: usize) {
        let model = self.model;
        let hidden = model.config.hidden_size;
        let x = &self.x[first * hidden..(first + n) * hidden];
        let normed = sized(&mut self.normed, n * hidden);
        norm_rows(x, &model.norm, model.config.rms_norm_eps, normed);
        self.logits.resize(n * model.config.vocab_size, 0.0);
        let head = model.head().matrix();
        head.matmul(self.pool, normed, n, &mut self.logits);
        self.clock.lap(Phase::Head);
    }

    /// Says once that a long context is attended densely by a model that was made for sparse attention.
    fn warn_if_dense(&mut self) {
        let top_k = self.model.config.index_topk;
        if self.warned_dense || self.len() <= top_k {
            return;
        }
        self.warned_dense = true;
        let why = match self.model.sparsity() {
            Sparsity::Active(_) | Sparsity::Zero => return,
            Sparsity::Off => "sparse attention is switched off",
            Sparsity::Absent => "the model has no indexer tensors",
        };
        tracing::warn!("attention stays dense beyond {top_k} tokens: {why}");
    }
}

pub(super) fn norm_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let rows = x.chunks(weight.len()).zip(out.chunks_mut(weight.len()));
    rows.for_each(|(x, out)| ops::rms_norm(x, weight, eps, out));
}

/// What is needed to look at the router of a layer, if it is sparse.
fn sparse(model: &Model, layer: usize) -> Option<Next<'_>> {
    let weights = model.layer(layer);
    match &weights.mlp {
        Block::Dense(_) => None,
        Block::Sparse(moe) => Some(Next {
            layer,
            norm: &weights.post_norm,
            eps: model.config.rms_norm_eps,
            router: &moe.router,
        }),
    }
}
