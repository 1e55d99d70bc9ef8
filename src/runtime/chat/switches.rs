//! Finds the switches of a chat template: tokens that it looks for in messages, like `/nothink` at the end.

use std::collections::HashMap;

use crate::runtime::chat::ends::{Frame, is_tag_text};
use crate::runtime::template::lexer::{Kind, Token, tags};
use crate::runtime::tokenizer::Tokenizer;

/// Where a template looks for a switch in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Start,
    End,
    Anywhere,
}

/// A token that a message may spell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Switch {
    pub text: String,
    pub place: Place,
}

impl Switch {
    /// Whether this is the switch at byte `at` of a message.
    pub fn is_at(&self, content: &str, at: usize) -> bool {
        let here = content[at..].starts_with(&self.text);
        here && match self.place {
            Place::Start => content[..at].trim().is_empty(),
            Place::End => content[at + self.text.len()..].trim().is_empty(),
            Place::Anywhere => true,
        }
    }
}

/// The switches of a template. Tokens that it writes around messages, and tags like `<think>`, are none.
pub fn of(source: &str, tokenizer: &Tokenizer, frame: &Frame) -> Vec<Switch> {
    let added: HashMap<String, bool> = tokenizer.added_tokens().collect();
    let mut switches = Vec::new();
    for tag in tags(source) {
        for at in 0..tag.tokens.len() {
            let Some((text, place)) = looked_for(&tag.tokens, at) else {
                continue;
            };
            let is_tag = is_tag_text(text, |other| added.contains_key(other));
            if added.contains_key(text) && !frame.written.contains(text) && !is_tag {
                let text = text.to_owned();
                switches.push(Switch { text, place });
            }
        }
    }
    switches
}

/// The text at `at` that an expression looks for: in `x.endswith(text)`, `x.startswith(text)` or `text in x`.
fn looked_for<'s>(tokens: &[Token<'s>], at: usize) -> Option<(&'s str, Place)> {
    let text = tokens[at].unquoted()?;
    // Of several texts, each.
    let several = |token: &&Token| token.kind == Kind::Text || token.is(",") || token.is("(");
    let before = tokens[..at].iter().rev().find(|token| !several(token));
    let method = |name: &str| before.is_some_and(|token| token.is(name));
    let next = |offset: usize, name: &str| tokens.get(at + offset).is_some_and(|t| t.is(name));
    let place = if method("endswith") {
        Place::End
    } else if method("startswith") {
        Place::Start
    } else if next(1, "in") || next(1, "not") && next(2, "in") {
        Place::Anywhere
    } else {
        return None;
    };
    Some((text, place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_a_template_looks_for() {
        let source = "{% if m.content.endswith('/a') or text(m).startswith(('/b', \"/c\")) or '/d' in m.content %}\
                      {{ '/e' if '/f' not in x else y.split('/g') }}{% endif %}";
        let found: Vec<_> = (tags(source).iter())
            .flat_map(|tag| (0..tag.tokens.len()).map(|at| looked_for(&tag.tokens, at)))
            .flatten()
            .collect();
        let expected = [
            ("/a", Place::End),
            ("/b", Place::Start),
            ("/c", Place::Start),
            ("/d", Place::Anywhere),
            ("/f", Place::Anywhere),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_switch_counts_at_its_place() {
        let at = |place, content: &str| {
            let text = "/x".to_owned();
            let switch = Switch { text, place };
            content
                .match_indices("/x")
                .any(|(at, _)| switch.is_at(content, at))
        };
        assert!(at(Place::End, "a /x \n") && !at(Place::End, "/x a"));
        assert!(at(Place::Start, " /x a") && !at(Place::Start, "a /x"));
        assert!(at(Place::Anywhere, "a /x a") && !at(Place::Anywhere, "x"));
    }
}
