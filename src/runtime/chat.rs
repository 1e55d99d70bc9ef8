//! Turns the messages of a conversation into token ids, and counts how many of them a sequence already holds.
//!
//! [`Conversation`] never touches a model. The caller asks for a [`Turn`], truncates the sequence to `turn.reused` tokens, feeds it
//! `turn.rest()`, and passes back the generated tokens. A sequence restored from a file is announced by [`Conversation::hold`].

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::runtime::template::{ChatTemplate, Message, Role, TemplateError};
use crate::runtime::tokenizer::{Tokenizer, TokenizerError};

mod ends;
mod guard;
mod switches;
#[cfg(test)]
mod tests;

use ends::Frame;
use guard::Guard;

/// Why a message cannot be answered. The message is not added.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template refuses the messages.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer fails on the text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The context has no room for an answer.
    #[error(
        "the context is full: with this message the conversation has {tokens} tokens, and {context} fit, the answer included"
    )]
    Full {
        /// Tokens of the conversation.
        tokens: usize,
        /// Tokens of a new conversation with this message.
        alone: usize,
        /// Tokens of the context.
        context: usize,
    },
}

/// How messages become text.
#[derive(Clone, Debug)]
pub enum Format {
    /// By the model's chat template.
    Template(Box<ChatTemplate>),
    /// As one text, each message on its own line.
    Raw,
}

/// A conversation up to the message that is to be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The ids of the whole conversation, at least one.
    pub ids: Vec<u32>,
    /// How many of the first ids the sequence already holds; fewer than all.
    pub reused: usize,
}

impl Turn {
    /// The ids to feed: at least one.
    pub fn rest(&self) -> &[u32] {
        &self.ids[self.reused..]
    }
}

/// Messages whose last one is to be answered, and what the template is told with them.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// The conversation.
    pub messages: Vec<Message>,
    /// Descriptions of tools, as the OpenAI API has them.
    pub tools: Option<Value>,
    /// Variables of the template.
    pub variables: Vec<(String, Value)>,
}

/// A text and its ids. A model may spell a text with other ids than the tokenizer.
#[derive(Clone, Debug, Default)]
struct Spelled {
    text: String,
    ids: Vec<u32>,
}

/// A conversation as it is saved, next to the ids of its text.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Record {
    /// Whether the format is [`Format::Raw`].
    raw: bool,
    messages: Vec<Message>,
    /// The text up to the end of the last answer, and how many ids it has.
    text: String,
    tokens: usize,
}

/// Messages, and the ids that a sequence holds of them.
#[derive(Debug)]
pub struct Conversation<'a> {
    tokenizer: &'a Tokenizer,
    format: Format,
    guard: Guard,
    frame: Frame,
    /// Why the template cannot be used. The first message is answered by it.
    stopped: Option<TemplateError>,
    /// Survives [`Conversation::reset`].
    system: Option<String>,
    messages: Vec<Message>,
    /// The text up to the end of the last answer.
    spelled: Spelled,
    /// The ids that the sequence holds.
    held: Vec<u32>,
    /// The text of the turn being answered.
    asked: String,
}

impl<'a> Conversation<'a> {
    /// A conversation that begins with a system message, if one is given. In raw format it is the beginning of the text.
    pub fn new(
        tokenizer: &'a Tokenizer,
        format: Format,
        system: Option<String>,
    ) -> Conversation<'a> {
        let (mut frame, mut stopped, mut switches) = (Frame::default(), None, Vec::new());
        if let Format::Template(template) = &format {
            match Frame::of(template, tokenizer) {
                Ok(found) => frame = found,
                Err(error) => stopped = Some(error),
            }
            switches = switches::of(template.source(), tokenizer, &frame);
        }
        let mut conversation = Conversation {
            tokenizer,
            guard: Guard::new(tokenizer, switches),
            frame,
            stopped,
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

    /// Forgets all messages but the system's. The ids that the sequence holds stay known, so that an equal beginning is reused.
    pub fn reset(&mut self) {
        let system = self.system.as_deref().filter(|text| !text.is_empty());
        self.messages = (system
            .map(|text| Message::new(Role::System, text))
            .into_iter())
        .collect();
        self.spelled = Spelled::default();
    }

    /// Ids with which the template ends an answer or begins another message. An answer that contains one is over.
    pub fn end_tokens(&self) -> &[u32] {
        &self.frame.ends
    }

    /// The messages so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The ids that the sequence holds.
    pub fn held(&self) -> &[u32] {
        &self.held
    }

    /// Announces that the sequence holds these ids.
    pub fn hold(&mut self, ids: Vec<u32>) {
        self.held = ids;
    }

    /// The ids of the text up to the end of the last answer.
    pub fn ids(&self) -> &[u32] {
        &self.spelled.ids
    }

    /// What has to be saved with [`Conversation::ids`] for [`Conversation::resume`].
    pub fn record(&self) -> Record {
        Record {
            raw: matches!(self.format, Format::Raw),
            messages: self.messages.clone(),
            text: self.spelled.text.clone(),
            tokens: self.spelled.ids.len(),
        }
    }

    /// Continues a saved conversation whose text had these ids. Returns false, and changes nothing, when its format or system message
    /// differs, or ids are missing.
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

    /// Adds a message of the user, to be answered or withdrawn before the next one. The context has room for `context` tokens.
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
        let ids = self.encode()?;
        if ids.is_empty() {
            return Err(TokenizerError::EmptyPrompt.into());
        }
        if ids.len() >= context {
            return Err(ChatError::Full {
                tokens: ids.len(),
                alone: self.alone()?,
                context,
            });
        }
        let same = self.held.iter().zip(&ids).take_while(|(a, b)| a == b);
        // The last id is always fed: the logits after it choose the next.
        let reused = same.count().min(ids.len() - 1);
        Ok(Turn { ids, reused })
    }

    /// Text and ids of other messages. `known` is asked for the longest beginning of the text whose ids
    /// are known, because a model chose them: its length in bytes, and the ids. In raw format the text is empty.
    ///
    /// # Errors
    /// [`ChatError::Template`] and [`ChatError::Tokenizer`].
    pub fn prompt(
        &mut self,
        asked: Asked,
        known: impl FnOnce(&str) -> Option<(usize, Vec<u32>)>,
    ) -> Result<(String, Vec<u32>), ChatError> {
        self.messages = asked.messages;
        self.spelled = Spelled::default();
        self.asked.clear();
        let Format::Template(template) = &self.format else {
            return Ok((String::new(), self.continued()?));
        };
        let template = template.with(asked.variables)?;
        self.render_by(&template, asked.tools)?;
        if let Some((len, ids)) = known(&self.asked) {
            let text = self.asked[..len].to_owned();
            self.spelled = Spelled { text, ids };
        }
        Ok((self.asked.clone(), self.spell()?))
    }

    /// The ids of the conversation.
    fn encode(&mut self) -> Result<Vec<u32>, ChatError> {
        Ok(match self.render()? {
            true => self.spell()?,
            false => self.continued()?,
        })
    }

    /// Renders the messages into `asked`; false in raw format.
    fn render(&mut self) -> Result<bool, ChatError> {
        let Format::Template(template) = &self.format else {
            return Ok(false);
        };
        let template = template.clone();
        self.render_by(&template, None)?;
        Ok(true)
    }

    fn render_by(
        &mut self,
        template: &ChatTemplate,
        tools: Option<Value>,
    ) -> Result<(), ChatError> {
        if let Some(error) = self.stopped.take() {
            return Err(error.into());
        }
        let described = tools.as_ref().map(Value::to_string).unwrap_or_default();
        let others = [template.source(), described.as_str()];
        self.guard.choose(&others, &self.messages);
        let guarded: Vec<Message> = self
            .messages
            .iter()
            .map(|m| self.guard.message(m))
            .collect();
        let tools = tools.map(|tools| ("tools".to_owned(), self.guard.tools(&tools)));
        let template = template.with(tools)?;
        self.asked = template.render(&guarded)?;
        template.check_includes(&guarded, &self.asked)?;
        Ok(())
    }

    /// Tokens of a new conversation with the last message.
    fn alone(&self) -> Result<usize, ChatError> {
        let mut new = Conversation::new(self.tokenizer, self.format.clone(), self.system.clone());
        new.messages.extend(self.messages.last().cloned());
        Ok(new.encode()?.len())
    }

    /// The ids of `asked`. The part up to the last answer keeps the ids that the model chose.
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

    /// Adds the answer `generated` (without a stop token). The sequence holds the first `held` ids of the turn and the answer together.
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

    /// Takes the last message back, because nothing was generated. The sequence holds the first `held` ids of the turn.
    pub fn withdraw(&mut self, turn: Turn, held: usize) {
        self.messages.pop();
        self.held = turn.ids;
        self.held.truncate(held);
    }
}
