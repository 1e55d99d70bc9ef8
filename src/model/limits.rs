//! Bounds how many rows are computed at once, so that the buffers of a pass stay within the planned scratch.

use crate::arch::{Architecture, Attention};

/// How many rows are computed at once, whatever mix of sequences they belong to.
#[derive(Clone, Copy, Debug)]
pub struct BatchLimits {
    /// Rows that go through the layers together: a slice.
    pub slice: usize,
    /// Rows that attention takes at a time.
    pub attention: usize,
    /// Expert outputs that wait to be added.
    pub slots: usize,
    /// Rows whose logits are computed at once.
    pub head: usize,
}

/// Values of the state of a row, and of an expert's output.
fn values(arch: &Architecture, sparse: bool) -> (usize, usize) {
    let indexer = arch.indexer.as_ref().filter(|_| sparse);
    let picked = indexer.map_or(0, |indexer| indexer.top_k);
    // Residual, normed, block output, shared expert.
    let mut state = 4 * arch.hidden_size + picked + arch.rope.dims;
    if let Some(prediction) = arch.prediction {
        // The hidden state that it is given, and its own choice of positions.
        state += arch.hidden_size + if prediction.indexer { picked } else { 0 };
    }
    (state, arch.hidden_size + arch.experts.width)
}

impl BatchLimits {
    /// Bytes of scratch with which a slice has `tokens` rows: the inverse of [`BatchLimits::new`].
    pub fn scratch_for(arch: &Architecture, sparse: bool, tokens: usize) -> u64 {
        let (state, output) = values(arch, sparse);
        let bytes = (2 * 4 * state as u64).max(4 * 4 * output as u64);
        bytes.saturating_mul(tokens as u64)
    }

    /// Half of the scratch is the state of a slice; attention and the outputs of experts get a quarter each.
    pub fn new(arch: &Architecture, sparse: bool, scratch_bytes: usize) -> BatchLimits {
        let fit = |bytes: usize, values: usize| (bytes / (4 * values)).max(1);
        let (state, output) = values(arch, sparse);
        let slots = fit(scratch_bytes / 4, output);
        // The prediction layer's input is computed for as many rows at a time.
        let input = 2 * arch.hidden_size * usize::from(arch.prediction.is_some());
        let indexer = arch.indexer.as_ref().filter(|_| sparse);
        let heads = match &arch.attention {
            Attention::Mla(mla) => {
                let rank = mla.q_rank.unwrap_or(0);
                mla.heads * (mla.query_width() + mla.value) + 2 * rank + mla.cache_width()
            }
            Attention::Gqa(gqa) => 2 * (gqa.query_width() + gqa.key_width()),
        };
        let attention =
            input + heads + indexer.map_or(0, |indexer| indexer.heads * (indexer.width + 1));
        BatchLimits {
            // One expert may be chosen by every token of a slice.
            slice: fit(scratch_bytes / 2, state).min(slots),
            attention: fit(scratch_bytes / 4, attention),
            slots: slots.max(arch.router.top_k),
            head: fit(scratch_bytes / 8, arch.vocab_size).min(16),
        }
    }
}
