//! Describes what goes through the layers together: steps of sequences, and the parts of them in one slice.

use std::ops::Range;

use crate::model::kv::KvSpan;
use crate::model::sequence::Sequence;

/// Which logits of a step are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: more of the prompt follows.
    None,
    /// Those after the last token.
    Last,
    /// Those after every token, to verify drafts.
    All,
}

impl Logits {
    /// Rows of logits of a step with `ids` tokens.
    pub fn rows(self, ids: usize) -> usize {
        match self {
            Logits::None => 0,
            Logits::Last => 1,
            Logits::All => ids,
        }
    }
}

/// Tokens that are appended to one sequence in a forward pass.
#[derive(Debug)]
pub struct Step<'a> {
    /// The sequence.
    pub sequence: &'a mut Sequence,
    /// The tokens, at least one.
    pub ids: &'a [u32],
    /// Which logits are wanted.
    pub logits: Logits,
}

impl Step<'_> {
    /// Rows of logits of the step.
    pub fn logit_rows(&self) -> usize {
        self.logits.rows(self.ids.len())
    }
}

/// The logits of a forward pass. They are valid until the runner computes something else.
#[derive(Clone, Copy, Debug)]
pub struct PassLogits<'a> {
    pub(super) values: &'a [f32],
    pub(super) vocab_size: usize,
    /// Row after the last one of each step.
    pub(super) ends: &'a [usize],
}

impl<'a> PassLogits<'a> {
    fn rows_of(&self, step: usize) -> Range<usize> {
        let start = step.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[step]
    }

    /// The logits of step `step`: [rows, vocab_size], with as many rows as the step asked for.
    pub fn of(&self, step: usize) -> &'a [f32] {
        let rows = self.rows_of(step);
        &self.values[rows.start * self.vocab_size..rows.end * self.vocab_size]
    }

    /// The logits `[vocab_size]` in row `row` of step `step`.
    ///
    /// # Panics
    /// When the step did not ask for that row.
    pub fn row(&self, step: usize, row: usize) -> &'a [f32] {
        &self.of(step)[row * self.vocab_size..][..self.vocab_size]
    }
}

/// The part of a step that is in one slice.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub sequence: &'a mut Sequence,
    pub ids: &'a [u32],
    /// Position of the first token.
    pub position: usize,
    /// The tokens are in the sequence already: only their hidden states are wanted.
    pub computed: bool,
}

/// Rows of all parts.
pub(super) fn rows_of(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.ids.len()).sum()
}

/// Where the cache rows of all parts go in a layer.
pub(super) fn spans<'s>(parts: &'s mut [Part], layer: usize) -> Vec<KvSpan<'s>> {
    let mut row = 0;
    let span = |part: &'s mut Part| {
        let first = row;
        row += part.ids.len();
        KvSpan {
            table: &mut part.sequence.kv,
            layer,
            origin: 0,
            position: part.position,
            row: first,
            rows: part.ids.len(),
            computed: part.computed,
        }
    };
    parts.iter_mut().map(span).collect()
}
