//! What a model will take in memory, known before any of it is loaded.

use crate::config::{Config, IndexerKind};
use crate::model::attention::MAX_GROUP;
use crate::model::kv::Rows;
use crate::quant::encode::Packing;
use crate::shards::{Dtype, Shards};
use crate::weight::packed_bytes;

/// Bytes of the resident weights: every tensor of the index that is neither a routed expert nor of a layer beyond the
/// last. Vectors are kept as f32, whatever they are stored as, and float and FP8 matrices become `dense` if that is given.
pub fn resident_bytes(shards: &Shards, config: &Config, dense: Option<Packing>) -> u64 {
    let beyond = |name: &str| {
        let layer = name
            .strip_prefix("model.layers.")
            .and_then(|rest| rest.split('.').next());
        layer
            .and_then(|n| n.parse::<usize>().ok())
            .is_some_and(|n| n >= config.num_hidden_layers)
    };
    shards
        .iter()
        .filter(|t| !t.name.contains(".mlp.experts.") && !beyond(t.name))
        .map(|t| {
            let packed = dense.and_then(|dense| packed_bytes(shards, &t, dense));
            packed.unwrap_or(match t.dtype {
                Dtype::Bf16 | Dtype::F16 if t.shape.len() == 1 => 2 * t.bytes,
                _ => t.bytes,
            })
        })
        .fold(0, u64::saturating_add)
}

/// Bytes that the cache of a context of `tokens` tokens takes, indexer keys included where sparse attention is `dsa`.
pub fn kv_bytes(config: &Config, dsa: bool, tokens: usize) -> u64 {
    let indexed = config
        .indexer
        .iter()
        .filter(|kind| dsa && **kind == IndexerKind::Full)
        .count();
    let keys = (indexed as u64).saturating_mul(Rows::bytes_for(config.index_head_dim, tokens));
    (config.num_hidden_layers as u64)
        .saturating_mul(Rows::bytes_for(config.kv_width(), tokens))
        .saturating_add(keys)
}

/// Bytes of attention scores that `threads` threads hold for a context of `tokens` tokens, all attended.
pub fn scores_bytes(threads: usize, tokens: usize) -> u64 {
    ((4 * MAX_GROUP * threads) as u64).saturating_mul(tokens as u64)
}
