//! Runs the prediction layer: what probably follows a sequence.
//!
//! The layer has separate pages. Its row t depends on the hidden state of t and on token t + 1, so it is one row behind the sequence, and
//! further behind while nothing is drafted: the hidden states that it has not seen are remembered until then. Rows that were computed
//! from drafts are dropped when the drafts are made, whether they are accepted or not, and computed again from the true hidden states.
//! So the rows depend on the tokens of the sequence alone, never on what was drafted.
//!
//! Where hidden states of many tokens are not known, as in a sequence that was restored without the rows of the layer, it begins anew at
//! the end: it attends to what follows only, and its first drafts are accepted less often.
//!
//! The layer serves speed alone. When one of its experts cannot be read, drafting ends and the text goes on.

use std::sync::Arc;

use crate::model::batch::{Logits, Part, Step};
use crate::model::error::ModelError;
use crate::model::kv::{KvSpan, PrefixTree};
use crate::model::mtp::MAX_UNSEEN;
use crate::model::ops::{self, argmax};
use crate::model::phase::Phase;
use crate::model::runner::Runner;
use crate::model::scratch::resize_scratch;
use crate::model::sequence::{DraftState, Sequence};

use super::super::forward::norm_rows;

impl Runner {
    /// Up to `n` tokens that will probably follow the sequence and `id`; none where the sequence is empty or does not draft. Its tokens
    /// stay as they are.
    ///
    /// # Errors
    /// As [`Runner::forward`], except for what reading the layer's experts runs into: that ends drafting for the sequence.
    pub fn draft(
        &mut self,
        sequence: &mut Sequence,
        id: u32,
        n: usize,
    ) -> Result<Vec<u32>, ModelError> {
        self.check(sequence, &[id])?;
        if n == 0 || !sequence.can_draft() || sequence.is_empty() {
            return Ok(Vec::new());
        }
        self.prepare_drafting(sequence, None)?;
        let caught_up = self.catch_up(sequence, Some(id));
        let drafts = caught_up.and_then(|last| self.chain(sequence, n, last));
        let len = sequence.len();
        if let Some(draft) = &mut sequence.draft {
            draft.cut(len);
        }
        self.draft.selection.choose_anew();
        or_do_without(sequence, drafts)
    }

    /// Drafts up to `n` tokens after `id`, and appends `id` and the drafts to the sequence in one pass; returns the drafts.
    /// [`Runner::logits`] are then those after `id` and after each draft, with the same bits as those of [`Runner::decode`] on one after
    /// the other. The caller truncates the sequence before the first draft that it does not accept.
    ///
    /// # Errors
    /// As [`Runner::forward`]; the sequence is then as before.
    pub fn speculate(
        &mut self,
        sequence: &mut Sequence,
        id: u32,
        n: usize,
    ) -> Result<Vec<u32>, ModelError> {
        let drafts = self.draft(sequence, id, n.min(self.limits.slice - 1))?;
        let run = [&[id], &drafts[..]].concat();
        self.forward(&mut [Step {
            sequence,
            ids: &run,
            logits: Logits::All,
        }])?;
        Ok(drafts)
    }

    /// Takes the prediction layer to the end of the sequence, except for one row. For a KV file, of which hidden states are no part.
    /// Rows of a layer that began late are not kept.
    ///
    /// # Errors
    /// A stop. The sequence stays as it is.
    pub fn settle_drafts(&mut self, sequence: &mut Sequence) -> Result<(), ModelError> {
        let behind = |draft: &DraftState| draft.first == 0 && draft.seen + 1 < sequence.len();
        if sequence.draft.as_ref().is_some_and(behind) {
            self.check_owned(sequence)?;
            self.prepare_drafting(sequence, None)?;
            let caught_up = self.catch_up(sequence, None).map(drop);
            or_do_without(sequence, caught_up)?;
        }
        Ok(())
    }

    /// Remembers the hidden states of the last `n` tokens, whose residual is in `x` from row `row` on.
    pub(in crate::model) fn remember_hidden(&self, sequence: &mut Sequence, row: usize, n: usize) {
        let Some(draft) = &mut sequence.draft else {
            return;
        };
        let config = self.weights.config();
        let (width, before) = (config.hidden_size, draft.hidden.len());
        draft.hidden.reserve_exact(n * width);
        draft.hidden.resize(before + n * width, 0.0);
        norm_rows(
            &self.x[row * width..(row + n) * width],
            &self.weights.norm,
            config.rms_norm_eps,
            &mut draft.hidden[before..],
        );
    }

    /// Before the sequence grows by `next`, or by a token that is not known: makes the hidden states complete, and few.
    pub(in crate::model) fn prepare_drafting(
        &mut self,
        sequence: &mut Sequence,
        next: Option<u32>,
    ) -> Result<(), ModelError> {
        let (len, width) = (sequence.len(), self.weights.config().hidden_size);
        let Some(draft) = &mut sequence.draft else {
            return Ok(());
        };
        if draft.seen == len && (next.is_none() || draft.assumed != next) {
            draft.cut(len.saturating_sub(1));
        }
        let unseen = len - draft.seen;
        if draft.hidden.len() != unseen * width {
            // One token costs what decoding it does; many would be another prompt.
            if unseen > 1 {
                tracing::debug!(unseen, "the prediction layer begins anew");
                draft.begin_at(if next.is_some() { len } else { len - 1 });
            }
            draft.hidden.clear();
            self.recover_hidden(sequence)?;
        }
        let seen = sequence.draft.as_ref().map_or(len, |draft| draft.seen);
        if len - seen > MAX_UNSEEN {
            let caught_up = self.catch_up(sequence, None).map(drop);
            or_do_without(sequence, caught_up)?;
        }
        Ok(())
    }

    /// Computes the hidden states again of the tokens that the prediction layer has not seen: none or one. Cache rows stay as they are.
    fn recover_hidden(&mut self, sequence: &mut Sequence) -> Result<(), ModelError> {
        let seen = sequence.draft.as_ref().map_or(0, |draft| draft.seen);
        let unseen = sequence.ids[seen..].to_vec();
        if unseen.is_empty() {
            return Ok(());
        }
        // Not to be interrupted: a stop would come again at the next attempt.
        let stop = self.options.stop.take();
        let result = self.append(&mut [Part {
            sequence,
            ids: &unseen,
            position: seen,
            computed: true,
        }]);
        self.options.stop = stop;
        result
    }

    /// Takes the prediction layer to the end of the sequence, or to `next` after it. Returns the row of `x` with its last output.
    fn catch_up(
        &mut self,
        sequence: &mut Sequence,
        next: Option<u32>,
    ) -> Result<usize, ModelError> {
        let Some(draft) = &mut sequence.draft else {
            return Ok(0);
        };
        let (seen, width) = (draft.seen, self.weights.config().hidden_size);
        let rest = sequence.ids.iter().skip(seen + 1);
        let tokens: Vec<u32> = rest.copied().chain(next).collect();
        let hidden = std::mem::take(&mut draft.hidden);
        let (mut at, mut last, mut result) = (0, 0, Ok(()));
        for tokens in tokens.chunks(self.limits.slice) {
            let hidden = &hidden[at * width..][..tokens.len() * width];
            result = self.predict(draft, seen + at, tokens, hidden);
            if result.is_err() {
                break;
            }
            (at, last) = (at + tokens.len(), tokens.len() - 1);
        }
        draft.hidden = hidden;
        match &result {
            Ok(()) => {
                draft.hidden.drain(..at * width);
                draft.assumed = next;
            }
            Err(_) => draft.cut(seen),
        }
        result?;
        self.publish_drafts(sequence);
        Ok(last)
    }

    /// Takes n positions from `position` on through the prediction layer: `tokens` [n] are those after them, `hidden` [n, hidden] the
    /// states at them, normed. The outputs are left in `x`.
    fn predict(
        &mut self,
        draft: &mut DraftState,
        position: usize,
        tokens: &[u32],
        hidden: &[f32],
    ) -> Result<(), ModelError> {
        let weights = Arc::clone(&self.weights);
        let Some(mtp) = &weights.mtp else {
            return Ok(());
        };
        let n = tokens.len();
        self.reserve_drafts(draft, position + 1, position + 1 + n)?;
        let config = weights.config();
        let (width, eps) = (config.hidden_size, config.rms_norm_eps);
        self.timer.skip();
        let x = resize_scratch(&mut self.x, n * width);
        let at_once = self.limits.attention;
        let rows = hidden
            .chunks(at_once * width)
            .zip(x.chunks_mut(at_once * width));
        for (tokens, (hidden, x)) in tokens.chunks(at_once).zip(rows) {
            let input = resize_scratch(&mut self.draft.input, tokens.len() * 2 * width);
            let rows = hidden.chunks(width).zip(input.chunks_mut(2 * width));
            for (token, (hidden, input)) in tokens.iter().zip(rows) {
                let (embedded, state) = input.split_at_mut(width);
                let raw = resize_scratch(&mut self.normed, width);
                raw.fill(0.0);
                weights.embed.matrix().add_row(*token as usize, 1.0, raw);
                ops::rms_norm(raw, &mtp.token_norm, eps, embedded);
                ops::rms_norm(hidden, &mtp.hidden_norm, eps, state);
            }
            let projection = mtp.projection.matrix();
            projection.matmul(&self.pool, input, tokens.len(), x);
        }
        self.angles.clear();
        for position in position..position + n {
            weights.rope.angles(position, &mut self.angles);
        }
        // Attention counts from the first row of the layer; angles are those of the text.
        let first = position - draft.first;
        self.draft.selection.prepare(n, first + n - 1);
        self.timer.lap(Phase::Draft);
        let mut span = KvSpan {
            origin: draft.first + 1,
            table: &mut draft.kv,
            layer: 0,
            position: first,
            row: 0,
            rows: n,
            computed: false,
        };
        self.draft_layer(&weights, std::slice::from_mut(&mut span), n)?;
        draft.seen = position + n;
        Ok(())
    }

    /// Up to `n` drafts: the first is read off row `last` of `x`, each other one is made from the one before it.
    fn chain(
        &mut self,
        sequence: &mut Sequence,
        n: usize,
        last: usize,
    ) -> Result<Vec<u32>, ModelError> {
        let len = sequence.len();
        let mut drafts = vec![];
        let Some(draft) = &mut sequence.draft else {
            return Ok(drafts);
        };
        // Without a finite logit there is no draft.
        while let Some(id) = self.read_draft(if drafts.is_empty() { last } else { 0 }) {
            drafts.push(id);
            if drafts.len() == n {
                break;
            }
            if drafts.len() == 1 && self.weights.shares_choice() {
                self.draft.selection.keep(last, len - 1 - draft.first);
            }
            let output = std::mem::take(&mut self.draft.output);
            let result = self.predict(draft, len - 1 + drafts.len(), &[id], &output);
            self.draft.output = output;
            result?;
        }
        Ok(drafts)
    }

    /// The most probable token by row `row` of `x`, an output of the prediction layer.
    fn read_draft(&mut self, row: usize) -> Option<u32> {
        let weights = &self.weights;
        let (mtp, config) = (weights.mtp.as_ref()?, weights.config());
        let width = config.hidden_size;
        self.timer.skip();
        let output = resize_scratch(&mut self.draft.output, width);
        let x = &self.x[row * width..][..width];
        ops::rms_norm(x, &mtp.head_norm, config.rms_norm_eps, output);
        let logits = resize_scratch(&mut self.draft.logits, config.vocab_size);
        let head = weights.head().matrix();
        head.matmul(&self.pool, output, 1, logits);
        self.timer.lap(Phase::Draft);
        argmax(logits)
    }

    /// Makes the slots `start..end` of the prediction layer's pages writable.
    pub(in crate::model) fn reserve_drafts(
        &mut self,
        draft: &mut DraftState,
        start: usize,
        end: usize,
    ) -> Result<(), ModelError> {
        let Some(pages) = &self.draft_pages else {
            return Ok(());
        };
        let needed = draft.kv.missing(start, end);
        let reserve = |draft: &mut DraftState, prefixes: &mut PrefixTree| {
            (draft.kv).reserve(start, end, || pages.allocate_or(|| prefixes.evict_draft()))
        };
        if reserve(draft, &mut self.prefixes) {
            return Ok(());
        }
        if let Some(page) = draft.kv.shared_page(start) {
            self.prefixes.forget(page);
        }
        match reserve(draft, &mut self.prefixes) {
            true => Ok(()),
            false => Err(ModelError::OutOfPages {
                needed,
                free: pages.free(),
            }),
        }
    }
}

/// The result of the prediction layer. A failure other than a stop ends the drafts of the sequence, and nothing else.
fn or_do_without<T: Default>(
    sequence: &mut Sequence,
    result: Result<T, ModelError>,
) -> Result<T, ModelError> {
    match result {
        Err(ModelError::Stopped) => Err(ModelError::Stopped),
        Err(error) => {
            tracing::warn!("no more drafts: {error}");
            sequence.draft = None;
            Ok(T::default())
        }
        done => done,
    }
}
