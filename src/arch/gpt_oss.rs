//! The family `gpt_oss` (gpt-oss-20b, gpt-oss-120b): GQA with biases, sinks and a window in every other layer, YaRN, experts in pairs of
//! gate and up with a clamped activation, published in MXFP4.
//!
//! Follows `modeling_gpt_oss.py` of transformers.

use serde_json::json;

use super::family::{Family, Preset};
use super::gqa::{self, Defaults, ROPE, Rest};
use super::keys::{Keys, MAX_EXPERTS, MAX_WIDTH};
use super::names::{Names, Part};
use super::rope::RopeDefaults;
use super::{
    Architecture, ConfigError, ExpertKind, Experts, Groups, MlpKind, QkNorm, Router, Scoring,
    schedule,
};

/// The family.
pub const FAMILY: Family = Family {
    model_type: "gpt_oss",
    names: NAMES,
    parse,
    presets: &[
        Preset {
            name: "gpt-oss-20b",
            about: "gpt-oss-20b: 21 billion parameters",
            config: include_str!("published/gpt-oss-20b.json"),
        },
        Preset {
            name: "gpt-oss-120b",
            about: "gpt-oss-120b: 117 billion parameters",
            config: include_str!("published/gpt-oss-120b.json"),
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
        (Part::Key, "self_attn.k_proj.weight"),
        (Part::KeyBias, "self_attn.k_proj.bias"),
        (Part::Value, "self_attn.v_proj.weight"),
        (Part::ValueBias, "self_attn.v_proj.bias"),
        (Part::Sinks, "self_attn.sinks"),
        (Part::Output, "self_attn.o_proj.weight"),
        (Part::OutputBias, "self_attn.o_proj.bias"),
        (Part::Router, "mlp.router.weight"),
        (Part::RouterLogitBias, "mlp.router.bias"),
        (Part::ExpertGateUpBias, "mlp.experts.gate_up_proj_bias"),
        (Part::ExpertDownBias, "mlp.experts.down_proj_bias"),
    ],
    ..gqa::NAMES
};

const DEFAULTS: Defaults = Defaults {
    max_position_embeddings: 131_072,
    width: Some(64),
    rope: RopeDefaults {
        theta: 150_000.0,
        ..ROPE
    },
    ..Defaults::new(FAMILY.model_type, NAMES, QkNorm::None)
};

fn parse(keys: &Keys) -> Result<Architecture, ConfigError> {
    keys.only("hidden_act", &json!("silu"))?;
    if keys.given("rope_parameters").is_none() {
        // Without both, the library takes a scaling that no key tells.
        keys.required("rope_scaling")?;
    }
    let count = keys.first_of(&["num_experts", "num_local_experts"]);
    let count = keys.int(count, 1, MAX_EXPERTS, None)?;
    gqa::parse(keys, &DEFAULTS, |layers, attention| {
        attention.bias = keys.bool("attention_bias", true)?;
        attention.output_bias = attention.bias;
        attention.sinks = true;
        let window = keys.int("sliding_window", 1, u64::from(u32::MAX), Some(128))?;
        attention.windows = schedule::windows(keys, layers, window)?;
        let width = keys.int("intermediate_size", 1, MAX_WIDTH, None)?;
        Ok(Rest {
            mlp: vec![MlpKind::Sparse; layers],
            intermediate: width,
            router: Router {
                top_k: keys.int("num_experts_per_tok", 1, count as u64, None)?,
                scoring: Scoring::Chosen,
                groups: Groups::ONE,
                bias: false,
                logit_bias: true,
                normalise: false,
                scale: 1.0,
            },
            experts: Experts {
                count,
                width,
                kind: ExpertKind::ClampedPairs {
                    alpha: keys.float("swiglu_alpha", 0.0, 1e3, Some(1.702))? as f32,
                    limit: keys.float("swiglu_limit", 0.0, 1e6, Some(7.0))? as f32,
                },
            },
            shared_width: 0,
        })
    })
}
