//! Defines what a family file provides, and the dimensions of a model to be written.

use serde_json::Value;

use super::keys::Keys;
use super::{Architecture, ConfigError, Names};

/// A model family.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Spelling of tensors.
    pub(super) names: Names,
    /// Reads the keys. Stop tokens are read by the caller.
    pub(super) parse: fn(&Keys) -> Result<Architecture, ConfigError>,
    /// Writes `config.json` of a model with these dimensions.
    pub(super) write: fn(&Dimensions) -> Value,
    /// Stop tokens where no file names any.
    pub(super) default_eos: &'static [u32],
    /// Names of trunk and head in multimodal checkpoints, whose keys are in `text_config`.
    pub(super) multimodal: (&'static str, &'static str),
}

impl Family {
    pub(super) fn parse(&self, keys: &Keys) -> Result<Architecture, ConfigError> {
        (self.parse)(keys)
    }

    /// `config.json` of a model with these dimensions.
    pub fn config_json(&self, dimensions: &Dimensions) -> Value {
        (self.write)(dimensions)
    }
}

/// The dimensions of a model that is going to be written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dimensions {
    /// Decoder layers.
    pub layers: u64,
    /// The first so many have a dense MLP.
    pub dense_layers: u64,
    /// Width of the residual.
    pub hidden: u64,
    /// Width of a dense layer's MLP.
    pub intermediate: u64,
    /// Width of an expert.
    pub moe_intermediate: u64,
    /// Routed experts of a layer.
    pub experts: u64,
    /// Experts that a token uses.
    pub top_k: u64,
    /// Shared experts.
    pub shared_experts: u64,
    /// Attention heads.
    pub heads: u64,
    /// Rank of the queries.
    pub q_lora_rank: u64,
    /// Rank of keys and values.
    pub kv_lora_rank: u64,
    /// Dimensions of a head's key without position.
    pub qk_nope_head_dim: u64,
    /// Dimensions of a head's key with position.
    pub qk_rope_head_dim: u64,
    /// Dimensions of a head's value.
    pub v_head_dim: u64,
    /// Tokens of the vocabulary.
    pub vocab: u64,
    /// Positions that sparse attention attends; 0 for dense attention without an indexer.
    pub index_topk: u64,
    /// After the first layers, one layer in so many has its own indexer.
    pub index_topk_freq: u64,
    /// Number of the first layers, plus one, that have an indexer in any case.
    pub index_skip_topk_offset: u64,
    /// Heads of the indexer.
    pub index_heads: u64,
    /// Dimensions of its heads.
    pub index_head_dim: u64,
    /// Base of the rotary positions.
    pub rope_theta: f64,
    /// Layers for drafts after the last decoder layer: 0 or 1.
    pub draft_layers: u64,
}
