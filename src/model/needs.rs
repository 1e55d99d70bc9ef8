//! What a model will take in memory, known before any of it is loaded.

use crate::config::{Config, IndexerKind};
use crate::model::attention::MAX_GROUP;
use crate::model::kv::Rows;
use crate::quant::encode::Packing;
use crate::shards::{Shards, Tensor};
use crate::weight::{self, shapes::layer_of};

/// Bytes of the resident weights: every tensor of the index that is neither a routed expert nor of a layer beyond the
/// last. Float and FP8 matrices become `dense`, if that is given.
pub fn resident_bytes(shards: &Shards, config: &Config, dense: Option<Packing>) -> u64 {
    let beyond =
        |name: &str| layer_of(name).is_some_and(|(layer, _)| layer >= config.num_hidden_layers);
    let resident = |t: &Tensor<'_>| !t.name.contains(".mlp.experts.") && !beyond(t.name);
    weight::resident_bytes(shards, shards.iter().filter(resident), dense)
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
