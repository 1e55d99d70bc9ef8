//! Estimates the memory of a model before any of it is loaded.

use crate::config::Config;
use crate::model::attention::MAX_GROUP;
use crate::model::kv::PageLayout;
use crate::model::mtp::{self, MAX_UNSEEN};
use crate::quant::encode::Packing;
use crate::shards::{Shards, Tensor};
use crate::weight::{self, shapes::layer_of};

/// Bytes of the resident weights: every tensor of the index that is neither a routed expert nor of a layer that is not
/// used. Float and FP8 matrices become `dense`, if that is given.
pub fn resident_bytes(shards: &Shards, config: &Config, dense: Option<Packing>) -> u64 {
    let unused = |name: &str| {
        layer_of(name).is_some_and(|(layer, rest)| {
            let copy = layer == config.num_hidden_layers && mtp::is_copy(rest);
            layer >= config.layers() || copy
        })
    };
    let resident = |t: &Tensor<'_>| !t.name.contains(".mlp.experts.") && !unused(t.name);
    weight::resident_bytes(shards, shards.iter().filter(resident), dense)
}

/// Bytes of the KV pages of `tokens` tokens, those of the prediction layer included where it is used, and indexer keys where sparse
/// attention is `dsa`.
pub fn kv_bytes(config: &Config, dsa: bool, tokens: usize) -> u64 {
    let indexed = (0..config.layers())
        .filter(|layer| dsa && config.is_indexed(*layer))
        .count();
    let keys =
        (indexed as u64).saturating_mul(PageLayout::bytes_for(config.index_head_dim, tokens));
    (config.layers() as u64)
        .saturating_mul(PageLayout::bytes_for(config.kv_width(), tokens))
        .saturating_add(keys)
}

/// Bytes that `sequences` sequences in a pass, each with up to `drafts` drafts, take beyond weights, experts, pages and the scratch of
/// one sequence that drafts nothing: logits, and the hidden states that the prediction layer has not seen.
pub fn sequence_bytes(config: &Config, sequences: usize, drafts: usize) -> u64 {
    let sequences = sequences as u64;
    let (rows, hidden) = match config.prediction {
        // One more row for the draft that is being made.
        Some(_) => (
            sequences
                .saturating_mul(drafts as u64 + 1)
                .saturating_add(1),
            sequences.saturating_mul((MAX_UNSEEN * config.hidden_size) as u64),
        ),
        None => (sequences.saturating_sub(1), 0),
    };
    let logits = rows.saturating_mul(config.vocab_size as u64);
    logits.saturating_add(hidden).saturating_mul(4)
}

/// Bytes of attention scores that `threads` threads hold for a context of `tokens` tokens, all attended.
pub fn scores_bytes(threads: usize, tokens: usize) -> u64 {
    ((4 * MAX_GROUP * threads) as u64).saturating_mul(tokens as u64)
}
