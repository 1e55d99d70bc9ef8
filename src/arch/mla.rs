//! Reads what the families with multi-head latent attention share: names, attention, indexer, router, experts.

use serde_json::{Value, json};

use super::keys::{
    Keys, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_RANK, MAX_VOCAB, MAX_WIDTH,
};
use super::names::{EXPERT_NAMES, Names, Part};
use super::rope::RopeDefaults;
use super::{
    Architecture, Attention, ConfigError, Experts, Groups, Indexer, Mla, Rope, RopeLayout, Router,
    Scoring, schedule,
};

/// Epsilon of the norms inside attention: no key sets it.
pub const INNER_NORM_EPS: f32 = 1e-6;

pub const NAMES: Names = Names {
    trunk: "model",
    embedding: "embed_tokens.weight",
    norm: "norm.weight",
    head: "lm_head.weight",
    layers: "layers",
    parts: &[
        (Part::AttentionNorm, "input_layernorm.weight"),
        (Part::MlpNorm, "post_attention_layernorm.weight"),
        (Part::Query, "self_attn.q_proj.weight"),
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
    experts: EXPERT_NAMES,
};

/// What a family's class in transformers takes where a key is absent, and which keys it reads.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    pub model_type: &'static str,
    pub rms_norm_eps: f64,
    pub max_position_embeddings: usize,
    pub routed_scaling_factor: f64,
    /// `n_group` and `topk_group`.
    pub groups: Groups,
    /// Keys for the number of experts; the first that is given counts.
    pub experts: &'static [&'static str],
    /// Whether `q_lora_rank` may be null.
    pub whole_queries: bool,
    /// `first_k_dense_replace`.
    pub dense_layers: usize,
    /// Whether `mlp_layer_types` counts instead, where it is given.
    pub mlp_layer_types: bool,
    /// The indexer, for this many layers and rotated dimensions.
    pub indexer: fn(&Keys, usize, usize) -> Result<Option<Indexer>, ConfigError>,
}

/// Reads the keys of a family.
pub fn parse(keys: &Keys, family: &Defaults) -> Result<Architecture, ConfigError> {
    refuse_other_arithmetic(keys)?;
    let layers = keys.int("num_hidden_layers", 1, MAX_LAYERS, None)?;
    let names = family.experts;
    let count = names.iter().find(|key| keys.given(key).is_some());
    let count = count.unwrap_or(&"n_routed_experts");
    let experts = keys.int(count, 1, MAX_EXPERTS, None)?;
    let width = keys.int("moe_intermediate_size", 1, MAX_WIDTH, None)?;
    let rope_dims = keys.int("qk_rope_head_dim", 2, MAX_HEAD_DIM, None)?;
    if rope_dims % 2 != 0 {
        return Err(keys.range("qk_rope_head_dim", "an even number".into()));
    }
    let layout = RopeDefaults::whole(RopeLayout::Interleaved);
    let rope = Rope::parse(keys, rope_dims, layout)?;
    Ok(Architecture {
        model_type: family.model_type,
        vocab_size: keys.int("vocab_size", 1, MAX_VOCAB, None)?,
        hidden_size: keys.int("hidden_size", 1, MAX_WIDTH, None)?,
        intermediate_size: keys.int("intermediate_size", 1, MAX_WIDTH, None)?,
        rms_norm_eps: keys.float("rms_norm_eps", 0.0, 1.0, Some(family.rms_norm_eps))? as f32,
        max_position_embeddings: keys.int(
            "max_position_embeddings",
            1,
            u64::from(u32::MAX),
            Some(family.max_position_embeddings),
        )?,
        tie_word_embeddings: keys.bool("tie_word_embeddings", false)?,
        eos_token_ids: Vec::new(),
        attention: Attention::Mla(attention(keys, family, &rope)?),
        rope,
        indexer: (family.indexer)(keys, layers, rope_dims)?,
        mlp: if family.mlp_layer_types {
            schedule::mlp_kinds(keys, layers, family.dense_layers)?
        } else {
            schedule::first_dense(keys, layers, family.dense_layers)?
        },
        router: router(keys, family, experts)?,
        experts: Experts::silu(experts, width),
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
        ("moe_layer_freq", json!(1)),
        ("mlp_bias", json!(false)),
        ("rope_interleave", json!(true)),
    ] {
        keys.only(key, &supported)?;
    }
    if keys.given("swiglu_limit").is_some() {
        return Err(keys.unsupported("swiglu_limit", "null".into()));
    }
    Ok(())
}

fn attention(keys: &Keys, family: &Defaults, rope: &Rope) -> Result<Mla, ConfigError> {
    let heads = keys.int("num_attention_heads", 1, MAX_HEADS, None)?;
    if keys.given("num_key_value_heads").is_some()
        && keys.int("num_key_value_heads", 1, MAX_HEADS, None)? != heads
    {
        let supported = format!("{heads}, the number of attention heads");
        return Err(keys.unsupported("num_key_value_heads", supported));
    }
    let whole = family.whole_queries && keys.find("q_lora_rank").is_some_and(Value::is_null);
    let rank = || keys.int("q_lora_rank", 1, MAX_RANK, None);
    let nope = keys.int("qk_nope_head_dim", 1, MAX_HEAD_DIM, None)?;
    let scale = ((nope + rope.dims) as f64).powf(-0.5) * rope.score_scale();
    Ok(Mla {
        heads,
        q_rank: (!whole).then(rank).transpose()?,
        kv_rank: keys.int("kv_lora_rank", 1, MAX_RANK, None)?,
        nope,
        rope: rope.dims,
        value: keys.int("v_head_dim", 1, MAX_HEAD_DIM, None)?,
        bias: keys.bool("attention_bias", false)?,
        scale: scale as f32,
        norm_eps: INNER_NORM_EPS,
    })
}

fn router(keys: &Keys, family: &Defaults, experts: usize) -> Result<Router, ConfigError> {
    let groups = groups(keys, family, experts)?;
    let candidates = experts / groups.count * groups.keep;
    let scale = family.routed_scaling_factor;
    Ok(Router {
        top_k: keys.int("num_experts_per_tok", 1, candidates as u64, None)?,
        scoring: Scoring::Sigmoid,
        groups,
        bias: true,
        logit_bias: false,
        normalise: keys.bool("norm_topk_prob", true)?,
        scale: keys.float("routed_scaling_factor", 0.0, 1e6, Some(scale))? as f32,
    })
}

/// Groups that leave no expert out become [`Groups::ONE`].
fn groups(keys: &Keys, family: &Defaults, experts: usize) -> Result<Groups, ConfigError> {
    let number = |key: &str, max: usize, default| match keys.find(key) {
        Some(Value::Null) => Ok(1),
        _ => keys.int(key, 1, max as u64, Some(default)),
    };
    let count = number("n_group", experts, family.groups.count)?;
    let keep = number("topk_group", count, family.groups.keep)?;
    if keep == count {
        return Ok(Groups::ONE);
    }
    if !experts.is_multiple_of(count) || experts / count < 2 {
        let allowed = format!("a divisor of {experts} experts with at least two in a group");
        return Err(keys.range("n_group", allowed));
    }
    Ok(Groups { count, keep })
}

/// The indexer where every layer's kind is in `layers`.
pub fn indexer(
    keys: &Keys,
    default_heads: usize,
    rope: usize,
    top_k: usize,
) -> Result<Indexer, ConfigError> {
    let width = keys.int("index_head_dim", 1, MAX_HEAD_DIM, Some(128))?;
    if width < rope {
        let least = format!("at least qk_rope_head_dim ({rope})");
        return Err(keys.range("index_head_dim", least));
    }
    Ok(Indexer {
        top_k,
        heads: keys.int("index_n_heads", 1, MAX_HEADS, Some(default_heads))?,
        width,
        norm_eps: INNER_NORM_EPS,
        layout: RopeLayout::Interleaved,
        layers: Vec::new(),
        shared_by_drafts: false,
    })
}

/// Every position is attended.
pub fn no_indexer(_: &Keys, _: usize, _: usize) -> Result<Option<Indexer>, ConfigError> {
    Ok(None)
}
