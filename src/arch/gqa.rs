//! Describes grouped-query attention, and reads the keys that its families share.

use super::keys::{Keys, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH};
use super::names::{EXPERT_NAMES, Names, Part};
use super::rope::RopeDefaults;
use super::{Architecture, Attention, ConfigError, Experts, MlpKind, Rope, RopeLayout, Router};

/// Grouped-query attention: several query heads share a head of keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct Gqa {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Heads of keys and values. Query head h reads head h / (heads / kv_heads).
    pub kv_heads: usize,
    /// Dimensions of a head.
    pub width: usize,
    /// Norm of queries and keys.
    pub norm: QkNorm,
    /// Whether the projections to queries, keys and values have biases.
    pub bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Whether each query head has a learned score that takes part in the softmax without a value.
    pub sinks: bool,
    /// By layer, how many positions a token attends to, its own included; `None` for all.
    pub windows: Vec<Option<usize>>,
    /// Factor on the scores.
    pub scale: f32,
    /// Epsilon of the norms of queries and keys.
    pub norm_eps: f32,
}

impl Gqa {
    /// Values of the queries of a token.
    pub fn query_width(&self) -> usize {
        self.heads * self.width
    }

    /// Values of the keys of a token, and as many of its values.
    pub fn key_width(&self) -> usize {
        self.kv_heads * self.width
    }

    /// Query heads that share a head of keys and values.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// How many positions a token attends to in `layer`; `None` for all. The layer for drafts attends to all.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().flatten()
    }
}

/// Norm of queries and keys before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Each head separately, all with the same weights.
    Head,
    /// All heads of a token together.
    Flat,
}

/// Names of the spelling that most families share: no shared expert, no layer for drafts.
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
        (Part::QueryBias, "self_attn.q_proj.bias"),
        (Part::QueryNorm, "self_attn.q_norm.weight"),
        (Part::Key, "self_attn.k_proj.weight"),
        (Part::KeyBias, "self_attn.k_proj.bias"),
        (Part::KeyNorm, "self_attn.k_norm.weight"),
        (Part::Value, "self_attn.v_proj.weight"),
        (Part::ValueBias, "self_attn.v_proj.bias"),
        (Part::Output, "self_attn.o_proj.weight"),
        (Part::OutputBias, "self_attn.o_proj.bias"),
        (Part::Gate, "mlp.gate_proj.weight"),
        (Part::Up, "mlp.up_proj.weight"),
        (Part::Down, "mlp.down_proj.weight"),
        (Part::Router, "mlp.gate.weight"),
    ],
    experts: EXPERT_NAMES,
};

/// What a family does where its config says nothing, and how it differs from others.
pub struct Defaults {
    pub model_type: &'static str,
    pub names: Names,
    pub norm: QkNorm,
    pub rms_norm_eps: f64,
    pub max_position_embeddings: usize,
    /// Dimensions of a head; `None` where they follow from the width of the residual.
    pub width: Option<usize>,
    pub rope: RopeDefaults,
}

impl Defaults {
    /// Of a family with the most common ones.
    pub const fn new(model_type: &'static str, names: Names, norm: QkNorm) -> Defaults {
        Defaults {
            model_type,
            names,
            norm,
            rms_norm_eps: 1e-5,
            max_position_embeddings: 4096,
            width: None,
            rope: ROPE,
        }
    }
}

/// Half-split pairs of whole heads.
pub const ROPE: RopeDefaults = RopeDefaults::whole(RopeLayout::HalfSplit);

/// What families say in ways of their own.
pub struct Rest {
    /// Feed-forward block of each layer.
    pub mlp: Vec<MlpKind>,
    /// Width of a dense layer's MLP.
    pub intermediate: usize,
    pub router: Router,
    pub experts: Experts,
    /// Width of the shared expert; 0 where there is none.
    pub shared_width: usize,
}

/// Reads the keys that these families share. `rest` is given the number of layers and the attention, without biases, sinks and windows,
/// which it completes.
pub fn parse(
    keys: &Keys,
    defaults: &Defaults,
    rest: impl FnOnce(usize, &mut Gqa) -> Result<Rest, ConfigError>,
) -> Result<Architecture, ConfigError> {
    let layers = keys.int("num_hidden_layers", 1, MAX_LAYERS, None)?;
    let hidden_size = keys.int("hidden_size", 1, MAX_WIDTH, None)?;
    let eps = keys.float("rms_norm_eps", 0.0, 1.0, Some(defaults.rms_norm_eps))? as f32;
    let mut attention = attention(keys, hidden_size, defaults, eps)?;
    let rest = rest(layers, &mut attention)?;
    Ok(Architecture {
        model_type: defaults.model_type,
        vocab_size: keys.int("vocab_size", 1, MAX_VOCAB, None)?,
        hidden_size,
        intermediate_size: rest.intermediate,
        rms_norm_eps: eps,
        max_position_embeddings: keys.int(
            "max_position_embeddings",
            1,
            u64::from(u32::MAX),
            Some(defaults.max_position_embeddings),
        )?,
        tie_word_embeddings: keys.bool("tie_word_embeddings", false)?,
        eos_token_ids: Vec::new(),
        rope: Rope::parse(keys, attention.width, defaults.rope)?,
        attention: Attention::Gqa(attention),
        indexer: None,
        mlp: rest.mlp,
        router: rest.router,
        experts: rest.experts,
        shared_width: rest.shared_width,
        prediction: None,
        names: defaults.names,
    })
}

/// Reads `num_attention_heads`, `num_key_value_heads` and `head_dim`. Absent ones follow from `hidden` and from one another. Scores are
/// divided by the root of the width.
fn attention(
    keys: &Keys,
    hidden: usize,
    defaults: &Defaults,
    norm_eps: f32,
) -> Result<Gqa, ConfigError> {
    let heads = keys.int("num_attention_heads", 1, MAX_HEADS, None)?;
    let kv_heads = match keys.given("num_key_value_heads") {
        Some(_) => keys.int("num_key_value_heads", 1, MAX_HEADS, None)?,
        None => heads,
    };
    if !heads.is_multiple_of(kv_heads) {
        let allowed = format!("a divisor of num_attention_heads ({heads})");
        return Err(keys.range("num_key_value_heads", allowed));
    }
    let width = match (keys.given("head_dim"), defaults.width) {
        (Some(_), _) => keys.int("head_dim", 1, MAX_HEAD_DIM, None)?,
        (None, Some(width)) => width,
        (None, None) if hidden >= heads => hidden / heads,
        (None, None) => {
            let allowed = format!("at most hidden_size ({hidden}) without head_dim");
            return Err(keys.range("num_attention_heads", allowed));
        }
    };
    if !width.is_multiple_of(2) {
        return Err(keys.range("head_dim", "an even number".into()));
    }
    Ok(Gqa {
        heads,
        kv_heads,
        width,
        norm: defaults.norm,
        bias: false,
        output_bias: false,
        sinks: false,
        windows: Vec::new(),
        scale: (width as f64).powf(-0.5) as f32,
        norm_eps,
    })
}
