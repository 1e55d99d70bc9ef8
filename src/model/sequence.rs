//! Holds the state of one request: its tokens, their pages, and what drafting remembers.

use std::sync::Arc;

use crate::model::kv::{KvView, PageLayout, PageTable, SwapFile};

/// One text on its way through a model. It borrows nothing from the [`Runner`](crate::model::Runner) that made it, and only that runner
/// can continue it. Dropping it frees its pages.
#[derive(Debug)]
pub struct Sequence {
    /// Tokens that went through all layers.
    pub(super) ids: Vec<u32>,
    pub(super) kv: PageTable,
    /// `None` where nothing is drafted.
    pub(super) draft: Option<DraftState>,
    pub(super) swapped: Option<SwapFile>,
    /// How many sequences the runner had made before.
    pub(super) born: u64,
    /// Whole pages that the prefix tree was given, and those of the prediction layer.
    pub(super) published: (usize, usize),
}

/// What the prediction layer remembers of a sequence. Its row t, at slot t + 1, depends on the hidden state of t and on token t + 1.
#[derive(Debug)]
pub(super) struct DraftState {
    pub kv: PageTable,
    /// Position of the first row: 0, unless the layer has not seen how the text begins.
    pub first: usize,
    /// Position after the last row.
    pub seen: usize,
    /// Normed hidden states of the tokens from `seen` on, [tokens, width]. Of other length where one of them is not known.
    pub hidden: Vec<f32>,
    width: usize,
    /// The token that the last row was computed with, where the sequence does not have it yet.
    pub assumed: Option<u32>,
}

impl DraftState {
    /// The layer has seen nothing. Hidden states have `width` values.
    pub fn new(layout: &Arc<PageLayout>, width: usize) -> DraftState {
        DraftState {
            kv: PageTable::new(layout),
            first: 0,
            seen: 0,
            hidden: Vec::new(),
            width,
            assumed: None,
        }
    }

    /// Forgets the rows from position `end` on.
    pub fn cut(&mut self, end: usize) {
        self.first = self.first.min(end);
        self.seen = self.seen.min(end);
        let slots = if self.seen > self.first {
            self.seen + 1
        } else {
            0
        };
        self.kv.truncate(slots);
    }

    /// Forgets all rows. The next one is that of position `first`.
    pub fn begin_at(&mut self, first: usize) {
        self.cut(0);
        (self.first, self.seen) = (first, first);
    }

    /// After the sequence was truncated to `len` tokens.
    fn truncate(&mut self, len: usize) {
        if len > self.seen {
            self.hidden.truncate((len - self.seen) * self.width);
        } else {
            self.hidden.clear();
            self.cut(len.saturating_sub(1));
        }
    }
}

impl Sequence {
    /// Tokens in the sequence.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether it has no tokens.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Whether tokens are drafted for it.
    pub fn can_draft(&self) -> bool {
        self.draft.is_some()
    }

    /// Ends drafting for this sequence: its hidden states are no longer remembered.
    pub fn stop_drafting(&mut self) {
        self.draft = None;
    }

    /// Whether its pages are in a file.
    pub fn is_swapped(&self) -> bool {
        self.swapped.is_some()
    }

    /// Forgets the tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        if len >= self.len() {
            return;
        }
        self.ids.truncate(len);
        if let Some(draft) = &mut self.draft {
            if let Some(swapped) = &mut self.swapped
                && len <= draft.seen
            {
                swapped.hidden = 0;
            }
            draft.truncate(len);
        }
        self.kv.truncate(len);
        let whole = len / crate::model::kv::PAGE;
        self.published = (self.published.0.min(whole), self.published.1.min(whole));
    }

    /// Forgets what a text that begins with `prompt` does not have, and returns how many of its tokens are left: the others, at
    /// least one, are for [`Runner::prefill`](crate::model::Runner::prefill), whose logits have the same bits as without reuse.
    pub fn reuse(&mut self, prompt: &[u32]) -> usize {
        let kept = reusable(&self.ids, prompt);
        self.truncate(kept);
        kept
    }

    /// The cache rows, for a KV file. Those of a prediction layer that began late are of no use to it.
    pub fn kv(&self) -> KvView<'_> {
        let rows = |draft: &DraftState| if draft.first == 0 { draft.seen } else { 0 };
        KvView {
            main: (&self.kv, self.len()),
            draft: self.draft.as_ref().map(|draft| (&draft.kv, rows(draft))),
        }
    }
}

/// How many tokens of `prompt` a sequence of `ids` spares: the common beginning, but never all of the prompt, because the logits
/// after its last token have to be computed.
pub fn reusable(ids: &[u32], prompt: &[u32]) -> usize {
    let common = ids.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    common.min(prompt.len().saturating_sub(1))
}

/// The sequence to swap out when pages run out: the youngest that has pages.
pub fn swap_victim<'a>(sequences: impl IntoIterator<Item = &'a Sequence>) -> Option<usize> {
    let sequences = sequences.into_iter().enumerate();
    let resident = sequences.filter(|(_, sequence)| !sequence.kv.pages().is_empty());
    resident
        .max_by_key(|(_, sequence)| sequence.born)
        .map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_of_a_prompt_is_never_spared() {
        for (ids, prompt, spared) in [
            (&[][..], &[1, 2][..], 0),
            (&[1, 2], &[1, 2, 3], 2),
            (&[1, 2, 3, 4], &[1, 2, 3], 2),
            (&[1, 2, 3], &[1, 2, 3], 2),
            (&[1, 9, 3], &[1, 2, 3], 1),
            (&[5], &[5], 0),
            (&[5], &[], 0),
        ] {
            assert_eq!(reusable(ids, prompt), spared, "{ids:?} {prompt:?}");
        }
    }
}
