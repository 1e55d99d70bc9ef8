//! A conversation: from messages to the token ids that a model continues, and how many of them it has seen already.
//!
//! [`Conversation`] never touches a model. Whoever runs one asks for a [`Turn`], cuts the model's context to `turn.reused`
//! tokens, feeds it `turn.rest()`, and tells what was generated. What the context holds may also come from elsewhere, like a saved
//! one: [`Conversation::hold`].

use serde::{Deserialize, Serialize};

use crate::runtime::template::{ChatTemplate, Message, Role, TemplateError};
use crate::runtime::tokenizer::{Tokenizer, TokenizerError};

mod guard;
#[cfg(test)]
mod tests;

use guard::Guard;

/// Why a message cannot be answered. The conversation is as it was before the message.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template does not take the messages.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer does not take the text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// There is no room for an answer.
    #[error(
        "the context is full: with this message the conversation has {tokens} tokens, and {context} fit, the answer included"
    )]
    Full {
        /// Tokens of the conversation.
        tokens: usize,
        /// Tokens of the context.
        context: usize,
    },
}

/// How messages become text.
#[derive(Clone, Debug)]
pub enum Format {
    /// As the model's template says.
    Template(Box<ChatTemplate>),
    /// One text: messages and continuations, each message on a line of its own.
    Raw,
}

/// What the model is to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The ids of the whole conversation, at least one.
    pub ids: Vec<u32>,
    /// How many of the first ids the context holds already; fewer than there are.
    pub reused: usize,
}

impl Turn {
    /// What is to be fed: at least one id.
    pub fn rest(&self) -> &[u32] {
        &self.ids[self.reused..]
    }
}

/// A text and its ids, which need not be the ones that the tokenizer would give: a model may spell as it likes.
#[derive(Clone, Debug, Default)]
struct Spelled {
    text: String,
    ids: Vec<u32>,
}

/// A conversation as it is kept for another process, beside the ids of its text.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Record {
    /// Whether there was no template.
    raw: bool,
    messages: Vec<Message>,
    /// The text up to the end of the last answer, and how many ids it has.
    text: String,
    tokens: usize,
}

/// Messages, and what of them a model's context holds.
#[derive(Debug)]
pub struct Conversation<'a> {
    tokenizer: &'a Tokenizer,
    format: Format,
    guard: Guard,
    /// The system message, if there is one, stays when all others are forgotten.
    system: Option<String>,
    messages: Vec<Message>,
    /// The text up to the end of the last answer.
    spelled: Spelled,
    /// The ids that the context holds.
    held: Vec<u32>,
    /// The text of the turn that is being answered.
    asked: String,
}

impl<'a> Conversation<'a> {
    /// A conversation without messages but, possibly, that of the system. In raw format that one is the beginning of the text.
    pub fn new(
        tokenizer: &'a Tokenizer,
        format: Format,
        system: Option<String>,
    ) -> Conversation<'a> {
        let mut conversation = Conversation {
            tokenizer,
            guard: Guard::new(tokenizer),
            format,
            system,
            messages: Vec::new(),
            spelled: Spelled::default(),
            held: Vec::new(),
            asked: String::new(),
        };
        conversation.reset();
        conversation
    }

    /// Forgets all messages but the system's. What the context holds is not forgotten: the beginning can be used again.
    pub fn reset(&mut self) {
        let system = self.system.as_deref().filter(|text| !text.is_empty());
        self.messages = (system
            .map(|text| Message::new(Role::System, text))
            .into_iter())
        .collect();
        self.spelled = Spelled::default();
    }

    /// The messages so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The ids that the context holds, as far as this conversation knows.
    pub fn held(&self) -> &[u32] {
        &self.held
    }

    /// The context holds these ids.
    pub fn hold(&mut self, ids: Vec<u32>) {
        self.held = ids;
    }

    /// The ids of the text up to the end of the last answer.
    pub fn ids(&self) -> &[u32] {
        &self.spelled.ids
    }

    /// What has to be kept with [`Conversation::ids`], so that [`Conversation::resume`] can go on.
    pub fn record(&self) -> Record {
        Record {
            raw: matches!(self.format, Format::Raw),
            messages: self.messages.clone(),
            text: self.spelled.text.clone(),
            tokens: self.spelled.ids.len(),
        }
    }

    /// Goes on with a conversation whose text had these ids, and says whether that is possible: it is not for one of another
    /// format, of another system message than this one has, or with fewer ids than it had. This one is then as before.
    pub fn resume(&mut self, record: Record, ids: &[u32]) -> bool {
        let first = record.messages.first();
        let system = first.filter(|message| message.role == Role::System);
        let same_system = match self.system.as_deref() {
            None => true,
            Some(given) => system.map_or("", |message| message.content.as_str()) == given,
        };
        let known = ids
            .get(..record.tokens)
            .filter(|_| same_system && record.raw == matches!(self.format, Format::Raw));
        let Some(ids) = known else { return false };
        if self.system.is_none() {
            self.system = system.map(|message| message.content.clone());
        }
        self.spelled = Spelled {
            text: record.text,
            ids: ids.to_vec(),
        };
        self.messages = record.messages;
        true
    }

    /// Adds a message of the person, which is to be answered or withdrawn before the next one. `context` is the number of tokens
    /// that fit.
    ///
    /// # Errors
    /// [`ChatError`]; then the message is not added.
    pub fn ask(&mut self, text: &str, context: usize) -> Result<Turn, ChatError> {
        self.messages.push(Message::new(Role::User, text));
        let asked = self.turn(context);
        if asked.is_err() {
            self.messages.pop();
        }
        asked
    }

    fn turn(&mut self, context: usize) -> Result<Turn, ChatError> {
        let ids = match &self.format {
            Format::Template(template) => {
                self.guard.choose(template.source(), &self.messages);
                let guarded: Vec<Message> = self
                    .messages
                    .iter()
                    .map(|m| self.guard.message(m))
                    .collect();
                self.asked = template.render(&guarded)?;
                self.spell()?
            }
            Format::Raw => self.continued()?,
        };
        if ids.is_empty() {
            return Err(TokenizerError::EmptyPrompt.into());
        }
        if ids.len() >= context {
            let tokens = ids.len();
            return Err(ChatError::Full { tokens, context });
        }
        let same = self.held.iter().zip(&ids).take_while(|(a, b)| a == b);
        // The last id is fed in any case: it gives the logits of the next.
        let reused = same.count().min(ids.len() - 1);
        Ok(Turn { ids, reused })
    }

    /// The ids of the text that is asked. Where it goes on from the last answer, they go on from those of the last answer.
    fn spell(&self) -> Result<Vec<u32>, TokenizerError> {
        let known = Some(&self.spelled).filter(|known| self.asked.starts_with(&known.text));
        let (mut ids, new) = match known {
            Some(known) => (known.ids.clone(), &self.asked[known.text.len()..]),
            None => (Vec::new(), self.asked.as_str()),
        };
        for part in self.guard.parts(new) {
            ids.extend(self.tokenizer.encode_plain(part)?);
        }
        Ok(ids)
    }

    /// The ids of a raw text.
    fn continued(&self) -> Result<Vec<u32>, TokenizerError> {
        let new = |message: &&Message| message.role != Role::Assistant;
        let text = |message: &Message| message.content.clone();
        if self.spelled.ids.is_empty() {
            let texts: Vec<String> = self.messages.iter().filter(new).map(text).collect();
            return self.tokenizer.encode(&texts.join("\n"));
        }
        let last = self.messages.last().map(text).unwrap_or_default();
        let mut ids = self.spelled.ids.clone();
        ids.extend(self.tokenizer.encode_plain(&format!("\n{last}"))?);
        Ok(ids)
    }

    /// The model answered with `generated` (without a stop token), and its context holds the first `held` ids of the turn and of
    /// these together.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`].
    pub fn answer(
        &mut self,
        turn: Turn,
        generated: &[u32],
        held: usize,
    ) -> Result<(), TokenizerError> {
        let answer = Message::new(Role::Assistant, self.tokenizer.decode(generated)?);
        let mut ids = turn.ids;
        ids.extend_from_slice(generated);
        self.held.clear();
        self.held.extend_from_slice(&ids[..held.min(ids.len())]);
        self.spelled = Spelled {
            text: std::mem::take(&mut self.asked) + &self.guard.message(&answer).content,
            ids,
        };
        self.messages.push(answer);
        Ok(())
    }

    /// Nothing was generated: the last message is taken back. The context holds the first `held` ids of the turn.
    pub fn withdraw(&mut self, turn: Turn, held: usize) {
        self.messages.pop();
        self.held = turn.ids;
        self.held.truncate(held);
    }
}
