//! Loads the layer for multi-token prediction (MTP), which drafts the model's continuation.
//!
//! It stands at index `num_hidden_layers`, is a decoder layer with experts, and shares the embedding and the head with the
//! model. At position t it is given the token at t + 1 and the hidden state of t, and its output predicts the token at t + 2.
//! `draft` runs it.

use crate::arch::{Architecture, Part, TensorId};
use crate::model::layer::{Layer, LoadOptions, Sparsity, load_layer, sparsity};
use crate::shards::Shards;
use crate::stream::Catalog;
use crate::stream::catalog::CatalogError;
use crate::weight::{Loader, Weight, WeightError, with_prediction};

/// Tokens that the layer may lag behind the sequence before it computes them at once.
pub(super) const MAX_UNSEEN: usize = 256;

/// The resident weights of the layer.
#[derive(Debug)]
pub(super) struct Mtp {
    /// Norm of the embedding.
    pub token_norm: Vec<f32>,
    /// Norm of the hidden state.
    pub hidden_norm: Vec<f32>,
    /// [hidden, 2 * hidden]: takes the embedding, then the hidden state.
    pub projection: Weight,
    pub layer: Layer,
    /// Norm before the head.
    pub head_norm: Vec<f32>,
}

impl Mtp {
    pub fn load(loader: &mut Loader, sparsity: Sparsity) -> Result<Mtp, WeightError> {
        let layer = loader.arch().num_hidden_layers();
        let id = |part| TensorId::Layer(layer, part);
        Ok(Mtp {
            projection: loader.matrix(id(Part::DraftInput))?,
            token_norm: loader.vector(id(Part::DraftTokenNorm))?,
            hidden_norm: loader.vector(id(Part::DraftHiddenNorm))?,
            layer: load_layer(loader, layer, sparsity)?,
            head_norm: loader.vector(id(Part::DraftHeadNorm))?,
        })
    }
}

/// Why a model cannot draft.
#[derive(Debug, thiserror::Error)]
pub enum PredictionError {
    /// Models of its family have no layer for drafts.
    #[error("models of type {model_type} have no layer for multi-token prediction")]
    Family {
        /// The family.
        model_type: &'static str,
    },
    /// It has no layer for drafts.
    #[error("the model has no layer for multi-token prediction: tensor {tensor} is missing")]
    Absent {
        /// A tensor of that layer.
        tensor: String,
    },
    /// A tensor of the layer is missing or does not fit the config.
    #[error("the model's layer for multi-token prediction is not complete: {source}")]
    Incomplete {
        /// Which.
        source: CatalogError,
    },
}

/// The architecture with its layer for multi-token prediction. Reads vectors of that layer, but no matrix.
///
/// # Errors
/// [`PredictionError::Family`] when no model of the family has one, [`PredictionError::Absent`] when the checkpoint has none of [`Part::DRAFT`], and [`PredictionError::Incomplete`] with the
/// first tensor of the layer that is missing or does not fit.
pub fn prediction(shards: &Shards, arch: &Architecture) -> Result<Architecture, PredictionError> {
    if !arch.names.has(Part::DraftInput) {
        let model_type = arch.model_type;
        return Err(PredictionError::Family { model_type });
    }
    let arch = with_prediction(shards, arch).ok_or_else(|| PredictionError::Absent {
        tensor: arch.part_name(arch.num_hidden_layers(), Part::DraftInput),
    })?;
    complete(shards, &arch).map_err(|source| PredictionError::Incomplete { source })?;
    Ok(arch)
}

/// Finds every tensor of the layer. What is wrong with other layers is reported when the model is opened.
fn complete(shards: &Shards, arch: &Architecture) -> Result<(), CatalogError> {
    let mut loader = Loader::new(shards, arch)?;
    let sparsity = sparsity(&loader, LoadOptions::default());
    Mtp::load(&mut loader, sparsity)?;
    Catalog::of_layers(shards, arch, [arch.num_hidden_layers()])?;
    Ok(())
}
