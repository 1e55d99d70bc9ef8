//! The family `minimax_m2` (MiniMax-M2): GQA with a norm over all heads and a part of each head rotated, sigmoid routing.
//!
//! Follows `modeling_minimax_m2.py` of transformers. Keys that it ignores and other engines follow are refused where they ask for anything
//! else.

use serde_json::json;

use super::family::{Family, Preset};
use super::gqa::{self, Defaults, ROPE, Rest};
use super::keys::{Keys, MAX_EXPERTS, MAX_HEAD_DIM, MAX_WIDTH};
use super::names::{ExpertNames, Names, Part};
use super::rope::RopeDefaults;
use super::{Architecture, ConfigError, Experts, Groups, MlpKind, QkNorm, Router, Scoring};

/// The family.
pub const FAMILY: Family = Family {
    model_type: "minimax_m2",
    names: NAMES,
    parse,
    presets: &[Preset {
        name: "minimax-m2",
        about: "MiniMax-M2: 230 billion parameters",
        config: include_str!("published/minimax-m2.json"),
    }],
    default_eos: &[200_020],
    multimodal: ("model.language_model", "lm_head.weight"),
};

const NAMES: Names = Names {
    parts: &[
        (Part::AttentionNorm, "input_layernorm.weight"),
        (Part::MlpNorm, "post_attention_layernorm.weight"),
        (Part::Query, "self_attn.q_proj.weight"),
        (Part::QueryNorm, "self_attn.q_norm.weight"),
        (Part::Key, "self_attn.k_proj.weight"),
        (Part::KeyNorm, "self_attn.k_norm.weight"),
        (Part::Value, "self_attn.v_proj.weight"),
        (Part::Output, "self_attn.o_proj.weight"),
        (Part::Router, "block_sparse_moe.gate.weight"),
        (Part::RouterBias, "block_sparse_moe.e_score_correction_bias"),
    ],
    experts: ExpertNames {
        module: "block_sparse_moe.experts",
        single: ["w1.weight", "w3.weight", "w2.weight"],
        fused_gate_up: "gate_up_proj",
        fused_down: "down_proj",
    },
    ..gqa::NAMES
};

const DEFAULTS: Defaults = Defaults {
    rms_norm_eps: 1e-6,
    max_position_embeddings: 196_608,
    width: Some(128),
    ..Defaults::new(FAMILY.model_type, NAMES, QkNorm::Flat)
};

fn parse(keys: &Keys) -> Result<Architecture, ConfigError> {
    for (key, supported) in [
        ("hidden_act", json!("silu")),
        ("scoring_func", json!("sigmoid")),
        ("qk_norm_type", json!("per_layer")),
        ("use_qk_norm", json!(true)),
        ("use_routing_bias", json!(true)),
        ("shared_intermediate_size", json!(0)),
    ] {
        keys.only(key, &supported)?;
    }
    if keys.given("sliding_window").is_some() {
        return Err(keys.unsupported("sliding_window", "null".into()));
    }
    if let Some(value) = keys.given("attn_type_list") {
        let list = value.as_array();
        let list = list.ok_or_else(|| keys.wrong_type("attn_type_list", "a list of numbers"))?;
        // 0 is linear attention.
        if let Some(other) = list.iter().find(|kind| kind.as_u64() != Some(1)) {
            return Err(keys.unsupported_of("attn_type_list", other, "1".into()));
        }
    }
    let count = keys.first_of(&["num_experts", "num_local_experts"]);
    let count = keys.int(count, 1, MAX_EXPERTS, None)?;
    let width = keys.int("intermediate_size", 1, MAX_WIDTH, None)?;
    let defaults = Defaults {
        rope: rope(keys)?,
        ..DEFAULTS
    };
    gqa::parse(keys, &defaults, |layers, _| {
        Ok(Rest {
            mlp: vec![MlpKind::Sparse; layers],
            intermediate: width,
            router: Router {
                top_k: keys.int("num_experts_per_tok", 1, count as u64, None)?,
                scoring: Scoring::Sigmoid,
                groups: Groups::ONE,
                bias: true,
                logit_bias: false,
                normalise: true,
                scale: 1.0,
            },
            experts: Experts::silu(count, width),
            shared_width: 0,
        })
    })
}

/// The older `rotary_dim` stands for the share of a head.
fn rope(keys: &Keys) -> Result<RopeDefaults, ConfigError> {
    let mut rope = RopeDefaults {
        theta: 5_000_000.0,
        share: Some(1.0),
        ..ROPE
    };
    if keys.given("rotary_dim").is_some() {
        let width = keys.int("head_dim", 1, MAX_HEAD_DIM, Some(128))?;
        let dims = keys.int("rotary_dim", 2, width as u64, None)?;
        if !dims.is_multiple_of(2) {
            return Err(keys.range("rotary_dim", "an even number".into()));
        }
        rope.share = Some(dims as f64 / width as f64);
    }
    Ok(rope)
}
