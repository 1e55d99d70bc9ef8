//! Holds the buffers that drafting reuses.

use crate::model::indexer::Selection;
use crate::model::load::Weights;

/// Scratch of drafting.
#[derive(Debug)]
pub struct DraftScratch {
    /// Positions that the layer attends to.
    pub selection: Selection,
    /// Embeddings and hidden states, normed [rows, 2 * hidden].
    pub(super) input: Vec<f32>,
    /// Output of the last draft, normed [hidden].
    pub(super) output: Vec<f32>,
    /// Logits of a draft [vocab_size].
    pub(super) logits: Vec<f32>,
}

impl DraftScratch {
    /// Scratch for a model whose sparse attention keeps `top_k` positions; `None` when it is dense.
    pub fn new(weights: &Weights, top_k: Option<usize>) -> DraftScratch {
        let mtp = weights.mtp.as_ref();
        let indexed = mtp.is_some_and(|mtp| mtp.layer.attention.indexer().is_some());
        DraftScratch {
            selection: Selection::new(top_k.filter(|_| indexed)),
            input: Vec::new(),
            output: Vec::new(),
            logits: Vec::new(),
        }
    }
}
