//! Describes a request to the engine, and what it answers.

use std::time::Duration;

use crate::model::ModelError;
use crate::runtime::grammar::Constraint;
use crate::runtime::sample::{Adjustments, SampleError, Sampling};

/// A text to be continued.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt, at least one id.
    pub ids: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Biases and penalties.
    pub adjustments: Adjustments,
    /// What the new text has to match, at its start.
    pub constraint: Option<Constraint>,
    /// New tokens at most.
    pub max_tokens: usize,
    /// Ids that end the text.
    pub stop: Vec<u32>,
    /// How many of the most likely tokens are named with each token; `None` for no probabilities at all.
    pub logprobs: Option<usize>,
    /// Whether the probabilities of the prompt's tokens are wanted, too. Then the whole prompt is computed.
    pub prompt_logprobs: bool,
}

impl Default for Request {
    fn default() -> Request {
        Request {
            ids: Vec::new(),
            sampling: Sampling::greedy(),
            adjustments: Adjustments::default(),
            constraint: None,
            max_tokens: usize::MAX,
            stop: Vec::new(),
            logprobs: None,
            prompt_logprobs: false,
        }
    }
}

/// A token and its probabilities by the model's logits, before penalties and filters.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability. `None` where no probabilities were asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens in this place and the logarithms of their probabilities, the most likely first.
    pub top: Vec<(u32, f32)>,
}

/// What happens to a request, in order. [`Event::End`] or [`Event::Failed`] is the last one.
#[derive(Debug)]
pub enum Event {
    /// So much of the prompt is known.
    Prompt {
        /// Tokens computed or found.
        done: usize,
        /// Tokens of the prompt.
        all: usize,
    },
    /// Probabilities of tokens of the prompt, from the second on.
    PromptLogprobs(Vec<Drawn>),
    /// The next token.
    Token(Drawn),
    /// The text is complete.
    End(Finish, Summary),
    /// The text cannot be continued.
    Failed(ServeError),
}

/// Why a text is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// As many tokens as were asked for.
    Length,
    /// The last token is one of the stop tokens.
    Stop,
}

/// What a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens whose rows were in memory.
    pub cached_tokens: usize,
    /// New tokens.
    pub tokens: usize,
    /// From the submission until the request was taken up.
    pub queue: Duration,
    /// From then until the first token.
    pub prefill: Duration,
    /// From then until the last one.
    pub decode: Duration,
    /// What its passes waited for reads.
    pub io_wait: Duration,
}

/// Why a request is not queued.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// As many requests wait as may.
    #[error("{waiting} requests are waiting already; try again later")]
    Full {
        /// They.
        waiting: usize,
    },
    /// It needs a longer context than there is.
    #[error(
        "the prompt has {prompt} tokens and max_tokens is {max_tokens}: together more than the context of {context} tokens"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// New tokens that were asked for.
        max_tokens: usize,
        /// Tokens of a context.
        context: usize,
    },
    /// It has no ids, or one outside the vocabulary.
    #[error(transparent)]
    Ids(#[from] ModelError),
    /// The server is about to end.
    #[error("the server is shutting down")]
    Draining,
}

/// Why a text cannot be continued.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The model cannot compute it.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// No token can be drawn.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The server has ended.
    #[error("the server is shutting down")]
    Stopped,
}
