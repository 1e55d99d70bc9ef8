//! Loads the resident tensors of a model.

use std::collections::HashMap;

use crate::arch::{Architecture, IndexerKind, MlpKind, Part, TensorId};
use crate::model::attention::Attention;
use crate::model::error::ModelError;
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
    /// The architecture has no indexers.
    Zero,
    /// Switched off.
    Off,
    /// The model has no indexer tensors.
    Absent,
}

/// A model's resident weights.
#[derive(Debug)]
pub struct Weights {
    pub(super) config: Architecture,
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

/// Weights that stay in memory.
struct Parts {
    embed: Weight,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Option<Weight>,
    mtp: Option<Mtp>,
}

impl Parts {
    fn find(loader: &mut Loader, sparsity: Sparsity) -> Result<Parts, WeightError> {
        let arch = loader.arch();
        Ok(Parts {
            embed: loader.matrix(TensorId::Embedding)?,
            layers: (0..arch.num_hidden_layers())
                .map(|i| load_layer(loader, i, sparsity))
                .collect::<Result<_, WeightError>>()?,
            norm: loader.vector(TensorId::Norm)?,
            head: (!arch.tie_word_embeddings)
                .then(|| loader.matrix(TensorId::Head))
                .transpose()?,
            mtp: (arch.prediction)
                .map(|_| Mtp::load(loader, sparsity))
                .transpose()?,
        })
    }
}

/// Formats of the resident matrices by name. Reads vectors, but no matrix.
///
/// # Errors
/// As [`Weights::load`], except those of reading a matrix.
pub fn resident_formats(
    shards: &Shards,
    arch: &Architecture,
) -> Result<HashMap<String, Format>, ModelError> {
    let mut loader = Loader::new(shards, arch)?;
    let sparsity = sparsity(&loader, LoadOptions::default());
    Parts::find(&mut loader, sparsity)?;
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
    /// Loads every resident tensor of the model that `arch` describes. Routed experts are not touched.
    ///
    /// # Errors
    /// The first tensor that is missing, has another shape than the architecture, has a type that no matrix product takes,
    /// cannot be read, or has an infinite or NaN value in a norm, bias, router or scale.
    pub fn load(
        shards: &Shards,
        arch: Architecture,
        options: LoadOptions,
    ) -> Result<Weights, ModelError> {
        Weights::load_with(shards, arch, options, &|_, _| {})
    }

    /// As [`Weights::load`]; `progress` hears of (bytes so far, bytes in all).
    ///
    /// # Errors
    /// As [`Weights::load`].
    pub fn load_with(
        shards: &Shards,
        arch: Architecture,
        options: LoadOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Weights, ModelError> {
        let mut loader = Loader::new(shards, &arch)?.multiplying(options.activations);
        if let Some(dense) = options.dense {
            loader = loader.quantising(dense, options.threads);
        }
        let sparsity = sparsity(&loader, options);
        let Parts {
            embed,
            layers,
            norm,
            head,
            mtp,
        } = Parts::find(&mut loader, sparsity)?;
        let resident_bytes = loader.bytes();
        loader.finish(options.direct, progress)?;
        Ok(Weights {
            embed,
            layers,
            norm,
            head,
            mtp,
            rope: Rope::new(arch.rope.theta, arch.rope.dims),
            sparsity,
            resident_bytes,
            config: arch,
        })
    }

    /// The architecture.
    pub fn config(&self) -> &Architecture {
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
        let shared = (self.config.indexer.as_ref()).is_some_and(|indexer| indexer.shared_by_drafts);
        shared && self.mtp.as_ref().is_some_and(indexer)
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

/// Sparse attention needs the indexer of every full layer: if one tensor of any is there, all must be.
pub(super) fn sparsity(loader: &Loader, options: LoadOptions) -> Sparsity {
    let Some(indexer) = &loader.arch().indexer else {
        return Sparsity::Zero;
    };
    if !options.dsa {
        return Sparsity::Off;
    }
    let any_tensor = |layer| has_indexer(layer, |id| loader.has(id));
    let layers = indexer.layers.iter().enumerate();
    let mut full_layers = layers.filter(|(_, kind)| **kind == IndexerKind::Full);
    if full_layers.any(|(layer, _)| any_tensor(layer)) {
        Sparsity::Active(indexer.top_k)
    } else {
        Sparsity::Absent
    }
}

/// Whether any tensor of a layer's indexer exists.
pub(super) fn has_indexer(layer: usize, exists: impl Fn(TensorId) -> bool) -> bool {
    let mut ids = (Part::INDEXER.into_iter()).map(|part| TensorId::Layer(layer, part));
    ids.any(exists)
}

pub(super) fn load_layer(
    loader: &mut Loader,
    layer: usize,
    sparsity: Sparsity,
) -> Result<Layer, WeightError> {
    let arch = loader.arch();
    let with_indexer = matches!(sparsity, Sparsity::Active(_)) && arch.is_indexed(layer);
    Ok(Layer {
        input_norm: loader.vector(TensorId::Layer(layer, Part::AttentionNorm))?,
        attention: Attention::load(loader, layer, with_indexer)?,
        post_norm: loader.vector(TensorId::Layer(layer, Part::MlpNorm))?,
        mlp: match arch.mlp_of(layer) {
            MlpKind::Dense => Block::Dense(Mlp::load(loader, layer, Part::DENSE)?),
            MlpKind::Sparse => Block::Sparse(Moe::load(loader, layer)?),
        },
    })
}
