//! What can go wrong between a directory of tensors and logits.

use crate::stream::StreamError;
use crate::weight::WeightError;

/// Why a model cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A resident tensor is missing or does not fit the config.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// An expert could not be read.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The store said that it was done before every demanded expert had been handed out.
    #[error("layer {layer}: some of its experts were never delivered")]
    ExpertsLost {
        /// The layer.
        layer: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary (0 to {})", vocab_size - 1)]
    Token {
        /// The id.
        id: u32,
        /// Size of the vocabulary, at least 1.
        vocab_size: usize,
    },
    /// More tokens than the model was made for.
    #[error(
        "a context of {tokens} tokens is longer than the model allows: its max_position_embeddings is {max}"
    )]
    ContextTooLong {
        /// Tokens of the context.
        tokens: usize,
        /// The longest context.
        max: usize,
    },
    /// A cache cannot become that of a session.
    #[error("the cached context does not fit the model: {what}")]
    Cache {
        /// What does not fit.
        what: &'static str,
    },
    /// There is nothing to compute.
    #[error("no token ids given: at least one is needed")]
    NoTokens,
    /// Asked to stop. The tokens of the interrupted call are forgotten, earlier ones are not.
    #[error("stopped")]
    Stopped,
}
