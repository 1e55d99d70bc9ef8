//! The family `olmoe` (OLMoE-1B-7B): GQA with a norm over all heads, softmax routing, experts in every layer.
//!
//! Follows `modeling_olmoe.py` of transformers.

use serde_json::json;

use super::family::{Family, Preset};
use super::gqa::{self, Defaults, NAMES, Rest};
use super::keys::{Keys, MAX_EXPERTS, MAX_WIDTH};
use super::{Architecture, ConfigError, Experts, Groups, MlpKind, QkNorm, Router, Scoring};

/// The family.
pub const FAMILY: Family = Family {
    model_type: "olmoe",
    names: NAMES,
    parse,
    presets: &[Preset {
        name: "olmoe-1b-7b",
        about: "OLMoE-1B-7B: 7 billion parameters",
        config: include_str!("published/olmoe-1b-7b.json"),
    }],
    default_eos: &[50_279],
    multimodal: ("model.language_model", "lm_head.weight"),
};

const DEFAULTS: Defaults = Defaults::new(FAMILY.model_type, NAMES, QkNorm::Flat);

fn parse(keys: &Keys) -> Result<Architecture, ConfigError> {
    keys.only("hidden_act", &json!("silu"))?;
    for key in ["clip_qkv", "sliding_window"] {
        if keys.given(key).is_some() {
            return Err(keys.unsupported(key, "null".into()));
        }
    }
    let hidden = keys.int("hidden_size", 1, MAX_WIDTH, None)?;
    let count = keys.first_of(&["num_local_experts", "num_experts"]);
    let count = keys.int(count, 1, MAX_EXPERTS, None)?;
    gqa::parse(keys, &DEFAULTS, |layers, attention| {
        // The library's norms are as long as hidden_size says.
        if attention.query_width() != hidden {
            let supported = "hidden_size / num_attention_heads, a whole number";
            return Err(keys.unsupported("head_dim", supported.into()));
        }
        attention.bias = keys.bool("attention_bias", false)?;
        attention.output_bias = attention.bias;
        let width = keys.int("intermediate_size", 1, MAX_WIDTH, None)?;
        Ok(Rest {
            mlp: vec![MlpKind::Sparse; layers],
            intermediate: width,
            router: Router {
                top_k: keys.int("num_experts_per_tok", 1, count as u64, None)?,
                scoring: Scoring::Softmax,
                groups: Groups::ONE,
                bias: false,
                logit_bias: false,
                normalise: keys.bool("norm_topk_prob", false)?,
                scale: 1.0,
            },
            experts: Experts::silu(count, width),
            shared_width: 0,
        })
    })
}
