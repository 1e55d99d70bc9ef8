//! Loads the resident tensors of a model.

use std::collections::HashMap;

use crate::config::{Config, IndexerKind, MlpKind};
use crate::model::attention::Attention;
use crate::model::error::ModelError;
use crate::model::indexer::Indexer;
use crate::model::mlp::Mlp;
use crate::model::moe::Moe;
use crate::model::mtp::Mtp;
use crate::model::rope::Rope;
use crate::quant::encode::Packing;
use crate::quant::{Activations, Format};
use crate::shards::Shards;
use crate::weight::{Loader, Weight, WeightError};

/// Choices at load.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Whether sparse attention is used where the model has it.
    pub dsa: bool,
    /// What float and FP8 matrices become as they are read, embedding and head excepted, which become int8; `None` keeps them.
    pub dense: Option<Packing>,
    /// How products with packed matrices take activations, where that decides no choice.
    pub activations: Activations,
    /// Threads that quantise.
    pub threads: usize,
    /// Whether resident weights are read around the page cache, where the file system allows it.
    pub direct: bool,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            dsa: true,
            dense: None,
            activations: Activations::Exact,
            threads: 1,
            direct: true,
        }
    }
}

/// Whether attention is sparse, and if not, why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sparsity {
    /// Beyond this many positions, only as many are attended.
    Active(usize),
    /// The config has `index_topk` 0.
    Zero,
    /// Switched off.
    Off,
    /// The model has no indexer tensors.
    Absent,
}

/// A model's resident weights.
#[derive(Debug)]
pub struct Weights {
    pub(super) config: Config,
    pub(super) embed: Weight,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// `None` when the embedding serves as the head.
    head: Option<Weight>,
    /// The layer for multi-token prediction, where it is used.
    pub(super) mtp: Option<Mtp>,
    pub(super) rope: Rope,
    sparsity: Sparsity,
    resident_bytes: u64,
}

/// What a model keeps in memory.
struct Parts {
    embed: Weight,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Option<Weight>,
    mtp: Option<Mtp>,
}

impl Parts {
    fn find(
        loader: &mut Loader,
        config: &Config,
        sparsity: Sparsity,
    ) -> Result<Parts, WeightError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        Ok(Parts {
            embed: loader.matrix("model.embed_tokens.weight", vocab, hidden)?,
            layers: (0..config.num_hidden_layers)
                .map(|i| load_layer(loader, config, i, sparsity))
                .collect::<Result<_, WeightError>>()?,
            norm: loader.vector("model.norm.weight", hidden)?,
            head: (!config.tie_word_embeddings)
                .then(|| loader.matrix("lm_head.weight", vocab, hidden))
                .transpose()?,
            mtp: (config.prediction)
                .map(|_| Mtp::load(loader, config, sparsity))
                .transpose()?,
        })
    }
}

/// How the resident matrices of a model are stored, by name. Reads vectors, but no matrix.
///
/// # Errors
/// As [`Weights::load`], but for what reading a matrix finds out.
pub fn resident_formats(
    shards: &Shards,
    config: &Config,
) -> Result<HashMap<String, Format>, ModelError> {
    let mut loader = Loader::new(shards)?;
    let sparsity = sparsity(&loader, config, LoadOptions::default());
    Parts::find(&mut loader, config, sparsity)?;
    let formats = loader.formats();
    Ok(formats
        .map(|(name, format)| (name.to_owned(), format))
        .collect())
}

/// A decoder layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub input_norm: Vec<f32>,
    pub attention: Attention,
    pub post_norm: Vec<f32>,
    pub mlp: Block,
}

/// The feed-forward block of a layer.
#[derive(Debug)]
pub(super) enum Block {
    Dense(Mlp),
    Sparse(Moe),
}

impl Weights {
    /// Loads every resident tensor of the model that `config` describes. Routed experts are not touched.
    ///
    /// # Errors
    /// The first tensor that is missing, has another shape than the config implies, is of a type that
    /// no matrix product takes, cannot be read, or has an infinite or NaN value where that decides anything (norms,
    /// biases, routers, scales).
    pub fn load(
        shards: &Shards,
        config: Config,
        options: LoadOptions,
    ) -> Result<Weights, ModelError> {
        Weights::load_with(shards, config, options, &|_, _| {})
    }

    /// As [`Weights::load`]; `progress` hears of (bytes so far, bytes in all).
    ///
    /// # Errors
    /// As [`Weights::load`].
    pub fn load_with(
        shards: &Shards,
        config: Config,
        options: LoadOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Weights, ModelError> {
        let mut loader = Loader::new(shards)?.multiplying(options.activations);
        if let Some(dense) = options.dense {
            loader = loader.quantising(dense, options.threads);
        }
        let sparsity = sparsity(&loader, &config, options);
        let Parts {
            embed,
            layers,
            norm,
            head,
            mtp,
        } = Parts::find(&mut loader, &config, sparsity)?;
        let resident_bytes = loader.bytes();
        loader.finish(options.direct, progress)?;
        Ok(Weights {
            embed,
            layers,
            norm,
            head,
            mtp,
            rope: Rope::new(config.rope_theta, config.qk_rope_head_dim),
            sparsity,
            resident_bytes,
            config,
        })
    }

    /// The hyperparameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Bytes of the resident weights.
    pub fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    /// Whether attention is sparse.
    pub fn sparsity(&self) -> Sparsity {
        self.sparsity
    }

    /// Whether tokens can be drafted.
    pub fn can_draft(&self) -> bool {
        self.mtp.is_some()
    }

    /// Whether drafts after the first attend to what the first one has chosen.
    pub(super) fn shares_choice(&self) -> bool {
        let indexer = |mtp: &Mtp| mtp.layer.attention.indexer.is_some();
        self.config.index_share_for_mtp_iteration && self.mtp.as_ref().is_some_and(indexer)
    }

    /// A decoder layer; the one for multi-token prediction comes after the last.
    pub(super) fn layer(&self, layer: usize) -> &Layer {
        match &self.mtp {
            Some(mtp) if layer == self.layers.len() => &mtp.layer,
            _ => &self.layers[layer],
        }
    }

    pub(super) fn head(&self) -> &Weight {
        self.head.as_ref().unwrap_or(&self.embed)
    }
}

pub(super) fn attention_prefix(layer: usize) -> String {
    format!("model.layers.{layer}.self_attn")
}

/// Sparse attention needs the indexer of every full layer: if one tensor of any is there, all must be.
pub(super) fn sparsity(loader: &Loader, config: &Config, options: LoadOptions) -> Sparsity {
    let any_tensor = |layer| {
        let names = Indexer::names(&format!("{}.indexer", attention_prefix(layer)));
        names.iter().any(|name| loader.has(name))
    };
    let full = |layer: &usize| config.indexer[*layer] == IndexerKind::Full;
    let mut full_layers = (0..config.num_hidden_layers).filter(full);
    if config.index_topk == 0 {
        Sparsity::Zero
    } else if !options.dsa {
        Sparsity::Off
    } else if full_layers.any(any_tensor) {
        Sparsity::Active(config.index_topk)
    } else {
        Sparsity::Absent
    }
}

pub(super) fn load_layer(
    loader: &mut Loader,
    config: &Config,
    layer: usize,
    sparsity: Sparsity,
) -> Result<Layer, WeightError> {
    let prefix = format!("model.layers.{layer}");
    let hidden = config.hidden_size;
    let with_indexer = matches!(sparsity, Sparsity::Active(_)) && config.is_indexed(layer);
    let mlp = format!("{prefix}.mlp");
    Ok(Layer {
        input_norm: loader.vector(&format!("{prefix}.input_layernorm.weight"), hidden)?,
        attention: Attention::load(loader, &attention_prefix(layer), config, with_indexer)?,
        post_norm: loader.vector(&format!("{prefix}.post_attention_layernorm.weight"), hidden)?,
        mlp: match config.mlp_of(layer) {
            MlpKind::Dense => {
                Block::Dense(Mlp::load(loader, &mlp, config, config.intermediate_size)?)
            }
            MlpKind::Sparse => Block::Sparse(Moe::load(loader, &mlp, config, layer)?),
        },
    })
}
