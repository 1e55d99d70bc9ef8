//! The family `glm4_moe` (GLM-4.5, GLM-4.5-Air, GLM-4.6): GQA with half of each head rotated, sigmoid routing, a shared expert, a layer for
//! drafts.
//!
//! Follows `modeling_glm4_moe.py` of transformers.

use serde_json::json;

use super::family::{Family, Preset};
use super::gqa::{self, Defaults, ROPE, Rest};
use super::keys::{Keys, MAX_EXPERTS, MAX_WIDTH};
use super::names::{Names, Part};
use super::rope::RopeDefaults;
use super::{Architecture, ConfigError, Experts, Groups, QkNorm, Router, Scoring, schedule};

/// The family.
pub const FAMILY: Family = Family {
    model_type: "glm4_moe",
    names: NAMES,
    parse,
    presets: &[
        Preset {
            name: "glm-4.5-air",
            about: "GLM-4.5-Air: 106 billion parameters",
            config: include_str!("published/glm-4.5-air.json"),
        },
        Preset {
            name: "glm-4.6",
            about: "GLM-4.5 and GLM-4.6: 355 billion parameters",
            config: include_str!("published/glm-4.6.json"),
        },
    ],
    default_eos: &[],
    multimodal: ("model.language_model", "lm_head.weight"),
};

const NAMES: Names = Names {
    parts: &[
        (Part::AttentionNorm, "input_layernorm.weight"),
        (Part::MlpNorm, "post_attention_layernorm.weight"),
        (Part::Query, "self_attn.q_proj.weight"),
        (Part::QueryBias, "self_attn.q_proj.bias"),
        (Part::QueryNorm, "self_attn.q_norm.weight"),
        (Part::Key, "self_attn.k_proj.weight"),
        (Part::KeyBias, "self_attn.k_proj.bias"),
        (Part::KeyNorm, "self_attn.k_norm.weight"),
        (Part::Value, "self_attn.v_proj.weight"),
        (Part::ValueBias, "self_attn.v_proj.bias"),
        (Part::Output, "self_attn.o_proj.weight"),
        (Part::Gate, "mlp.gate_proj.weight"),
        (Part::Up, "mlp.up_proj.weight"),
        (Part::Down, "mlp.down_proj.weight"),
        (Part::Router, "mlp.gate.weight"),
        (Part::RouterBias, "mlp.gate.e_score_correction_bias"),
        (Part::SharedGate, "mlp.shared_experts.gate_proj.weight"),
        (Part::SharedUp, "mlp.shared_experts.up_proj.weight"),
        (Part::SharedDown, "mlp.shared_experts.down_proj.weight"),
        (Part::DraftInput, "eh_proj.weight"),
        (Part::DraftTokenNorm, "enorm.weight"),
        (Part::DraftHiddenNorm, "hnorm.weight"),
        (Part::DraftHeadNorm, "shared_head.norm.weight"),
        (Part::DraftEmbedding, "embed_tokens.weight"),
        (Part::DraftHead, "shared_head.head.weight"),
    ],
    ..gqa::NAMES
};

const DEFAULTS: Defaults = Defaults {
    max_position_embeddings: 131_072,
    rope: RopeDefaults {
        share: Some(0.5),
        ..ROPE
    },
    ..Defaults::new(FAMILY.model_type, NAMES, QkNorm::None)
};

fn parse(keys: &Keys) -> Result<Architecture, ConfigError> {
    for (key, supported) in [
        ("hidden_act", json!("silu")),
        ("scoring_func", json!("sigmoid")),
        ("n_group", json!(1)),
        ("topk_group", json!(1)),
    ] {
        keys.only(key, &supported)?;
    }
    let count = keys.first_of(&["num_local_experts", "n_routed_experts"]);
    let count = keys.int(count, 1, MAX_EXPERTS, None)?;
    gqa::parse(keys, &DEFAULTS, |layers, attention| {
        // The output projection has no bias in any case.
        attention.bias = keys.bool("attention_bias", false)?;
        if keys.bool("use_qk_norm", false)? {
            attention.norm = QkNorm::Head;
        }
        let width = keys.int("moe_intermediate_size", 1, MAX_WIDTH, None)?;
        Ok(Rest {
            mlp: schedule::first_dense(keys, layers, 1)?,
            intermediate: keys.int("intermediate_size", 1, MAX_WIDTH, None)?,
            router: Router {
                top_k: keys.int("num_experts_per_tok", 1, count as u64, None)?,
                scoring: Scoring::Sigmoid,
                groups: Groups::ONE,
                bias: true,
                logit_bias: false,
                normalise: keys.bool("norm_topk_prob", true)?,
                scale: keys.float("routed_scaling_factor", 0.0, 1e6, Some(1.0))? as f32,
            },
            experts: Experts::silu(count, width),
            shared_width: width * keys.int("n_shared_experts", 0, 64, Some(1))?,
        })
    })
}
