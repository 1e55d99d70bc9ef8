//! Keeps messages from forging special tokens.
//!
//! A message may spell `<|user|>`, which in a rendered text would begin a message. Before rendering, a private-use character splits such
//! spellings: `<` `|user|>`. The rendered text is cut at that character, and the pieces are encoded separately. The rest of a message does not change,
//! so that the template can inspect it.

use std::collections::HashSet;

use serde_json::Value;

use super::switches::Switch;
use crate::runtime::template::{Message, Role};
use crate::runtime::tokenizer::Tokenizer;

/// A plane of private-use characters.
const BREAKS: std::ops::RangeInclusive<char> = '\u{f0000}'..='\u{ffffd}';

/// Splits the spellings of tokens.
#[derive(Clone, Debug)]
pub struct Guard {
    /// Tokens that end a message, begin one, and the like.
    special: Vec<String>,
    /// Tokens that a person may write, at their places.
    switches: Vec<Switch>,
    /// Other added tokens. A model writes some of them, like `</think>`.
    others: Vec<String>,
    /// The splitting character. In none of the texts.
    at: char,
}

impl Guard {
    /// A guard for the tokens of a tokenizer, with those that a person may write.
    pub fn new(tokenizer: &Tokenizer, switches: Vec<Switch>) -> Guard {
        let mut guard = Guard {
            switches,
            special: Vec::new(),
            others: Vec::new(),
            at: *BREAKS.start(),
        };
        for (token, special) in tokenizer.added_tokens() {
            match special {
                true => guard.special.push(token),
                // Users may write runs of spaces, which some tokenizers have as tokens.
                false if token.trim().is_empty() => {}
                false => guard.others.push(token),
            }
        }
        guard
    }

    /// Chooses a splitting character that is in none of the texts. Texts that use the whole plane lose one character of it.
    pub fn choose(&mut self, others: &[&str], messages: &[Message]) {
        let whole = |message: &Message| serde_json::to_string(message).unwrap_or_default();
        let texts: Vec<String> = messages.iter().map(whole).collect();
        let texts = texts.iter().map(String::as_str);
        let chars = texts.chain(others.iter().copied()).flat_map(str::chars);
        let used: HashSet<char> = chars.filter(|c| BREAKS.contains(c)).collect();
        let free = BREAKS.into_iter().find(|c| !used.contains(c));
        self.at = free.unwrap_or(self.at);
    }

    /// The message, with the tokens split that its author may not write.
    pub fn message(&self, message: &Message) -> Message {
        let role = message.role;
        let text = |text: &String| self.text(role, text);
        Message {
            role,
            content: text(&message.content),
            reasoning_content: message.reasoning_content.as_ref().map(text),
            tool_calls: (message.tool_calls.iter())
                .map(|call| self.json(role, call))
                .collect(),
            tool_call_id: message.tool_call_id.as_ref().map(text),
            name: message.name.as_ref().map(text),
        }
    }

    /// A text of `role`, with the tokens split that it may not write.
    fn text(&self, role: Role, content: &str) -> String {
        let (others, switches): (&[String], &[Switch]) = match role {
            Role::Assistant => (&[], &[]),
            Role::User | Role::System => (&self.others, &self.switches),
            Role::Tool => (&self.others, &[]),
        };
        let tokens = || self.special.iter().chain(others);
        // Some tokenizers have hundreds, nearly all with the same first character.
        let mut first = [false; 256];
        for byte in tokens().filter_map(|token| token.as_bytes().first()) {
            first[usize::from(*byte)] = true;
        }
        let begins = |rest: &str| {
            let likely = rest
                .as_bytes()
                .first()
                .is_some_and(|b| first[usize::from(*b)]);
            likely && tokens().any(|token| rest.starts_with(token.as_str()))
        };
        let mut out = String::with_capacity(content.len());
        for (i, c) in content.char_indices() {
            out.push(c);
            if begins(&content[i..]) && !switches.iter().any(|s| s.is_at(content, i)) {
                out.push(self.at);
            }
        }
        out
    }

    /// The same JSON, with split tokens in its texts, also in keys.
    fn json(&self, role: Role, value: &Value) -> Value {
        match value {
            Value::String(text) => self.text(role, text).into(),
            Value::Array(items) => items.iter().map(|item| self.json(role, item)).collect(),
            Value::Object(members) => (members.iter())
                .map(|(key, value)| (self.text(role, key), self.json(role, value)))
                .collect(),
            other => other.clone(),
        }
    }

    /// Descriptions of tools, with split tokens.
    pub fn tools(&self, tools: &Value) -> Value {
        self.json(Role::System, tools)
    }

    /// The pieces of a rendered text.
    pub fn parts<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> + use<'t> {
        text.split(self.at).filter(|part| !part.is_empty())
    }
}
