//! The family `deepseek_v32` (DeepSeek-V3.2): `deepseek_v3` with sparse attention by an indexer in every layer.
//!
//! Follows `modeling_deepseek_v32.py` of transformers. The indexer's heads are rotated in halves, those of attention in pairs.

use super::family::{Family, Preset};
use super::keys::Keys;
use super::mla::{self, Defaults};
use super::{Architecture, ConfigError, Groups, Indexer, IndexerKind, RopeLayout, schedule};

/// The family.
pub const FAMILY: Family = Family {
    model_type: "deepseek_v32",
    names: mla::NAMES,
    parse,
    presets: &[Preset {
        name: "deepseek-v3.2",
        about: "DeepSeek-V3.2: 671 billion parameters",
        config: include_str!("published/deepseek-v3.2.json"),
    }],
    default_eos: &[1],
    multimodal: ("model.language_model", "lm_head.weight"),
};

const DEFAULTS: Defaults = Defaults {
    model_type: FAMILY.model_type,
    rms_norm_eps: 1e-6,
    max_position_embeddings: 163_840,
    routed_scaling_factor: 2.5,
    groups: Groups { count: 8, keep: 4 },
    experts: &["num_experts", "n_routed_experts", "num_local_experts"],
    whole_queries: false,
    dense_layers: 3,
    mlp_layer_types: true,
    indexer,
};

fn parse(keys: &Keys) -> Result<Architecture, ConfigError> {
    schedule::only_indexed(keys)?;
    mla::parse(keys, &DEFAULTS)
}

/// `index_topk` 0 means dense attention, and then no other key of the indexer is read.
fn indexer(keys: &Keys, layers: usize, rope: usize) -> Result<Option<Indexer>, ConfigError> {
    let top_k = keys.int("index_topk", 0, 1 << 24, Some(2048))?;
    if top_k == 0 {
        return Ok(None);
    }
    Ok(Some(Indexer {
        layout: RopeLayout::HalfSplit,
        layers: vec![IndexerKind::Full; layers],
        ..mla::indexer(keys, 64, rope, top_k)?
    }))
}
