//! The family `glm_moe_dsa` (GLM-5 and later): MLA, sparse attention by scheduled indexers, sigmoid routing.
//!
//! Follows `modeling_glm_moe_dsa.py` of transformers. Keys that transformers or another engine follows are read, or
//! refused where they ask for arithmetic that is not implemented. Everything else is ignored, whatever its value.

use serde_json::json;

use super::family::{Family, Preset};
use super::keys::Keys;
use super::mla::{self, Defaults};
use super::{Architecture, ConfigError, Groups, Indexer, schedule};

/// The family.
pub const FAMILY: Family = Family {
    model_type: "glm_moe_dsa",
    names: mla::NAMES,
    parse,
    presets: &[
        Preset {
            name: "small",
            about: "GLM-5.2's architecture in about 2 GB",
            config: include_str!("published/small.json"),
        },
        Preset {
            name: "glm-5.2",
            about: "GLM-5.2: 744 billion parameters, 419 GB",
            config: include_str!("published/glm-5.2.json"),
        },
    ],
    default_eos: &[1],
    multimodal: ("model.language_model", "lm_head.weight"),
};

const DEFAULTS: Defaults = Defaults {
    model_type: FAMILY.model_type,
    rms_norm_eps: 1e-5,
    max_position_embeddings: 202_752,
    routed_scaling_factor: 2.5,
    groups: Groups::ONE,
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
    keys.only("indexer_rope_interleave", &json!(true))?;
    Ok(Some(Indexer {
        layers: schedule::indexer_kinds(keys, layers)?,
        shared_by_drafts: keys.bool("index_share_for_mtp_iteration", false)?,
        ..mla::indexer(keys, 32, rope, top_k)?
    }))
}
