//! Takes a slice of rows through the layers.
//!
//! All rows of a slice go through a layer together, so that its experts are read once for all of them. Inside a layer, attention takes
//! the rows a few at a time, each with the pages of its sequence. No number depends on either size.

use std::sync::Arc;

use crate::model::attention::AttentionScratch;
use crate::model::batch::{Part, rows_of, spans};
use crate::model::error::ModelError;
use crate::model::indexer::Selection;
use crate::model::kv::KvSpan;
use crate::model::layer::{Block, Layer};
use crate::model::load::Weights;
use crate::model::moe::Next;
use crate::model::ops;
use crate::model::pass::{Pass, Tokens};
use crate::model::phase::Phase;
use crate::model::runner::Runner;
use crate::model::scratch::resize_scratch;

impl Runner {
    /// Takes `parts` through all layers and adds them to their sequences. The final residual is left in `x`.
    pub(super) fn append(&mut self, parts: &mut [Part<'_>]) -> Result<(), ModelError> {
        let weights = Arc::clone(&self.weights);
        self.layers(&weights, parts)?;
        let mut row = 0;
        for part in parts {
            let n = part.ids.len();
            if !part.computed {
                part.sequence.ids.extend_from_slice(part.ids);
            }
            if part.sequence.can_draft() {
                self.remember_hidden(part.sequence, row, n);
            }
            row += n;
        }
        Ok(())
    }

    fn layers(&mut self, weights: &Weights, parts: &mut [Part<'_>]) -> Result<(), ModelError> {
        let (n, hidden) = (rows_of(parts), weights.config().hidden_size);
        self.timer.skip();
        self.timer.pass(parts[0].position, n);
        let x = resize_scratch(&mut self.x, n * hidden);
        x.fill(0.0);
        let ids = parts.iter().flat_map(|part| part.ids);
        for (id, x) in ids.zip(x.chunks_mut(hidden)) {
            weights.embed.matrix().add_row(*id as usize, 1.0, x);
        }
        self.angles.clear();
        let mut last = 0;
        for part in &*parts {
            let end = part.position + part.ids.len();
            for position in part.position..end {
                weights.rope.angles(position, &mut self.angles);
            }
            last = last.max(end - 1);
        }
        self.selection.prepare(n, last);
        self.timer.lap(Phase::Embed);
        let layers = weights.layers.len();
        // What the embedding alone predicts is read during the dense layers.
        let first_sparse = (0..layers).find(|layer| sparse(weights, *layer).is_some());
        if let Some(layer) = first_sparse.filter(|first| *first > 0) {
            self.predict_at(weights, layer, n)?;
        }
        for layer in 0..layers {
            self.timer.layer(layer);
            self.predict_at(weights, layer, n)?;
            self.attend(weights, layer, &mut spans(parts, layer), n, false)?;
            self.check_finite(parts, n, layer, "attention")?;
            self.feed_forward(weights, layer, n)?;
            self.check_finite(parts, n, layer, "MLP")?;
        }
        Ok(())
    }

    /// Refuses a residual that `block` of `layer` has made infinite or NaN: it would choose experts and tokens at random.
    fn check_finite(
        &self,
        parts: &[Part<'_>],
        n: usize,
        layer: usize,
        block: &'static str,
    ) -> Result<(), ModelError> {
        let hidden = self.weights.config().hidden_size;
        let x = &self.x[..n * hidden];
        let Some(at) = ops::first_not_finite(x) else {
            return Ok(());
        };
        let mut positions = parts
            .iter()
            .flat_map(|part| part.position..part.position + part.ids.len());
        Err(ModelError::HiddenState {
            layer,
            block,
            position: positions.nth(at / hidden).unwrap_or(0),
            value: x[at],
        })
    }

    /// Takes the rows of `spans`, whose residual is in `x` and whose angles are prepared, through the prediction layer.
    pub(super) fn draft_layer(
        &mut self,
        weights: &Weights,
        spans: &mut [KvSpan<'_>],
        n: usize,
    ) -> Result<(), ModelError> {
        let layer = weights.layers.len();
        self.timer.layer(layer);
        self.predict_at(weights, layer, n)?;
        self.attend(weights, layer, spans, n, true)?;
        self.feed_forward(weights, layer, n)
    }

    /// Predicts the choice of a layer's router, if it has one, from the residual in `x`.
    fn predict_at(&mut self, weights: &Weights, layer: usize, n: usize) -> Result<(), ModelError> {
        let Some(next) = sparse(weights, layer) else {
            return Ok(());
        };
        let residual = &self.x[..n * weights.config().hidden_size];
        let mut pass = Pass {
            pool: &self.pool,
            timer: &mut self.timer,
            store: &mut self.store,
            meter: &mut self.meter,
            stop: self.options.stop.as_deref(),
        };
        next.predict(&mut pass, residual, &mut self.moe)?;
        self.timer.lap(Phase::Router);
        Ok(())
    }

    /// x += attention(norm(x)).
    fn attend(
        &mut self,
        weights: &Weights,
        layer: usize,
        spans: &mut [KvSpan<'_>],
        n: usize,
        draft: bool,
    ) -> Result<(), ModelError> {
        let config = weights.config();
        let (hidden, pairs) = (config.hidden_size, config.rope.dims / 2);
        let selection = match draft {
            true => &mut self.draft.selection,
            false => &mut self.selection,
        };
        let mut pass = Pass {
            pool: &self.pool,
            timer: &mut self.timer,
            store: &mut self.store,
            meter: &mut self.meter,
            stop: self.options.stop.as_deref(),
        };
        let weights = weights.layer(layer);
        for row in (0..n).step_by(self.limits.attention) {
            pass.check_stop()?;
            let count = self.limits.attention.min(n - row);
            let x = &mut self.x[row * hidden..(row + count) * hidden];
            let normed = resize_scratch(&mut self.normed, count * hidden);
            norm_rows(x, &weights.input_norm, config.rms_norm_eps, normed);
            let tokens = Tokens {
                n: count,
                row,
                x: normed,
                angles: &self.angles[row * pairs..(row + count) * pairs],
            };
            let delta = resize_scratch(&mut self.delta, count * hidden);
            attend_rows(
                weights,
                &mut pass,
                tokens,
                spans,
                selection,
                &mut self.attention,
                delta,
            );
            x.iter_mut().zip(&*delta).for_each(|(x, d)| *x += d);
            pass.meter.add(count * config.router.top_k);
        }
        self.timer.lap(Phase::Attention);
        Ok(())
    }

    /// x += mlp(norm(x)).
    fn feed_forward(
        &mut self,
        weights: &Weights,
        layer: usize,
        n: usize,
    ) -> Result<(), ModelError> {
        let config = weights.config();
        let hidden = config.hidden_size;
        let x = &mut self.x[..n * hidden];
        let normed = resize_scratch(&mut self.normed, n * hidden);
        norm_rows(
            x,
            &weights.layer(layer).post_norm,
            config.rms_norm_eps,
            normed,
        );
        let delta = resize_scratch(&mut self.delta, n * hidden);
        match &weights.layer(layer).mlp {
            Block::Dense(mlp) => {
                let done = |n| self.meter.add(n * config.router.top_k);
                mlp.forward(&self.pool, normed, &mut self.mlp, delta, done);
                self.timer.lap(Phase::Dense);
            }
            Block::Sparse(moe) => {
                let layers = weights.layers.len();
                let next = (layer + 1..layers).find_map(|next| sparse(weights, next));
                let mut pass = Pass {
                    pool: &self.pool,
                    timer: &mut self.timer,
                    store: &mut self.store,
                    meter: &mut self.meter,
                    stop: self.options.stop.as_deref(),
                };
                moe.forward(&mut pass, normed, x, next, &mut self.moe, delta)?;
            }
        }
        x.iter_mut().zip(&*delta).for_each(|(x, d)| *x += d);
        Ok(())
    }

    /// Gives `logits` the length of `rows` rows. What they hold is unspecified.
    pub(super) fn size_logits(&mut self, rows: usize) {
        let values = rows * self.weights.config().vocab_size;
        self.logits.truncate(values);
        let more = values - self.logits.len();
        self.logits.reserve_exact(more);
        self.logits.resize(values, 0.0);
    }

    /// Computes the logits of the rows `rows` of `x`, which are at `positions` of their sequences, as rows `first` and following of
    /// `logits`.
    ///
    /// # Errors
    /// [`ModelError::Logit`] when one is infinite or NaN.
    pub(super) fn head(
        &mut self,
        rows: &[usize],
        positions: &[usize],
        first: usize,
    ) -> Result<(), ModelError> {
        if rows.is_empty() {
            return Ok(());
        }
        let weights = &self.weights;
        let config = weights.config();
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let normed = resize_scratch(&mut self.normed, rows.len() * hidden);
        for (row, normed) in rows.iter().zip(normed.chunks_mut(hidden)) {
            let x = &self.x[row * hidden..][..hidden];
            ops::rms_norm(x, &weights.norm, config.rms_norm_eps, normed);
        }
        let logits = &mut self.logits[first * vocab..][..rows.len() * vocab];
        let head = weights.head().matrix();
        head.matmul(&self.pool, normed, rows.len(), logits);
        let bad = ops::first_not_finite(logits).map(|at| (at, logits[at]));
        self.timer.lap(Phase::Head);
        match bad {
            None => Ok(()),
            Some((at, value)) => Err(ModelError::Logit {
                token: at % vocab,
                position: positions[at / vocab],
                layer: weights.layers.len().saturating_sub(1),
                value,
            }),
        }
    }
}

/// The attention of some rows of a batch, each with the pages of its sequence.
fn attend_rows(
    weights: &Layer,
    pass: &mut Pass,
    tokens: Tokens,
    spans: &mut [KvSpan<'_>],
    selection: &mut Selection,
    scratch: &mut AttentionScratch,
    delta: &mut [f32],
) {
    let (start, end) = (tokens.row, tokens.row + tokens.n);
    let within = spans.iter_mut().filter_map(|span| span.within(start, end));
    let mut within: Vec<KvSpan> = within.collect();
    let attention = &weights.attention;
    attention.forward(pass, tokens, &mut within, selection, scratch, delta);
}

pub(super) fn norm_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let rows = x.chunks(weight.len()).zip(out.chunks_mut(weight.len()));
    rows.for_each(|(x, out)| ops::rms_norm(x, weight, eps, out));
}

/// What it takes to predict the choice of a layer's router, if it has one.
fn sparse(weights: &Weights, layer: usize) -> Option<Next<'_>> {
    let found = weights.layer(layer);
    match &found.mlp {
        Block::Dense(_) => None,
        Block::Sparse(moe) => Some(Next {
            layer,
            norm: &found.post_norm,
            eps: weights.config().rms_norm_eps,
            router: &moe.router,
        }),
    }
}
