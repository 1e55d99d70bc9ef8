//! The family `glm4_moe_lite` (GLM-4.7-Flash): MLA and sigmoid routing, of a size that fits most drives.
//!
//! Follows `modeling_glm4_moe_lite.py` of transformers.

use super::family::{Family, Preset};
use super::keys::Keys;
use super::mla::{self, Defaults};
use super::{Architecture, ConfigError, Groups};

/// The family.
pub const FAMILY: Family = Family {
    model_type: "glm4_moe_lite",
    names: mla::NAMES,
    parse,
    presets: &[Preset {
        name: "glm-4.7-flash",
        about: "GLM-4.7-Flash: 30 billion parameters",
        config: include_str!("published/glm-4.7-flash.json"),
    }],
    default_eos: &[1],
    multimodal: ("model.language_model", "lm_head.weight"),
};

const DEFAULTS: Defaults = Defaults {
    model_type: FAMILY.model_type,
    rms_norm_eps: 1e-5,
    max_position_embeddings: 202_752,
    routed_scaling_factor: 1.8,
    groups: Groups::ONE,
    experts: &["n_routed_experts", "num_local_experts"],
    whole_queries: true,
    // transformers reads `mlp_layer_types`, other engines `first_k_dense_replace`.
    dense_layers: 1,
    mlp_layer_types: true,
    indexer: mla::no_indexer,
};

fn parse(keys: &Keys) -> Result<Architecture, ConfigError> {
    mla::parse(keys, &DEFAULTS)
}
