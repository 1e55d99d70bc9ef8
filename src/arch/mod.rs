//! Turns `config.json` into an [`Architecture`]: the one description of a model that everything else reads.
//!
//! One file a family knows its config keys and tensor names; `families` lists them. Every value is checked against its
//! range before anything is allocated from it. The ranges are wide for any real model and narrow enough that no product
//! of dimensions overflows 64 bits.

use std::path::Path;

use serde_json::Value;

mod deepseek_v3;
mod deepseek_v32;
mod dimensions;
mod error;
mod families;
mod family;
mod glm4_moe;
mod glm4_moe_lite;
mod glm_moe_dsa;
mod gpt_oss;
mod gqa;
mod keys;
mod kimi_k2;
mod minimax_m2;
mod mla;
mod names;
mod olmoe;
mod qwen3_moe;
mod rope;
mod schedule;
mod shapes;
mod stop;
#[cfg(test)]
pub(crate) mod tests;

pub use dimensions::Dimension;
pub use error::ConfigError;
pub use families::{parse_any, presets};
pub use family::{Family, Preset};
pub use gqa::{Gqa, QkNorm};
pub(crate) use keys::{Keys, read_object};
pub use names::{Names, Part, Projection, TensorId};
pub use rope::{Rope, RopeLayout, Yarn};
pub use shapes::Shape;

/// The feed-forward block of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// One MLP of `intermediate_size`.
    Dense,
    /// Routed experts and a shared expert.
    Sparse,
}

/// The attended positions of a layer, where sparse attention is active.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexerKind {
    /// Selected by the layer's own indexer.
    Full,
    /// Those of the nearest full layer before it.
    Shared,
}

/// The layer for drafts (multi-token prediction), at index `num_hidden_layers`. It has routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// Whether it has its own indexer; without one it attends to all positions.
    pub indexer: bool,
}

/// How a layer attends. A family with another kind adds a variant; the compiler then lists the readers.
#[derive(Clone, Debug, PartialEq)]
pub enum Attention {
    /// Multi-head latent attention: the cache holds one compressed key-value a token.
    Mla(Mla),
    /// Grouped-query attention: the cache holds keys and values of a few heads.
    Gqa(Gqa),
}

/// Multi-head latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Mla {
    /// Attention heads.
    pub heads: usize,
    /// Rank of the query projection; `None` where one matrix projects queries.
    pub q_rank: Option<usize>,
    /// Rank of the key-value projection.
    pub kv_rank: usize,
    /// Dimensions of a query or key head that are not rotated.
    pub nope: usize,
    /// Rotated dimensions of a query or key head.
    pub rope: usize,
    /// Dimensions of a value head.
    pub value: usize,
    /// Whether the down projections and the output projection have biases.
    pub bias: bool,
    /// Factor on the scores.
    pub scale: f32,
    /// Epsilon of the norms inside attention.
    pub norm_eps: f32,
}

impl Mla {
    /// Dimensions of a query or key head.
    pub fn query_width(&self) -> usize {
        self.nope + self.rope
    }

    /// Values of a cache row: the compressed key-value and the rotated key.
    pub fn cache_width(&self) -> usize {
        self.kv_rank + self.rope
    }
}

/// Sparse attention (DSA): which earlier positions a token attends to.
#[derive(Clone, Debug, PartialEq)]
pub struct Indexer {
    /// Positions that a token attends to.
    pub top_k: usize,
    /// Heads.
    pub heads: usize,
    /// Dimensions of a head; the first ones are rotated.
    pub width: usize,
    /// Epsilon of the key norm.
    pub norm_eps: f32,
    /// Pairs of the rotated dimensions.
    pub layout: RopeLayout,
    /// By decoder layer; the first is full.
    pub layers: Vec<IndexerKind>,
    /// Whether drafts after the first attend to the positions that the first one selected.
    pub shared_by_drafts: bool,
}

/// What turns a router's logits into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// The sigmoid of each logit.
    Sigmoid,
    /// The softmax over all experts.
    Softmax,
    /// The logit itself; the weights of a token are the softmax over the chosen ones.
    Chosen,
}

/// Groups of neighbouring experts, among which a token first selects some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Number of groups, all of the same size; at least two experts each where some are left out.
    pub count: usize,
    /// Groups whose experts a token may use: those with the largest sums of their two best scores.
    pub keep: usize,
}

impl Groups {
    /// One group, which is kept.
    pub const ONE: Groups = Groups { count: 1, keep: 1 };
}

/// How a sparse layer selects experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// Experts that a token uses.
    pub top_k: usize,
    /// Logits to scores.
    pub scoring: Scoring,
    /// Groups of experts; [`Groups::ONE`] where no expert is left out.
    pub groups: Groups,
    /// Whether a bias is added to the scores for the selection, though not for the weights.
    pub bias: bool,
    /// Whether a bias is added to the logits.
    pub logit_bias: bool,
    /// Whether the weights of a token are divided by their sum.
    pub normalise: bool,
    /// Factor on the weights.
    pub scale: f32,
}

/// How the routed experts of a model compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertKind {
    /// down(silu(gate) * up), without biases.
    Silu,
    /// Gate and up are one matrix [2 * width, hidden], a row of the gate before each row of up; it and down have biases. Down is given
    /// gate * sigmoid(alpha * gate) * (up + 1), with the gate at most `limit`, and up between -`limit` and `limit`.
    ClampedPairs {
        /// Slope of the sigmoid.
        alpha: f32,
        /// The largest magnitude.
        limit: f32,
    },
}

/// The routed experts of a sparse layer: gated MLPs.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// Number of experts.
    pub count: usize,
    /// Width of an expert.
    pub width: usize,
    /// How they compute.
    pub kind: ExpertKind,
}

impl Experts {
    /// Experts of the kind [`ExpertKind::Silu`].
    pub fn silu(count: usize, width: usize) -> Experts {
        Experts {
            count,
            width,
            kind: ExpertKind::Silu,
        }
    }

    /// Whether gate and up are one matrix of pairs of rows.
    pub fn in_pairs(&self) -> bool {
        match self.kind {
            ExpertKind::Silu => false,
            ExpertKind::ClampedPairs { .. } => true,
        }
    }
}

/// What a model computes, independent of its family's keys and tensor names.
#[derive(Clone, Debug, PartialEq)]
pub struct Architecture {
    /// The family's `model_type`.
    pub model_type: &'static str,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of a dense layer's MLP.
    pub intermediate_size: usize,
    /// Epsilon of the layer norms.
    pub rms_norm_eps: f32,
    /// The longest context that the model was trained for, in tokens.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Generation ends with any of these, ascending; from `config.json` and `generation_config.json`.
    pub eos_token_ids: Vec<u32>,
    /// Attention of every layer.
    pub attention: Attention,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Sparse attention; `None` where every position is attended.
    pub indexer: Option<Indexer>,
    /// Feed-forward block of each decoder layer.
    pub mlp: Vec<MlpKind>,
    /// Selection of experts.
    pub router: Router,
    /// Routed experts.
    pub experts: Experts,
    /// Width of the shared expert; 0 where there is none.
    pub shared_width: usize,
    /// The layer for drafts, where it is used. `config.json` alone does not decide that: see [`crate::model::prediction`].
    pub prediction: Option<Prediction>,
    /// Spelling of tensors.
    pub names: Names,
}

impl Architecture {
    /// Reads `config.json` of a directory and, if present, `generation_config.json`.
    ///
    /// # Errors
    /// Any [`ConfigError`]; each names the file, the key, its value and what is allowed.
    pub fn load(dir: &Path) -> Result<Architecture, ConfigError> {
        let path = dir.join("config.json");
        let config = keys::read_object(&path)?;
        let generation_path = dir.join("generation_config.json");
        let generation = match keys::read_object(&generation_path) {
            Ok(value) => Some(value),
            Err(ConfigError::Read { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                None
            }
            Err(e) => return Err(e),
        };
        Architecture::from_json(
            &path,
            &config,
            generation.as_ref().map(|g| (generation_path.as_path(), g)),
        )
    }

    /// Validates parsed JSON; the paths are only for messages.
    ///
    /// # Errors
    /// As [`Architecture::load`].
    pub fn from_json(
        path: &Path,
        config: &Value,
        generation: Option<(&Path, &Value)>,
    ) -> Result<Architecture, ConfigError> {
        let top = Keys::new(path, config)?;
        // A multimodal checkpoint holds the language model's keys in an object.
        let nested = match top.given("text_config") {
            Some(value) => Some(top.nested("text_config", value)?),
            None => None,
        };
        let family = families::find(nested.as_ref().unwrap_or(&top))?;
        let mut arch = family.parse(nested.as_ref().unwrap_or(&top))?;
        if nested.is_some() {
            (arch.names.trunk, arch.names.head) = family.multimodal;
            arch.tie_word_embeddings = top.bool("tie_word_embeddings", arch.tie_word_embeddings)?;
        }
        let generation = generation.map(|(p, v)| Keys::new(p, v)).transpose()?;
        let sources = [Some(&top), nested.as_ref(), generation.as_ref()];
        arch.eos_token_ids = stop::ids(sources.into_iter().flatten(), family.default_eos)?;
        Ok(arch)
    }

    /// Decoder layers, without the one for drafts.
    pub fn num_hidden_layers(&self) -> usize {
        self.mlp.len()
    }

    /// The layers that are used: decoder layers and the one for drafts.
    pub fn layers(&self) -> usize {
        self.num_hidden_layers() + usize::from(self.prediction.is_some())
    }

    /// The used layers that have routed experts, ascending.
    pub fn sparse_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layers()).filter(|layer| self.mlp_of(*layer) == MlpKind::Sparse)
    }

    /// The feed-forward block of a used layer.
    pub fn mlp_of(&self, layer: usize) -> MlpKind {
        self.mlp.get(layer).copied().unwrap_or(MlpKind::Sparse)
    }

    /// Whether a used layer selects positions by its own indexer, where attention is sparse.
    pub fn is_indexed(&self, layer: usize) -> bool {
        let Some(indexer) = &self.indexer else {
            return false;
        };
        match indexer.layers.get(layer) {
            Some(kind) => *kind == IndexerKind::Full,
            None => self.prediction.is_some_and(|p| p.indexer),
        }
    }

    /// Values that the cache keeps of a token and layer.
    pub fn kv_width(&self) -> usize {
        match &self.attention {
            Attention::Mla(mla) => mla.cache_width(),
            Attention::Gqa(gqa) => 2 * gqa.key_width(),
        }
    }

    /// Blocks that the values of [`Architecture::kv_width`] are stored in: one for each head of keys, then of values.
    pub fn kv_blocks(&self) -> usize {
        match &self.attention {
            Attention::Mla(_) => 1,
            Attention::Gqa(gqa) => 2 * gqa.kv_heads,
        }
    }
}
