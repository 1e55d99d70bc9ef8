//! `config.json` -> validated [`Config`].
//!
//! Every value is checked against its range before anything is allocated from it. The ranges are wide for
//! any real model and narrow enough that no product of dimensions overflows 64 bits. Keys that are absent
//! take the defaults of the architecture; the dimensions have none.

use std::path::{Path, PathBuf};

use serde_json::Value;

mod generation;
mod keys;
mod schedule;
#[cfg(test)]
mod tests;

pub use generation::Generation;
pub(crate) use keys::{Keys, read_object};

/// What can be wrong with `config.json` or `generation_config.json`.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The file is no JSON object.
    #[error("{}: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Why not, with line and column.
        reason: String,
    },
    /// A key without a default is absent.
    #[error("{}: key {key} is missing", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A value has the wrong JSON type.
    #[error("{}: {key} is {value}, expected {expected}", path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value as JSON, shortened.
        value: String,
        /// What the key holds.
        expected: &'static str,
    },
    /// A value is outside its range.
    #[error("{}: {key} is {value}, allowed is {allowed}", path.display())]
    Range {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value as JSON, shortened.
        value: String,
        /// The allowed values.
        allowed: String,
    },
    /// A valid value asks for something that is not implemented.
    #[error("{}: {key} {value} is not supported, only {supported}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value as JSON, shortened.
        value: String,
        /// The supported values.
        supported: String,
    },
}

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
    /// Chosen by the layer's own indexer.
    Full,
    /// Those of the nearest full layer before it.
    Shared,
}

/// The layer for multi-token prediction, at index `num_hidden_layers`. It has routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// Whether it has an indexer of its own; without one it attends to all positions.
    pub indexer: bool,
}

/// The hyperparameters of a `glm_moe_dsa` model, named as in `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of a dense layer's MLP.
    pub intermediate_size: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Decoder layers, without the multi-token-prediction layer.
    pub num_hidden_layers: usize,
    /// Attention heads.
    pub num_attention_heads: usize,
    /// Experts that every token uses, merged into one MLP.
    pub n_shared_experts: usize,
    /// Routed experts of a sparse layer.
    pub n_routed_experts: usize,
    /// Routed experts that one token uses.
    pub num_experts_per_tok: usize,
    /// Rank of the query projection.
    pub q_lora_rank: usize,
    /// Rank of the key-value projection: the width of the compressed cache.
    pub kv_lora_rank: usize,
    /// Rotated dimensions of a head; even.
    pub qk_rope_head_dim: usize,
    /// Dimensions of a query or key head that are not rotated.
    pub qk_nope_head_dim: usize,
    /// Dimensions of a value head.
    pub v_head_dim: usize,
    /// Positions that sparse attention attends; 0 makes it dense.
    pub index_topk: usize,
    /// Dimensions of an indexer head.
    pub index_head_dim: usize,
    /// Indexer heads.
    pub index_n_heads: usize,
    /// Factor on the router weights.
    pub routed_scaling_factor: f32,
    /// Whether the router weights of a token are divided by their sum.
    pub norm_topk_prob: bool,
    /// Epsilon of the layer norms (not of the norms inside attention).
    pub rms_norm_eps: f32,
    /// The longest context that the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether `lm_head` is `embed_tokens`.
    pub tie_word_embeddings: bool,
    /// Whether q_a, kv_a and o have a bias.
    pub attention_bias: bool,
    /// Generation ends with any of these, ascending; from `config.json` and `generation_config.json`.
    pub eos_token_ids: Vec<u32>,
    /// Feed-forward block of each layer.
    pub mlp: Vec<MlpKind>,
    /// Indexer of each layer; the first is full.
    pub indexer: Vec<IndexerKind>,
    /// Whether drafts after the first attend to the positions that the first one chose.
    pub index_share_for_mtp_iteration: bool,
    /// The layer for multi-token prediction, where it is used. `config.json` alone does not decide that:
    /// see [`crate::model::prediction`].
    pub prediction: Option<Prediction>,
}

const MAX_WIDTH: u64 = 1 << 20;
const MAX_RANK: u64 = 1 << 16;
const MAX_HEADS: u64 = 1 << 12;
const MAX_HEAD_DIM: u64 = 1 << 13;
const MAX_LAYERS: u64 = 1 << 10;
const MAX_EXPERTS: u64 = 1 << 14;

impl Config {
    /// Reads `config.json` of a directory and, where there is one, `generation_config.json`.
    ///
    /// # Errors
    /// Any [`ConfigError`]; each names the file, the key, its value and what is allowed.
    pub fn load(dir: &Path) -> Result<Config, ConfigError> {
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
        Config::from_json(
            &path,
            &config,
            generation.as_ref().map(|g| (generation_path.as_path(), g)),
        )
    }

    /// Validates parsed JSON; the paths are only for messages.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn from_json(
        path: &Path,
        config: &Value,
        generation: Option<(&Path, &Value)>,
    ) -> Result<Config, ConfigError> {
        let keys = Keys::new(path, config)?;
        refuse_unsupported(&keys)?;
        let num_hidden_layers = keys.int("num_hidden_layers", 1, MAX_LAYERS, None)?;
        let experts_key = ["num_experts", "n_routed_experts", "num_local_experts"]
            .into_iter()
            .find(|key| keys.find(key).is_some())
            .unwrap_or("n_routed_experts");
        let n_routed_experts = keys.int(experts_key, 1, MAX_EXPERTS, None)?;
        let num_attention_heads = keys.int("num_attention_heads", 1, MAX_HEADS, None)?;
        let kv_heads = keys.int(
            "num_key_value_heads",
            1,
            MAX_HEADS,
            Some(num_attention_heads),
        )?;
        if kv_heads != num_attention_heads {
            return Err(keys.unsupported(
                "num_key_value_heads",
                format!("{num_attention_heads}, the number of attention heads"),
            ));
        }
        let qk_rope_head_dim = keys.int("qk_rope_head_dim", 2, MAX_HEAD_DIM, None)?;
        if qk_rope_head_dim % 2 != 0 {
            return Err(keys.range("qk_rope_head_dim", "an even number".into()));
        }
        let index_topk = keys.int("index_topk", 0, 1 << 24, Some(2048))?;
        let index_head_dim = keys.int("index_head_dim", 1, MAX_HEAD_DIM, Some(128))?;
        if index_topk > 0 && index_head_dim < qk_rope_head_dim {
            return Err(keys.range(
                "index_head_dim",
                format!("at least qk_rope_head_dim ({qk_rope_head_dim})"),
            ));
        }
        Ok(Config {
            vocab_size: keys.int("vocab_size", 1, 1 << 24, None)?,
            hidden_size: keys.int("hidden_size", 1, MAX_WIDTH, None)?,
            intermediate_size: keys.int("intermediate_size", 1, MAX_WIDTH, None)?,
            moe_intermediate_size: keys.int("moe_intermediate_size", 1, MAX_WIDTH, None)?,
            num_hidden_layers,
            num_attention_heads,
            n_shared_experts: keys.int("n_shared_experts", 0, 64, Some(1))?,
            n_routed_experts,
            num_experts_per_tok: keys.int(
                "num_experts_per_tok",
                1,
                n_routed_experts as u64,
                None,
            )?,
            q_lora_rank: keys.int("q_lora_rank", 1, MAX_RANK, None)?,
            kv_lora_rank: keys.int("kv_lora_rank", 1, MAX_RANK, None)?,
            qk_rope_head_dim,
            qk_nope_head_dim: keys.int("qk_nope_head_dim", 1, MAX_HEAD_DIM, None)?,
            v_head_dim: keys.int("v_head_dim", 1, MAX_HEAD_DIM, None)?,
            index_topk,
            index_head_dim,
            index_n_heads: keys.int("index_n_heads", 1, MAX_HEADS, Some(32))?,
            routed_scaling_factor: keys.float("routed_scaling_factor", 0.0, 1e6, Some(2.5))? as f32,
            norm_topk_prob: keys.bool("norm_topk_prob", true)?,
            rms_norm_eps: keys.float("rms_norm_eps", 0.0, 1.0, Some(1e-5))? as f32,
            max_position_embeddings: keys.int(
                "max_position_embeddings",
                1,
                u64::from(u32::MAX),
                Some(202_752),
            )?,
            rope_theta: rope_theta(&keys)?,
            tie_word_embeddings: keys.bool("tie_word_embeddings", false)?,
            attention_bias: keys.bool("attention_bias", false)?,
            eos_token_ids: eos_token_ids(&keys, generation)?,
            mlp: schedule::mlp_kinds(&keys, num_hidden_layers)?,
            indexer: schedule::indexer_kinds(&keys, num_hidden_layers)?,
            index_share_for_mtp_iteration: keys.bool("index_share_for_mtp_iteration", false)?,
            prediction: None,
        })
    }

    /// Dimensions of a query or key head.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Values that the cache keeps of a token and layer: the compressed key-value and the rotated key.
    pub fn kv_width(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// Width of the shared expert's MLP; 0 when there is none.
    pub fn shared_intermediate_size(&self) -> usize {
        self.moe_intermediate_size * self.n_shared_experts
    }

    /// The layers that are used, those of the model and the one for multi-token prediction.
    pub fn layers(&self) -> usize {
        self.num_hidden_layers + usize::from(self.prediction.is_some())
    }

    /// The layers that are used and have routed experts, ascending.
    pub fn sparse_layers(&self) -> impl Iterator<Item = usize> + '_ {
        let sparse = |(i, kind): (usize, &MlpKind)| (*kind == MlpKind::Sparse).then_some(i);
        let prediction = self.prediction.map(|_| self.num_hidden_layers);
        self.mlp
            .iter()
            .enumerate()
            .filter_map(sparse)
            .chain(prediction)
    }

    /// The feed-forward block of a layer that is used.
    pub fn mlp_of(&self, layer: usize) -> MlpKind {
        self.mlp.get(layer).copied().unwrap_or(MlpKind::Sparse)
    }

    /// Whether a layer that is used chooses positions by an indexer of its own, where attention is sparse.
    pub fn is_indexed(&self, layer: usize) -> bool {
        match self.indexer.get(layer) {
            Some(kind) => *kind == IndexerKind::Full,
            None => self.prediction.is_some_and(|p| p.indexer),
        }
    }
}

/// Refuses what would change the arithmetic in a way that is not implemented.
fn refuse_unsupported(keys: &Keys) -> Result<(), ConfigError> {
    for (key, supported) in [("model_type", "glm_moe_dsa"), ("hidden_act", "silu")] {
        let required = (key == "model_type")
            .then(|| keys.required(key))
            .transpose()?;
        let Some(value) = required.or_else(|| keys.find(key)) else {
            continue;
        };
        match value.as_str() {
            None => return Err(keys.wrong_type(key, "a string")),
            Some(s) if s == supported => {}
            Some(_) => return Err(keys.unsupported(key, supported.into())),
        }
    }
    for key in ["n_group", "topk_group"] {
        if keys.int(key, 1, MAX_EXPERTS, Some(1))? != 1 {
            return Err(keys.unsupported(key, "1".into()));
        }
    }
    Ok(())
}

/// `rope_scaling` or `rope_parameters` (of type default only), then `rope_theta`, then 10000.
fn rope_theta(keys: &Keys) -> Result<f64, ConfigError> {
    const MAX_THETA: f64 = 1e15;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(value) = keys.find(key).filter(|v| !v.is_null()) else {
            continue;
        };
        if !value.is_object() {
            return Err(keys.wrong_type(key, "an object"));
        }
        let rope = keys.nested(key, value)?;
        for kind in ["rope_type", "type"] {
            match rope.find(kind) {
                None => continue,
                Some(Value::String(s)) if s == "default" => {}
                Some(Value::String(_)) => return Err(rope.unsupported(kind, "default".into())),
                Some(_) => return Err(rope.wrong_type(kind, "a string")),
            }
            break;
        }
        if rope.find("rope_theta").is_some() {
            return rope.float("rope_theta", 1.0, MAX_THETA, None);
        }
    }
    keys.float("rope_theta", 1.0, MAX_THETA, Some(10_000.0))
}

/// The union of both files' `eos_token_id`, each a number, a list or null.
fn eos_token_ids(
    config: &Keys,
    generation: Option<(&Path, &Value)>,
) -> Result<Vec<u32>, ConfigError> {
    const KEY: &str = "eos_token_id";
    let mut ids = Vec::new();
    let generation = generation.map(|(p, v)| Keys::new(p, v)).transpose()?;
    for keys in [Some(config), generation.as_ref()].into_iter().flatten() {
        let values = match keys.find(KEY) {
            None | Some(Value::Null) => continue,
            Some(Value::Array(list)) => list.as_slice(),
            Some(value) => std::slice::from_ref(value),
        };
        for value in values {
            // Ids beyond the vocabulary are harmless: they are never generated.
            ids.push(keys.check_int(KEY, value, 0, u64::from(u32::MAX))? as u32);
        }
    }
    let given = |keys: &Keys| keys.find(KEY).is_some();
    if !given(config) && !generation.as_ref().is_some_and(given) {
        ids.push(1); // the architecture's default
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
