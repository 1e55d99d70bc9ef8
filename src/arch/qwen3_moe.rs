//! The family `qwen3_moe` (Qwen3-30B-A3B, Qwen3-235B-A22B): GQA with a norm for each head, softmax routing, no shared expert.
//!
//! Follows `modeling_qwen3_moe.py` of transformers.

use serde_json::json;

use super::family::{Family, Preset};
use super::gqa::{self, Defaults, NAMES, Rest};
use super::keys::{Keys, MAX_EXPERTS, MAX_WIDTH};
use super::{Architecture, ConfigError, Experts, Groups, QkNorm, Router, Scoring, schedule};

/// The family.
pub const FAMILY: Family = Family {
    model_type: "qwen3_moe",
    names: NAMES,
    parse,
    presets: &[
        Preset {
            name: "qwen3-30b-a3b",
            about: "Qwen3-30B-A3B: 31 billion parameters",
            config: include_str!("published/qwen3-30b-a3b.json"),
        },
        Preset {
            name: "qwen3-235b-a22b",
            about: "Qwen3-235B-A22B: 235 billion parameters",
            config: include_str!("published/qwen3-235b-a22b.json"),
        },
    ],
    default_eos: &[],
    multimodal: ("model.language_model", "lm_head.weight"),
};

const DEFAULTS: Defaults = Defaults {
    rms_norm_eps: 1e-6,
    max_position_embeddings: 32_768,
    ..Defaults::new(FAMILY.model_type, NAMES, QkNorm::Head)
};

fn parse(keys: &Keys) -> Result<Architecture, ConfigError> {
    keys.only("hidden_act", &json!("silu"))?;
    // Engines disagree on the layers that a window holds for.
    keys.only("use_sliding_window", &json!(false))?;
    let count = keys.first_of(&["num_local_experts", "num_experts"]);
    let count = keys.int(count, 1, MAX_EXPERTS, None)?;
    gqa::parse(keys, &DEFAULTS, |layers, attention| {
        attention.bias = keys.bool("attention_bias", false)?;
        attention.output_bias = attention.bias;
        Ok(Rest {
            mlp: schedule::sparse_steps(keys, layers)?,
            intermediate: keys.int("intermediate_size", 1, MAX_WIDTH, None)?,
            router: Router {
                top_k: keys.int("num_experts_per_tok", 1, count as u64, None)?,
                scoring: Scoring::Softmax,
                groups: Groups::ONE,
                bias: false,
                logit_bias: false,
                normalise: keys.bool("norm_topk_prob", false)?,
                scale: 1.0,
            },
            experts: Experts::silu(
                count,
                keys.int("moe_intermediate_size", 1, MAX_WIDTH, None)?,
            ),
            shared_width: 0,
        })
    })
}
