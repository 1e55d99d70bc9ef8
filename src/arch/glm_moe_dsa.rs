//! The family `glm_moe_dsa` (GLM-5 and later): MLA, sparse attention by scheduled indexers, sigmoid routing.
//!
//! Follows `modeling_glm_moe_dsa.py` of transformers. Keys that transformers or another engine follows are read, or
//! refused where they ask for arithmetic that is not implemented. Everything else is ignored, whatever its value.

use serde_json::{Value, json};

use super::family::{Dimensions, Family};
use super::keys::{
    Keys, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_RANK, MAX_VOCAB, MAX_WIDTH,
};
use super::names::{ExpertNames, Names, Part};
use super::{
    Architecture, Attention, ConfigError, Experts, Indexer, Mla, Rope, Router, Scoring, schedule,
};

/// The family.
pub const FAMILY: Family = Family {
    model_type: "glm_moe_dsa",
    names: NAMES,
    parse,
    write,
    default_eos: &[1],
    multimodal: ("model.language_model", "lm_head.weight"),
};

/// Epsilon of the norms inside attention: no key sets it.
const INNER_NORM_EPS: f32 = 1e-6;

const NAMES: Names = Names {
    trunk: "model",
    embedding: "embed_tokens.weight",
    norm: "norm.weight",
    head: "lm_head.weight",
    layers: "layers",
    parts: &[
        (Part::AttentionNorm, "input_layernorm.weight"),
        (Part::MlpNorm, "post_attention_layernorm.weight"),
        (Part::QueryDown, "self_attn.q_a_proj.weight"),
        (Part::QueryDownBias, "self_attn.q_a_proj.bias"),
        (Part::QueryNorm, "self_attn.q_a_layernorm.weight"),
        (Part::QueryUp, "self_attn.q_b_proj.weight"),
        (Part::KvDown, "self_attn.kv_a_proj_with_mqa.weight"),
        (Part::KvDownBias, "self_attn.kv_a_proj_with_mqa.bias"),
        (Part::KvNorm, "self_attn.kv_a_layernorm.weight"),
        (Part::KvUp, "self_attn.kv_b_proj.weight"),
        (Part::Output, "self_attn.o_proj.weight"),
        (Part::OutputBias, "self_attn.o_proj.bias"),
        (Part::IndexQuery, "self_attn.indexer.wq_b.weight"),
        (Part::IndexKey, "self_attn.indexer.wk.weight"),
        (Part::IndexWeights, "self_attn.indexer.weights_proj.weight"),
        (Part::IndexNorm, "self_attn.indexer.k_norm.weight"),
        (Part::IndexNormBias, "self_attn.indexer.k_norm.bias"),
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
    experts: ExpertNames {
        module: "mlp.experts",
        single: ["gate_proj.weight", "up_proj.weight", "down_proj.weight"],
        fused_gate_up: "gate_up_proj",
        fused_down: "down_proj",
    },
};

fn parse(keys: &Keys) -> Result<Architecture, ConfigError> {
    refuse_other_arithmetic(keys)?;
    let layers = keys.int("num_hidden_layers", 1, MAX_LAYERS, None)?;
    let experts_key = ["num_experts", "n_routed_experts", "num_local_experts"]
        .into_iter()
        .find(|key| keys.given(key).is_some())
        .unwrap_or("n_routed_experts");
    let experts = keys.int(experts_key, 1, MAX_EXPERTS, None)?;
    let width = keys.int("moe_intermediate_size", 1, MAX_WIDTH, None)?;
    let rope = keys.int("qk_rope_head_dim", 2, MAX_HEAD_DIM, None)?;
    if rope % 2 != 0 {
        return Err(keys.range("qk_rope_head_dim", "an even number".into()));
    }
    Ok(Architecture {
        model_type: FAMILY.model_type,
        vocab_size: keys.int("vocab_size", 1, MAX_VOCAB, None)?,
        hidden_size: keys.int("hidden_size", 1, MAX_WIDTH, None)?,
        intermediate_size: keys.int("intermediate_size", 1, MAX_WIDTH, None)?,
        rms_norm_eps: keys.float("rms_norm_eps", 0.0, 1.0, Some(1e-5))? as f32,
        max_position_embeddings: keys.int(
            "max_position_embeddings",
            1,
            u64::from(u32::MAX),
            Some(202_752),
        )?,
        tie_word_embeddings: keys.bool("tie_word_embeddings", false)?,
        eos_token_ids: Vec::new(),
        attention: Attention::Mla(mla(keys, rope)?),
        rope: Rope::parse(keys, rope)?,
        indexer: indexer(keys, layers, rope)?,
        mlp: schedule::mlp_kinds(keys, layers)?,
        router: Router {
            top_k: keys.int("num_experts_per_tok", 1, experts as u64, None)?,
            scoring: Scoring::Sigmoid,
            normalise: keys.bool("norm_topk_prob", true)?,
            scale: keys.float("routed_scaling_factor", 0.0, 1e6, Some(2.5))? as f32,
        },
        experts: Experts {
            count: experts,
            width,
        },
        shared_width: width * keys.int("n_shared_experts", 0, 64, Some(1))?,
        prediction: None,
        names: NAMES,
    })
}

/// Refuses keys that ask for arithmetic that is not implemented.
fn refuse_other_arithmetic(keys: &Keys) -> Result<(), ConfigError> {
    for (key, supported) in [
        ("hidden_act", json!("silu")),
        ("scoring_func", json!("sigmoid")),
        ("topk_method", json!("noaux_tc")),
        ("n_group", json!(1)),
        ("topk_group", json!(1)),
        ("moe_layer_freq", json!(1)),
        ("mlp_bias", json!(false)),
        ("rope_interleave", json!(true)),
    ] {
        keys.only(key, &supported)?;
    }
    if keys.given("swiglu_limit").is_some() {
        return Err(keys.unsupported("swiglu_limit", "null".into()));
    }
    schedule::only_kinds(
        keys,
        "layer_types",
        &["indexed_attention", "deepseek_sparse_attention"],
    )
}

fn mla(keys: &Keys, rope: usize) -> Result<Mla, ConfigError> {
    let heads = keys.int("num_attention_heads", 1, MAX_HEADS, None)?;
    let kv_heads = keys.int("num_key_value_heads", 1, MAX_HEADS, Some(heads))?;
    if kv_heads != heads {
        let supported = format!("{heads}, the number of attention heads");
        return Err(keys.unsupported("num_key_value_heads", supported));
    }
    let nope = keys.int("qk_nope_head_dim", 1, MAX_HEAD_DIM, None)?;
    Ok(Mla {
        heads,
        q_rank: keys.int("q_lora_rank", 1, MAX_RANK, None)?,
        kv_rank: keys.int("kv_lora_rank", 1, MAX_RANK, None)?,
        nope,
        rope,
        value: keys.int("v_head_dim", 1, MAX_HEAD_DIM, None)?,
        bias: keys.bool("attention_bias", false)?,
        scale: ((nope + rope) as f64).powf(-0.5) as f32,
        norm_eps: INNER_NORM_EPS,
    })
}

/// `index_topk` 0 means dense attention, and then no other key of the indexer is read.
fn indexer(keys: &Keys, layers: usize, rope: usize) -> Result<Option<Indexer>, ConfigError> {
    let top_k = keys.int("index_topk", 0, 1 << 24, Some(2048))?;
    if top_k == 0 {
        return Ok(None);
    }
    keys.only("indexer_rope_interleave", &json!(true))?;
    let width = keys.int("index_head_dim", 1, MAX_HEAD_DIM, Some(128))?;
    if width < rope {
        let least = format!("at least qk_rope_head_dim ({rope})");
        return Err(keys.range("index_head_dim", least));
    }
    Ok(Some(Indexer {
        top_k,
        heads: keys.int("index_n_heads", 1, MAX_HEADS, Some(32))?,
        width,
        norm_eps: INNER_NORM_EPS,
        layers: schedule::indexer_kinds(keys, layers)?,
        shared_by_drafts: keys.bool("index_share_for_mtp_iteration", false)?,
    }))
}

fn write(dimensions: &Dimensions) -> Value {
    let d = dimensions;
    json!({
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": FAMILY.model_type,
        "vocab_size": d.vocab,
        "hidden_size": d.hidden,
        "intermediate_size": d.intermediate,
        "moe_intermediate_size": d.moe_intermediate,
        "num_hidden_layers": d.layers,
        "first_k_dense_replace": d.dense_layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.heads,
        "n_routed_experts": d.experts,
        "num_experts_per_tok": d.top_k,
        "n_shared_experts": d.shared_experts,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": true,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": d.q_lora_rank,
        "kv_lora_rank": d.kv_lora_rank,
        "qk_nope_head_dim": d.qk_nope_head_dim,
        "qk_rope_head_dim": d.qk_rope_head_dim,
        "v_head_dim": d.v_head_dim,
        "index_topk": d.index_topk,
        "index_topk_freq": d.index_topk_freq,
        "index_skip_topk_offset": d.index_skip_topk_offset,
        "index_n_heads": d.index_heads,
        "index_head_dim": d.index_head_dim,
        "num_nextn_predict_layers": d.draft_layers,
        "hidden_act": "silu",
        "attention_bias": false,
        "tie_word_embeddings": false,
        "rms_norm_eps": 1e-5,
        "rope_parameters": { "rope_type": "default", "rope_theta": d.rope_theta },
        // A random model never means to stop.
        "eos_token_id": [],
    })
}
