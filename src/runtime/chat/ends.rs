//! Finds the tokens that end an answer in a chat template: those with which it closes an answer or begins another message.
//!
//! A model's lists of stop tokens may lack them. The template shows them in a rendered dialogue. Tokens that a template or a model writes
//! within answers, like `</think>`, are not ends.

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use crate::runtime::template::{ChatTemplate, TemplateError};
use crate::runtime::tokenizer::Tokenizer;

const QUESTION: &str = "firstquestion";
const ANSWER: &str = "itsanswer";
const NEXT: &str = "secondmessage";

#[derive(Clone, Debug, Serialize)]
struct Probe {
    role: &'static str,
    content: &'static str,
}

/// An added token of the tokenizer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Added {
    id: u32,
    text: String,
    special: bool,
}

/// The tokens of a template around messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// Ids that end an answer, sorted.
    pub ends: Vec<u32>,
    /// All added tokens that the template writes.
    pub written: HashSet<String>,
}

impl Frame {
    /// The frame of a template; empty if the template refuses a short dialogue.
    ///
    /// # Errors
    /// The template exceeds its limits, so it would for any messages.
    pub fn of(template: &ChatTemplate, tokenizer: &Tokenizer) -> Result<Frame, TemplateError> {
        let added: HashMap<u32, Added> = (tokenizer.added_tokens())
            .filter_map(|(text, special)| {
                let id = tokenizer.id(&text)?;
                Some((id, Added { id, text, special }))
            })
            .collect();
        let tokens = |text: &str| -> HashSet<&Added> {
            let ids = tokenizer.encode_plain(text).unwrap_or_default();
            ids.iter().filter_map(|id| added.get(id)).collect()
        };
        let plain = template.without_variables();
        let text = |role| {
            let said = [("user", QUESTION), ("assistant", ANSWER), (role, NEXT)];
            let messages = said.map(|(role, content)| Probe { role, content });
            let refused = |error: &TemplateError| {
                matches!(
                    error,
                    TemplateError::Refused { .. } | TemplateError::Failed { .. }
                )
            };
            // A template may insist on a variable.
            match plain.render_any(messages.to_vec(), 0) {
                Err(error) if refused(&error) => match template.render_any(messages.to_vec(), 0) {
                    Err(error) if refused(&error) => Ok(None),
                    rendered => rendered.map(Some),
                },
                rendered => rendered.map(Some),
            }
        };
        let Some(dialogue) = text("user")? else {
            return Ok(Frame::default());
        };
        let parts = (
            between(&dialogue, QUESTION, ANSWER),
            between(&dialogue, ANSWER, NEXT),
            dialogue.rsplit_once(NEXT),
        );
        let (Some(opening), Some(closing), Some((_, prompt))) = parts else {
            return Ok(Frame::default());
        };
        let (opening, closing, prompt) = (tokens(opening), tokens(closing), tokens(prompt));
        // Where the template writes more before an answer than it leaves to the model, the model writes special tokens within answers.
        let whole = (opening.iter())
            .all(|token| !token.special || prompt.contains(token) || is_tag(token, tokenizer));
        let within = |token: &Added| opening.contains(token) || prompt.contains(token);
        let is_end = |token: &Added| match token.special {
            true => whole || !within(token),
            false => !within(token) && !token.text.trim().is_empty() && !is_tag(token, tokenizer),
        };
        let mut ends: Vec<u32> = (closing.iter())
            .filter(|token| is_end(token))
            .map(|token| token.id)
            .collect();
        if whole {
            let begin = opening.intersection(&prompt);
            let begin = begin.filter(|token| token.special && !is_tag(token, tokenizer));
            ends.extend(begin.map(|token| token.id));
        }
        let mut written = tokens(&dialogue);
        for role in ["system", "tool", "observation"] {
            let text = text(role).ok().flatten().unwrap_or_default();
            let before = tokens(between(&text, ANSWER, NEXT).unwrap_or_default());
            let special = before
                .iter()
                .filter(|t| t.special && is_end(t) && !is_tag(t, tokenizer));
            ends.extend(special.map(|token| token.id));
            written.extend(tokens(&text));
        }
        ends.sort_unstable();
        ends.dedup();
        let written = written.into_iter().map(|token| token.text.clone());
        Ok(Frame {
            ends,
            written: written.collect(),
        })
    }
}

/// The text after the first `from`, up to `to`.
fn between<'t>(text: &'t str, from: &str, to: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(from)?;
    Some(rest.split_once(to)?.0)
}

/// Whether a token is one of a pair like `<think>` and `</think>`, which mark parts of an answer.
fn is_tag(token: &Added, tokenizer: &Tokenizer) -> bool {
    is_tag_text(&token.text, |text| tokenizer.id(text).is_some())
}

/// Whether a text is one of a pair like `<think>` and `</think>`, both of which `exist`.
pub fn is_tag_text(text: &str, exist: impl Fn(&str) -> bool) -> bool {
    match (text.strip_prefix("</"), text.strip_prefix('<')) {
        (Some(name), _) => exist(&format!("<{name}")),
        (None, Some(name)) => exist(&format!("</{name}")),
        (None, None) => false,
    }
}
