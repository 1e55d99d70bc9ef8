//! Names what can go wrong between a directory and a model that runs.

use crate::arch::ConfigError;
use crate::model::{ModelError, PredictionError};
use crate::runtime::plan::PlanError;
use crate::shards::{Findings, ShardError};
use crate::stream::StreamError;
use crate::stream::catalog::CatalogError;
use crate::weight::WeightError;

/// Why a model cannot be opened or loaded.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A value in `config.json` or `generation_config.json`.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The safetensors files, or a directory of them.
    #[error(transparent)]
    Shards(#[from] ShardError),
    /// A tensor or file that is missing, or that does not fit.
    #[error("{0}")]
    NotWhole(Findings),
    /// A malformed stamp of formats.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// There has to be a weight for the model and for each mirror.
    #[error(
        "{weights} mirror weights are given for {drives} drives: the model's and one for each mirror"
    )]
    MirrorWeights {
        /// Weights given.
        weights: usize,
        /// Drives given.
        drives: usize,
    },
    /// Experts that are not converted, and so not previewed either.
    #[error(
        "--expert-bits previews a conversion, and experts of type {model_type} are not converted: they run in 4 bits as published"
    )]
    RoundedPairs {
        /// The family.
        model_type: &'static str,
    },
    /// Drafts are insisted on.
    #[error("cannot draft: {0}")]
    Drafts(#[source] PredictionError),
    /// The routed experts are not complete.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// A context of no tokens.
    #[error("there is nothing to do: no token is given")]
    NoTokens,
    /// The model does not fit into memory.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A resident tensor, or the length of the context.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The files or the engine that experts are read with.
    #[error(transparent)]
    Stream(#[from] StreamError),
}
