//! The family `deepseek_v3` (DeepSeek V3, R1, V3.1): MLA, sigmoid routing by groups, YaRN.
//!
//! Follows `modeling_deepseek_v3.py` of transformers.

use super::family::{Family, Preset};
use super::keys::Keys;
use super::mla::{self, Defaults};
use super::{Architecture, ConfigError, Groups};

/// The family.
pub const FAMILY: Family = Family {
    model_type: "deepseek_v3",
    names: mla::NAMES,
    parse,
    presets: &[Preset {
        name: "deepseek-v3",
        about: "DeepSeek-V3, R1 and V3.1: 671 billion parameters",
        config: include_str!("published/deepseek-v3.json"),
    }],
    default_eos: &[1],
    // Those of Kimi K2.5, whose language model may be saved under this name.
    multimodal: ("language_model.model", "language_model.lm_head.weight"),
};

/// What the class in transformers takes where a key is absent.
pub const DEFAULTS: Defaults = Defaults {
    model_type: FAMILY.model_type,
    rms_norm_eps: 1e-6,
    max_position_embeddings: 4096,
    routed_scaling_factor: 2.5,
    groups: Groups { count: 8, keep: 4 },
    experts: &["n_routed_experts", "num_local_experts"],
    whole_queries: true,
    dense_layers: 3,
    mlp_layer_types: false,
    indexer: mla::no_indexer,
};

fn parse(keys: &Keys) -> Result<Architecture, ConfigError> {
    mla::parse(keys, &DEFAULTS)
}
