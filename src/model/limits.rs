//! Bounds how many rows are computed at once, so that the buffers of a pass stay within the planned scratch.

use crate::config::Config;

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
fn values(config: &Config, sparse: bool) -> (usize, usize) {
    let c = config;
    let picked = if sparse { c.index_topk } else { 0 };
    // Residual, normed, block output, shared expert.
    let mut state = 4 * c.hidden_size + picked + c.qk_rope_head_dim;
    if let Some(prediction) = c.prediction {
        // The hidden state that it is given, and its own choice of positions.
        state += c.hidden_size + if prediction.indexer { picked } else { 0 };
    }
    (state, c.hidden_size + c.moe_intermediate_size)
}

impl BatchLimits {
    /// Bytes of scratch with which a slice has `tokens` rows: the inverse of [`BatchLimits::new`].
    pub fn scratch_for(config: &Config, sparse: bool, tokens: usize) -> u64 {
        let (state, output) = values(config, sparse);
        let bytes = (2 * 4 * state as u64).max(4 * 4 * output as u64);
        bytes.saturating_mul(tokens as u64)
    }

    /// Half of the scratch is the state of a slice; attention and the outputs of experts get a quarter each.
    pub fn new(config: &Config, sparse: bool, scratch_bytes: usize) -> BatchLimits {
        let fit = |bytes: usize, values: usize| (bytes / (4 * values)).max(1);
        let c = config;
        let (state, output) = values(config, sparse);
        let slots = fit(scratch_bytes / 4, output);
        // The prediction layer's input is computed for as many rows at a time.
        let input = 2 * c.hidden_size * usize::from(c.prediction.is_some());
        let attention = input
            + c.num_attention_heads * (c.qk_head_dim() + c.v_head_dim)
            + 2 * c.q_lora_rank
            + c.kv_width()
            + if sparse {
                c.index_n_heads * (c.index_head_dim + 1)
            } else {
                0
            };
        BatchLimits {
            // One expert may be chosen by every token of a slice.
            slice: fit(scratch_bytes / 2, state).min(slots),
            attention: fit(scratch_bytes / 4, attention),
            slots: slots.max(c.num_experts_per_tok),
            head: fit(scratch_bytes / 8, c.vocab_size).min(16),
        }
    }
}
