//! Keeps what people write from being taken for what the template writes.
//!
//! A message may spell `<|user|>`. In the text that a template makes, that would be the token that begins a message. So messages are
//! broken up, before they are rendered, by a character that nobody uses: `<` `|user|>`. The rendered text is cut there, and the pieces are
//! encoded one by one. Nothing else of a message changes, so that the template can look at it.

use std::collections::HashSet;

use crate::runtime::template::{Message, Role};
use crate::runtime::tokenizer::Tokenizer;

/// Characters that mean nothing to anybody: a plane for private use.
const BREAKS: std::ops::RangeInclusive<char> = '\u{f0000}'..='\u{ffffd}';

/// Breaks up the tokens that a text spells.
#[derive(Clone, Debug)]
pub struct Guard {
    /// Tokens that end a message, begin one, and the like.
    special: Vec<String>,
    /// Others that are found before anything else. A model writes some of them, like `</think>`.
    others: Vec<String>,
    /// Where texts are broken. Not in any of them.
    at: char,
}

impl Guard {
    /// For the tokens of a tokenizer.
    pub fn new(tokenizer: &Tokenizer) -> Guard {
        let mut guard = Guard {
            special: Vec::new(),
            others: Vec::new(),
            at: *BREAKS.start(),
        };
        for (token, special) in tokenizer.added_tokens() {
            match special {
                true => guard.special.push(token),
                // Runs of spaces, for the tokenizers that have them, are for everybody.
                false if token.trim().is_empty() => {}
                false => guard.others.push(token),
            }
        }
        guard
    }

    /// Chooses where to break: by a character that is in none of the texts. (Whoever uses up the whole plane loses one of its
    /// characters.)
    pub fn choose(&mut self, template: &str, messages: &[Message]) {
        let texts = messages.iter().map(|message| message.content.as_str());
        let chars = texts.chain([template]).flat_map(str::chars);
        let used: HashSet<char> = chars.filter(|c| BREAKS.contains(c)).collect();
        let free = BREAKS.into_iter().find(|c| !used.contains(c));
        self.at = free.unwrap_or(self.at);
    }

    /// A message in which no token is spelled that its author may not write.
    pub fn message(&self, message: &Message) -> Message {
        let others: &[String] = match message.role {
            Role::Assistant => &[],
            Role::User | Role::System => &self.others,
        };
        let content = &message.content;
        let tokens = || self.special.iter().chain(others);
        // Some tokenizers have hundreds, which nearly all begin with the same character.
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
            if begins(&content[i..]) {
                out.push(self.at);
            }
        }
        Message::new(message.role, out)
    }

    /// The pieces of a rendered text.
    pub fn parts<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> + use<'t> {
        text.split(self.at).filter(|part| !part.is_empty())
    }
}
