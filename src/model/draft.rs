//! Drafts: what the prediction layer takes for the continuation of a context, and the pass that verifies it.
//!
//! The layer has a cache of its own. Its row t depends on the hidden state of t and on token t + 1, so it is one row behind the
//! context, and more while nobody asks for drafts: the hidden states that it has not seen are kept until then. Rows that were
//! computed from drafts are forgotten when the drafts are made, whether they come true or not, and computed anew from the true hidden
//! states. So its cache depends on the tokens of the context alone, never on what was drafted.
//!
//! Where hidden states of many tokens are not known, as in a context that was restored without the rows of the layer, it begins anew at
//! the end: it attends to what follows only, and its first drafts come true less often.
//!
//! The layer is there for speed alone. When one of its experts cannot be read, there are no more drafts, and the text goes on.

use crate::model::clock::Phase;
use crate::model::error::ModelError;
use crate::model::forward::{Session, norm_rows};
use crate::model::indexer::Selection;
use crate::model::kv::LayerCache;
use crate::model::mtp::{MAX_UNSEEN, Mtp};
use crate::model::ops;
use crate::model::scratch::sized;
use crate::runtime::sample::argmax;

/// What a session needs to draft.
#[derive(Debug)]
pub(super) struct Drafting {
    /// Normed hidden states of the tokens that the layer has not seen, [tokens, hidden]. Of other length where one of them is not known any more.
    hidden: Vec<f32>,
    /// The token that the last row of the cache was computed with, where the context does not have it yet.
    assumed: Option<u32>,
    /// Positions that the layer attends to.
    pub selection: Selection,
    /// Embeddings and hidden states, normed [tokens, 2 * hidden].
    input: Vec<f32>,
    /// Output of the last draft, normed [hidden].
    output: Vec<f32>,
    /// Logits of a draft [vocab_size].
    logits: Vec<f32>,
}

impl Drafting {
    /// For a model whose sparse attention keeps `top_k` positions; `None` when it is dense.
    pub fn new(mtp: &Mtp, top_k: Option<usize>) -> Drafting {
        let indexed = mtp.layer.attention.indexer.is_some();
        Drafting {
            hidden: Vec::new(),
            assumed: None,
            selection: Selection::new(top_k.filter(|_| indexed)),
            input: Vec::new(),
            output: Vec::new(),
            logits: Vec::new(),
        }
    }
}

impl Session<'_> {
    /// Up to `n` tokens that will probably follow the context and `id`; fewer where the model has no prediction layer, or nothing
    /// before `id`. The context stays as it is.
    ///
    /// # Errors
    /// As [`Session::prefill`]; the context is then as before.
    pub fn draft(&mut self, id: u32, n: usize) -> Result<Vec<u32>, ModelError> {
        self.check(&[id])?;
        if n == 0 || self.drafting.is_none() || self.is_empty() {
            return Ok(Vec::new());
        }
        self.prepare_drafting(None)?;
        let caught_up = self.catch_up(Some(id));
        let drafts = caught_up.and_then(|last| self.chain(n, last));
        let (len, layer) = (self.len(), self.model.layers.len());
        self.cache.layers[layer].truncate(len);
        if let Some(drafting) = &mut self.drafting {
            drafting.selection.choose_anew();
        }
        self.or_do_without(drafts)
    }

    /// What the prediction layer has come to. A failure other than a stop is the end of the drafts, and no other one.
    fn or_do_without<T: Default>(
        &mut self,
        result: Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        match result {
            Err(ModelError::Stopped) => Err(ModelError::Stopped),
            Err(error) => {
                tracing::warn!("no more drafts: {error}");
                self.drafting = None;
                self.cache.layers[self.model.layers.len()].truncate(0);
                Ok(T::default())
            }
            done => done,
        }
    }

    /// Drafts up to `n` tokens after `id`, and appends `id` and the drafts to the context in one pass; returns the drafts.
    /// [`Session::logits`] are then those after `id` and after each draft, the same as [`Session::decode`] computes one after the other.
    /// Who finds that a draft is not what follows truncates the context before it.
    ///
    /// # Errors
    /// As [`Session::prefill`]; the context is then as before.
    pub fn speculate(&mut self, id: u32, n: usize) -> Result<Vec<u32>, ModelError> {
        let drafts = self.draft(id, n.min(self.sizes.slice - 1))?;
        let run: Vec<u32> = [&[id], &drafts[..]].concat();
        self.advance(&run)?;
        self.clock.skip();
        self.head(0, run.len());
        Ok(drafts)
    }

    /// Takes the prediction layer to the end of the context, so that its cache lacks one row only. For who keeps the cache: hidden states
    /// are not a part of it. Rows of a layer that has begun late are not kept.
    ///
    /// # Errors
    /// A stop. The context stays as it is.
    pub fn settle_drafts(&mut self) -> Result<(), ModelError> {
        if self.drafting.is_some() && self.began() == 0 && self.seen() + 1 < self.len() {
            self.prepare_drafting(None)?;
            let caught_up = self.catch_up(None).map(drop);
            self.or_do_without(caught_up)?;
        }
        Ok(())
    }

    /// Position after the last row of the prediction layer's cache.
    fn seen(&self) -> usize {
        let cache = self.cache.layers.get(self.model.layers.len());
        cache.map_or(0, LayerCache::end)
    }

    /// Position of the first row of the prediction layer's cache.
    fn began(&self) -> usize {
        let cache = self.cache.layers.get(self.model.layers.len());
        cache.map_or(0, |cache| cache.first)
    }

    /// Keeps the hidden states of the last `n` tokens, whose residual is in `x`.
    pub(super) fn remember_hidden(&mut self, n: usize) {
        let Some(drafting) = &mut self.drafting else {
            return;
        };
        let (model, before) = (self.model, drafting.hidden.len());
        let values = n * model.config.hidden_size;
        drafting.hidden.reserve_exact(values);
        drafting.hidden.resize(before + values, 0.0);
        let hidden = &mut drafting.hidden[before..];
        norm_rows(
            &self.x[..values],
            &model.norm,
            model.config.rms_norm_eps,
            hidden,
        );
    }

    /// After the context was truncated: forgets what depends on the tokens that it had.
    pub(super) fn truncate_drafting(&mut self) {
        let (len, seen, layer) = (self.len(), self.seen(), self.model.layers.len());
        let Some(drafting) = &mut self.drafting else {
            return;
        };
        if len > seen {
            let hidden = (len - seen) * self.model.config.hidden_size;
            drafting.hidden.truncate(hidden);
        } else {
            drafting.hidden.clear();
            self.cache.layers[layer].truncate(len.saturating_sub(1));
        }
    }

    /// Before the context grows by `next`, or by a token that is not known: makes the hidden states complete, and few.
    pub(super) fn prepare_drafting(&mut self, next: Option<u32>) -> Result<(), ModelError> {
        let (len, layer) = (self.len(), self.model.layers.len());
        let Some(drafting) = &self.drafting else {
            return Ok(());
        };
        if self.seen() == len && (next.is_none() || drafting.assumed != next) {
            self.cache.layers[layer].truncate(len.saturating_sub(1));
        }
        let unseen = len - self.seen();
        if drafting.hidden.len() != unseen * self.model.config.hidden_size {
            // One token costs what decoding it does; many would be another prompt.
            if unseen > 1 {
                tracing::debug!(unseen, "the prediction layer begins anew");
                let first = if next.is_some() { len } else { len - 1 };
                self.cache.layers[layer].begin_at(first);
            }
            self.recover_hidden()?;
        }
        if self.len() - self.seen() > MAX_UNSEEN {
            let caught_up = self.catch_up(None).map(drop);
            self.or_do_without(caught_up)?;
        }
        Ok(())
    }

    /// Computes the tokens anew that the prediction layer has not seen, if any: their hidden states are not known any more.
    fn recover_hidden(&mut self) -> Result<(), ModelError> {
        let seen = self.seen();
        let unseen = self.ids.split_off(seen);
        self.cache.truncate(seen);
        if let Some(drafting) = &mut self.drafting {
            drafting.hidden.clear();
        }
        // Not to be interrupted, so that the context stays what it was.
        let stop = self.options.stop.take();
        let mut slices = unseen.chunks(self.sizes.slice);
        let result = slices.try_for_each(|slice| self.append(slice));
        self.options.stop = stop;
        result
    }

    /// Takes the prediction layer to the end of the context, or to `next` after it. Returns the row of `x` with its last output.
    fn catch_up(&mut self, next: Option<u32>) -> Result<usize, ModelError> {
        let (seen, layer) = (self.seen(), self.model.layers.len());
        let Some(drafting) = &mut self.drafting else {
            return Ok(0);
        };
        let hidden = std::mem::take(&mut drafting.hidden);
        let tokens: Vec<u32> = self
            .ids
            .iter()
            .skip(seen + 1)
            .copied()
            .chain(next)
            .collect();
        let width = self.model.config.hidden_size;
        let (mut at, mut last, mut result) = (0, 0, Ok(()));
        for tokens in tokens.chunks(self.sizes.slice) {
            let hidden = &hidden[at * width..][..tokens.len() * width];
            result = self.predict(seen + at, tokens, hidden);
            if result.is_err() {
                break;
            }
            (at, last) = (at + tokens.len(), tokens.len() - 1);
        }
        if let Some(drafting) = &mut self.drafting {
            drafting.hidden = hidden;
            match &result {
                Ok(()) => {
                    drafting.hidden.drain(..at * width);
                    drafting.assumed = next;
                }
                Err(_) => self.cache.layers[layer].truncate(seen),
            }
        }
        result.map(|()| last)
    }

    /// Takes n positions from `position` on through the prediction layer: `tokens` [n] are those after them, `hidden` [n, hidden] the
    /// states at them, normed. The outputs are left in `x`.
    fn predict(
        &mut self,
        position: usize,
        tokens: &[u32],
        hidden: &[f32],
    ) -> Result<(), ModelError> {
        let model = self.model;
        let (Some(mtp), Some(drafting)) = (&model.mtp, &mut self.drafting) else {
            return Ok(());
        };
        let (n, width, eps) = (
            tokens.len(),
            model.config.hidden_size,
            model.config.rms_norm_eps,
        );
        self.clock.skip();
        let x = sized(&mut self.x, n * width);
        let at_once = self.sizes.attention;
        let rows = hidden
            .chunks(at_once * width)
            .zip(x.chunks_mut(at_once * width));
        for (tokens, (hidden, x)) in tokens.chunks(at_once).zip(rows) {
            let input = sized(&mut drafting.input, tokens.len() * 2 * width);
            let rows = hidden.chunks(width).zip(input.chunks_mut(2 * width));
            for (token, (hidden, input)) in tokens.iter().zip(rows) {
                let (embedded, state) = input.split_at_mut(width);
                let raw = sized(&mut self.normed, width);
                raw.fill(0.0);
                model.embed.matrix().add_row(*token as usize, 1.0, raw);
                ops::rms_norm(raw, &mtp.token_norm, eps, embedded);
                ops::rms_norm(hidden, &mtp.hidden_norm, eps, state);
            }
            let projection = mtp.projection.matrix();
            projection.matmul(self.pool, input, tokens.len(), x);
        }
        self.angles.clear();
        for position in position..position + n {
            model.rope.angles(position, &mut self.angles);
        }
        // Rows are counted from the first one that there is; angles are those of the text.
        let row = position - self.cache.layers[model.layers.len()].first;
        drafting.selection.prepare(n, row + n - 1);
        self.clock.lap(Phase::Draft);
        self.layer(model.layers.len(), n, row)
    }

    /// Up to `n` drafts, of which the first is read off row `last` of `x` and each other is made of the one before it.
    fn chain(&mut self, n: usize, last: usize) -> Result<Vec<u32>, ModelError> {
        let (len, began) = (self.len(), self.began());
        let mut drafts = vec![];
        // What follows would be no token.
        while let Some(draft) = self.read_draft(if drafts.is_empty() { last } else { 0 }) {
            drafts.push(draft);
            let Some(drafting) = self.drafting.as_mut().filter(|_| drafts.len() < n) else {
                break;
            };
            if drafts.len() == 1 && self.model.shares_choice() {
                drafting.selection.keep(last, len - 1 - began);
            }
            let output = std::mem::take(&mut drafting.output);
            let result = self.predict(len - 1 + drafts.len(), &[draft], &output);
            if let Some(drafting) = &mut self.drafting {
                drafting.output = output;
            }
            result?;
        }
        Ok(drafts)
    }

    /// The likeliest token by row `row` of `x`, an output of the prediction layer.
    fn read_draft(&mut self, row: usize) -> Option<u32> {
        let model = self.model;
        let (mtp, drafting) = (model.mtp.as_ref()?, self.drafting.as_mut()?);
        let width = model.config.hidden_size;
        self.clock.skip();
        let output = sized(&mut drafting.output, width);
        let x = &self.x[row * width..][..width];
        ops::rms_norm(x, &mtp.head_norm, model.config.rms_norm_eps, output);
        let logits = sized(&mut drafting.logits, model.config.vocab_size);
        model.head().matrix().matmul(self.pool, output, 1, logits);
        self.clock.lap(Phase::Draft);
        argmax(logits)
    }
}
