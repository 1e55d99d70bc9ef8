//! Loads the resident tensors of a model.

use std::collections::HashMap;

use crate::arch::{Architecture, TensorId};
use crate::model::error::ModelError;
use crate::model::layer::{Layer, LoadOptions, Sparsity, load_layer, sparsity};
use crate::model::mtp::Mtp;
use crate::model::rope::Rope;
use crate::quant::Format;
use crate::shards::Shards;
use crate::weight::{Loader, Weight, WeightError};

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
    digest: Option<u32>,
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

impl Weights {
    /// Loads every resident tensor of the model that `arch` describes. Routed experts are not touched.
    ///
    /// # Errors
    /// The first tensor that is missing, has another shape than the architecture, has a type that no matrix product takes,
    /// cannot be read, has an infinite or NaN value, or more zeros than a model has.
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
        if options.digest {
            loader = loader.digesting();
        }
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
        let digest = loader.finish(options.direct, progress)?;
        Ok(Weights {
            embed,
            layers,
            norm,
            head,
            mtp,
            rope: Rope::new(&arch.rope),
            sparsity,
            resident_bytes,
            digest,
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

    /// One number for the content of all resident tensors, those of the prediction layer excepted. It depends on nothing else: not on
    /// files, copies, threads, or what matrices became at load. `None` without [`LoadOptions::digest`].
    pub fn digest(&self) -> Option<u32> {
        self.digest
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
        let indexer = |mtp: &Mtp| mtp.layer.attention.indexer().is_some();
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
