//! Generates text with a runner: ids to text, stop tokens, drafts, and the usage history of the model.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::model::draft::{Drafter, Mode};
use crate::model::{Runner, Sequence};
use crate::runtime::generate::{GenerateError, Generation, SequenceFeed, Source};
use crate::runtime::sample::{Sampler, Sampling};
use crate::runtime::tokenizer::{LazyTokenizer, TextStream, TokenizerError};
use crate::stream::usage::{History, Usage};

/// A [`Runner`] made by [`Model::runner`](crate::Model::runner), with what text needs. Everything that a `Runner` does, it does too.
#[derive(Debug)]
pub struct TextRunner {
    runner: Runner,
    tokenizer: Arc<LazyTokenizer>,
    drafts: Mode,
    history: Option<History>,
}

impl Deref for TextRunner {
    type Target = Runner;

    fn deref(&self) -> &Runner {
        &self.runner
    }
}

impl DerefMut for TextRunner {
    fn deref_mut(&mut self) -> &mut Runner {
        &mut self.runner
    }
}

impl TextRunner {
    pub(super) fn new(
        runner: Runner,
        tokenizer: Arc<LazyTokenizer>,
        drafts: Mode,
        history: Option<History>,
    ) -> TextRunner {
        TextRunner {
            runner,
            tokenizer,
            drafts,
            history,
        }
    }

    /// Appends `prompt` to `sequence` and generates up to `max` tokens after it, until a stop token of the model. Tokens are computed as the
    /// iterator is asked for them. The first error is the last item.
    pub fn generate<'a>(
        &'a mut self,
        sequence: &'a mut Sequence,
        prompt: &'a [u32],
        sampling: &Sampling,
        max: usize,
    ) -> TextGeneration<'a> {
        let mut sampler = Sampler::new(*sampling);
        sampler.observe(sequence.ids());
        sampler.observe(prompt);
        let stop = self.runner.weights().config().eos_token_ids.clone();
        let limit = (sequence.len() + prompt.len()).saturating_add(max);
        let drafter = Drafter::new(sequence, self.drafts, limit.saturating_sub(1));
        let (text, failed) = match self.tokenizer.get() {
            Ok(tokenizer) => (Some(tokenizer.stream()), None),
            Err(TokenizerError::Missing { .. }) => (None, None),
            Err(error) => (None, Some(error)),
        };
        let feed = SequenceFeed {
            runner: &mut self.runner,
            sequence,
            drafter,
        };
        let source = Source::Sample {
            sampler: Box::new(sampler),
            max,
            stop: stop.clone(),
        };
        TextGeneration {
            tokens: Some(Generation::new(feed, prompt, source)),
            text,
            failed,
            stop,
            left: max,
        }
    }

    /// How many tokens are drafted.
    pub fn drafts(&self) -> Mode {
        self.drafts
    }

    /// Runs in the usage history of the model.
    pub fn usage_runs(&self) -> u64 {
        let usage = self.history.as_ref().and_then(History::usage);
        usage.map_or(0, Usage::runs)
    }

    /// Adds the experts that were used to the usage history of the model, for the pins of later runs. Not to be called after an error: the
    /// drive may have failed.
    pub fn save_usage(&mut self) {
        if let Some(history) = &self.history {
            history.keep(self.runner.store_mut().usage());
        }
    }
}

/// A generated token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// The text that this token completes. Empty for special tokens, for a part of a character, and without a tokenizer. Joined, the
    /// texts are what [`Tokenizer::decode`](crate::Tokenizer::decode) gives for all ids.
    pub text: String,
}

/// Yields the tokens of a text, with their texts, as they are generated.
#[derive(Debug)]
pub struct TextGeneration<'a> {
    /// `None` when the text has ended.
    tokens: Option<Generation<'a, SequenceFeed<'a>>>,
    text: Option<TextStream<'a>>,
    failed: Option<TokenizerError>,
    stop: Vec<u32>,
    /// Tokens that may still come.
    left: usize,
}

impl TextGeneration<'_> {
    /// The text that `id` completes.
    fn text(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.left -= 1;
        let Some(stream) = &mut self.text else {
            return Ok(String::new());
        };
        let mut text = stream.push(id)?;
        if (self.left == 0 || self.stop.contains(&id))
            && let Some(stream) = self.text.take()
        {
            text += &stream.finish()?;
        }
        Ok(text)
    }

    /// Takes drafts out of the sequence.
    fn end(&mut self) {
        if let Some(tokens) = self.tokens.take() {
            tokens.finish().1.finish();
        }
    }
}

impl Iterator for TextGeneration<'_> {
    type Item = Result<Token, GenerateError>;

    fn next(&mut self) -> Option<Result<Token, GenerateError>> {
        let token = match self.failed.take() {
            Some(error) => Some(Err(error.into())),
            None => self.tokens.as_mut()?.next(),
        };
        let token = token.map(|id| {
            let id = id?;
            let text = self.text(id)?;
            Ok(Token { id, text })
        });
        if !matches!(token, Some(Ok(_))) {
            self.end();
        }
        token
    }
}

impl Drop for TextGeneration<'_> {
    fn drop(&mut self) {
        self.end();
    }
}
