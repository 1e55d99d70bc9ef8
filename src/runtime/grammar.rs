//! Compiles JSON schemas, regular expressions and Lark grammars into constraints on the tokens of a text.
//!
//! [`Grammars`] is made once for a model. It has the bytes of all tokens as a tree, and is shared by all texts. [`Grammars::compile`] gives a
//! [`Constraint`], which follows one text; a [`Sampler`](super::sample::Sampler) takes it.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use serde_json::{Value, json};

use super::tokenizer::Tokenizer;

mod constraint;
mod limits;
#[cfg(test)]
mod tests;

pub use constraint::{Constraint, ConstraintError};

/// What may stand between the tokens of JSON: a space, or a line break and an indent.
const BLANKS: &str = r"\x20|\r?\n[\x20\t]{0,32}";

/// What a text has to match, from its first token to its last.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// JSON that this schema accepts.
    JsonSchema(Value),
    /// A JSON object.
    JsonObject,
    /// A regular expression, in the syntax of the regex crate. It matches the whole text.
    Regex(String),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
}

/// Why there is no constraint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The bytes of the tokens are unknown.
    #[error("tokens of this model cannot be constrained by a grammar: {0}")]
    Tokenizer(String),
    /// Nothing could end the text.
    #[error("tokens of this model cannot be constrained by a grammar: it has no stop token")]
    NoStop,
    /// The grammar is invalid, not supported, too large, or matches nothing.
    #[error("cannot compile the {kind}: {message}")]
    Invalid {
        /// What was given: `JSON schema`, `regular expression` or `grammar`.
        kind: &'static str,
        /// What is wrong with it.
        message: String,
    },
}

/// Compiles grammars for the tokens of one model.
pub struct Grammars {
    factory: ParserFactory,
    stop: u32,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}

impl Grammars {
    /// For a model with `vocab` logits that ends a text with one of `stop`. Takes about 0.3 s and 20 MB for 150,000 tokens.
    ///
    /// # Errors
    /// [`GrammarError::Tokenizer`] and [`GrammarError::NoStop`].
    pub fn new(
        tokenizer: &Tokenizer,
        vocab: usize,
        stop: &[u32],
    ) -> Result<Grammars, GrammarError> {
        let stop: Vec<u32> = (stop.iter().copied())
            .filter(|id| (*id as usize) < vocab)
            .collect();
        let first = *stop.first().ok_or(GrammarError::NoStop)?;
        let mut words = tokenizer
            .token_bytes(vocab)
            .map_err(GrammarError::Tokenizer)?;
        for word in words.iter_mut().filter(|word| word.len() > limits::TOKEN) {
            word.clear();
        }
        let mut factory = llguidance::panic_utils::catch_unwind(AssertUnwindSafe(|| {
            let info = TokRxInfo::new(words.len() as u32, first);
            let env: TokEnv = Arc::new(Vocabulary {
                trie: TokTrie::from(&info, &words).with_eos_tokens(&stop),
                tokenizer: tokenizer.clone(),
            });
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            ParserFactory::new(
                &env,
                InferenceCapabilities {
                    ff_tokens: true,
                    ..Default::default()
                },
                &slices,
            )
        }))
        .map_err(|error| GrammarError::Tokenizer(limits::one_line(&error)))?;
        *factory.quiet().limits_mut() = limits::parser();
        Ok(Grammars {
            factory,
            stop: first,
        })
    }

    /// A constraint at the start of its text.
    ///
    /// # Errors
    /// [`GrammarError::Invalid`], which names the keyword or place. Every keyword that would change what is accepted and is not supported
    /// is an error.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let kind = match grammar {
            Grammar::JsonSchema(_) | Grammar::JsonObject => "JSON schema",
            Grammar::Regex(_) => "regular expression",
            Grammar::Lark(_) => "grammar",
        };
        let invalid = |message| GrammarError::Invalid { kind, message };
        limits::check(grammar).map_err(invalid)?;
        let grammar = match grammar {
            Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(spaced(schema)),
            Grammar::JsonObject => {
                TopLevelGrammar::from_json_schema(spaced(&json!({"type": "object"})))
            }
            Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Grammar::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        };
        let parser = limits::with_stack(|| self.factory.create_parser(grammar)).map_err(invalid)?;
        let mut matcher = Matcher::new(parser);
        // A schema that refers to itself alone has no first token.
        let first = matcher.compute_mask_or_eos();
        match first {
            Err(error) => Err(invalid(limits::one_line(&error))),
            Ok(_) => Ok(Constraint::new(matcher, self.stop)),
        }
    }
}

/// A schema as it is embedded in a grammar of [`Grammar::Lark`], after `%json`.
///
/// # Errors
/// [`GrammarError::Invalid`]: it is too large, or asks for what is not supported.
pub fn embedded_schema(schema: &Value) -> Result<Value, GrammarError> {
    let grammar = Grammar::JsonSchema(schema.clone());
    let kind = "JSON schema";
    limits::check(&grammar).map_err(|message| GrammarError::Invalid { kind, message })?;
    Ok(spaced(schema))
}

/// The schema, with blanks limited: a model could otherwise add them without end.
fn spaced(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        other => other.clone(),
    };
    if schema.is_object() {
        let options = JsonCompileOptions {
            whitespace_pattern: Some(BLANKS.to_owned()),
            ..JsonCompileOptions::default()
        };
        options.apply_to(&mut schema);
    }
    schema
}

/// The tokens of a model, and its tokenizer.
struct Vocabulary {
    trie: TokTrie,
    tokenizer: Tokenizer,
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, text: &[u8]) -> Vec<u32> {
        // The tokens that the model was trained on, if they spell the text.
        (self
            .tokenizer
            .spell(text, |id| self.trie.token(id).to_vec()))
        .unwrap_or_else(|| self.trie.greedy_tokenize(text))
    }
}
