//! Says why a model cannot be loaded or run.

use std::io;
use std::path::PathBuf;

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
    /// A hidden state is infinite or NaN, so no later number means anything.
    #[error(
        "layer {layer}: its {block} makes the hidden state {value} at position {position}: weights of this layer are damaged or \
         overflow; compare its files with their source, or fetch them again"
    )]
    HiddenState {
        /// The layer.
        layer: usize,
        /// `attention` or `MLP`.
        block: &'static str,
        /// Position of the token in its sequence, from 0.
        position: usize,
        /// The first such value.
        value: f32,
    },
    /// A logit is infinite or NaN though the hidden state of the last layer is finite.
    #[error(
        "the logit of token {token} is {value} at position {position}, though the output of the last layer, {layer}, is finite: \
         the final norm or the head is damaged or overflows; compare their files with their source, or fetch them again"
    )]
    Logit {
        /// The token.
        token: usize,
        /// Position in its sequence of the token that was computed, from 0.
        position: usize,
        /// The last layer.
        layer: usize,
        /// The logit.
        value: f32,
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
    /// Saved rows cannot become those of a sequence.
    #[error("the cached context does not fit the model: {what}")]
    Cache {
        /// What does not fit.
        what: &'static str,
    },
    /// There is nothing to compute.
    #[error("no token ids given: at least one is needed")]
    NoTokens,
    /// The sequences of a pass need more pages than are free. Nothing was changed: swap a sequence out, or drop one.
    #[error(
        "the KV cache is full: {needed} more pages of 64 tokens are needed, and {free} are free"
    )]
    OutOfPages {
        /// Pages that the pass needs.
        needed: usize,
        /// Pages that are free or can be evicted.
        free: usize,
    },
    /// A sequence was given to a runner that did not make it.
    #[error("the sequence belongs to another runner")]
    ForeignSequence,
    /// The pages of the sequence are in a file.
    #[error("the sequence is swapped out")]
    SwappedOut,
    /// A sequence could not be written to its swap file, or not be read back.
    #[error("cannot swap a sequence to a file in {}: {source}", dir.display())]
    Swap {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The stop flag was set. The tokens of the interrupted slice are forgotten, earlier ones are not.
    #[error("stopped")]
    Stopped,
}
