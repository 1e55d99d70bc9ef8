//! Loads one decoder layer, and decides whether its attention is sparse.

use crate::arch::{MlpKind, Part, TensorId};
use crate::model::attention::Attention;
use crate::model::mlp::Mlp;
use crate::model::moe::Moe;
use crate::quant::Activations;
use crate::quant::encode::Packing;
use crate::weight::{Loader, WeightError, has_indexers};

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
    /// Whether resident weights are summed up for [`Weights::digest`](crate::model::Weights::digest). Costs a tenth of a second for each GB.
    pub digest: bool,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            dsa: true,
            dense: None,
            activations: Activations::Exact,
            threads: 1,
            direct: true,
            digest: true,
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
    Dense(Box<Mlp>),
    Sparse(Box<Moe>),
}

/// Sparse attention needs the indexer of every full layer: if one tensor of any is there, all must be.
pub(super) fn sparsity(loader: &Loader, options: LoadOptions) -> Sparsity {
    let Some(indexer) = &loader.arch().indexer else {
        return Sparsity::Zero;
    };
    if !options.dsa {
        return Sparsity::Off;
    }
    match has_indexers(loader.arch(), |id| loader.has(id)) {
        true => Sparsity::Active(indexer.top_k),
        false => Sparsity::Absent,
    }
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
            MlpKind::Dense => Block::Dense(Box::new(Mlp::load(loader, layer, Part::DENSE)?)),
            MlpKind::Sparse => Block::Sparse(Box::new(Moe::load(loader, layer)?)),
        },
    })
}
