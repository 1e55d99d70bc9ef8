//! Loads the layer for multi-token prediction (MTP), which drafts the model's continuation.
//!
//! It stands at index `num_hidden_layers`, is a decoder layer with experts, and shares the embedding and the head with the
//! model. At position t it is given the token at t + 1 and the hidden state of t, and its output predicts the token at t + 2.
//! `draft` runs it.

use crate::config::{Config, MlpKind, Prediction};
use crate::model::indexer::Indexer;
use crate::model::load::{Layer, LoadOptions, Sparsity, attention_prefix, load_layer, sparsity};
use crate::shards::Shards;
use crate::stream::Catalog;
use crate::stream::catalog::CatalogError;
use crate::weight::{Loader, Weight, WeightError};

/// Tokens that the layer may lag behind the sequence before it computes them at once.
pub(super) const MAX_UNSEEN: usize = 256;

/// Tensors that this layer has in addition to those of a decoder layer.
const OWN: [&str; 4] = [
    "eh_proj.weight",
    "enorm.weight",
    "hnorm.weight",
    "shared_head.norm.weight",
];

/// Whether a tensor of the layer, named without its prefix, repeats the embedding or the head of the model, which are used
/// instead.
pub(super) fn is_copy(name: &str) -> bool {
    ["embed_tokens.", "shared_head.head."]
        .iter()
        .any(|copy| name.starts_with(copy))
}

/// The resident weights of the layer.
#[derive(Debug)]
pub(super) struct Mtp {
    /// `enorm`, of the embedding.
    pub token_norm: Vec<f32>,
    /// `hnorm`, of the hidden state.
    pub hidden_norm: Vec<f32>,
    /// `eh_proj` [hidden, 2 * hidden]: of the embedding, then the hidden state.
    pub projection: Weight,
    pub layer: Layer,
    /// `shared_head.norm`, before the head.
    pub head_norm: Vec<f32>,
}

impl Mtp {
    pub fn load(
        loader: &mut Loader,
        config: &Config,
        sparsity: Sparsity,
    ) -> Result<Mtp, WeightError> {
        let (layer, hidden) = (config.num_hidden_layers, config.hidden_size);
        let [projection, token_norm, hidden_norm, head_norm] = names(layer);
        Ok(Mtp {
            projection: loader.matrix(&projection, hidden, 2 * hidden)?,
            token_norm: loader.vector(&token_norm, hidden)?,
            hidden_norm: loader.vector(&hidden_norm, hidden)?,
            layer: load_layer(loader, config, layer, sparsity)?,
            head_norm: loader.vector(&head_norm, hidden)?,
        })
    }
}

fn names(layer: usize) -> [String; 4] {
    OWN.map(|name| format!("model.layers.{layer}.{name}"))
}

/// Why a model's own drafts are not to be had.
#[derive(Debug, thiserror::Error)]
pub enum PredictionError {
    /// It was made without.
    #[error("the model has no layer for multi-token prediction: tensor {tensor} is missing")]
    Absent {
        /// A tensor that the layer would have.
        tensor: String,
    },
    /// Something of the layer is missing or does not fit the config.
    #[error("the model's layer for multi-token prediction is not complete: {source}")]
    Incomplete {
        /// What.
        source: CatalogError,
    },
}

/// The `config` of the model with its layer for multi-token prediction. Reads vectors of that layer, but no matrix.
///
/// # Errors
/// [`PredictionError::Absent`] when no tensor is there that only such a layer has, and [`PredictionError::Incomplete`] with the first tensor of
/// the layer that is missing or does not fit.
pub fn prediction(shards: &Shards, config: &Config) -> Result<Config, PredictionError> {
    let layer = config.num_hidden_layers;
    let names = names(layer);
    let [tensor, ..] = &names;
    if names.iter().all(|name| shards.find(name).is_none()) {
        let tensor = tensor.clone();
        return Err(PredictionError::Absent { tensor });
    }
    let indexer = Indexer::names(&format!("{}.indexer", attention_prefix(layer)));
    let config = Config {
        prediction: Some(Prediction {
            indexer: config.index_topk > 0
                && indexer.iter().any(|name| shards.find(name).is_some()),
        }),
        ..config.clone()
    };
    complete(shards, &config).map_err(|source| PredictionError::Incomplete { source })?;
    Ok(config)
}

/// Finds all of the layer that `config` has.
fn complete(shards: &Shards, config: &Config) -> Result<(), CatalogError> {
    let mut loader = Loader::new(shards)?;
    let sparsity = sparsity(&loader, config, LoadOptions::default());
    Mtp::load(&mut loader, config, sparsity)?;
    // What is wrong with the experts of another layer is said when the model is opened.
    let alone = Config {
        mlp: vec![MlpKind::Dense; config.num_hidden_layers],
        ..config.clone()
    };
    Catalog::new(shards, &alone)?;
    Ok(())
}
