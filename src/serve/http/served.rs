//! Holds the model that is served, and turns prompts and messages into ids.

use std::collections::VecDeque;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::error::ApiError;
use super::text::Texts;
use crate::runtime::chat::{Asked, Conversation, Format};
use crate::runtime::dialect::Dialect;
use crate::runtime::grammar::{GrammarError, Grammars};
use crate::runtime::sample::Sampling;
use crate::runtime::template::{ChatTemplate, Message};
use crate::runtime::tokenizer::Tokenizer;
use crate::serve::Engine;

/// Answers that are remembered at most, and bytes of their texts and ids.
const ANSWERS: usize = 256;
const ANSWER_BYTES: usize = 32 << 20;

/// A model that is served.
#[derive(Debug)]
pub struct Served {
    pub(super) engine: Engine,
    pub(super) name: String,
    /// Seconds since 1970 at which it was ready.
    pub(super) created: u64,
    pub(super) tokenizer: Option<&'static Tokenizer>,
    pub(super) sampling: Sampling,
    /// Ids that end a text.
    pub(super) stop: Vec<u32>,
    pub(super) vocabulary: usize,
    pub(super) texts: Texts,
    chat: Option<Chat>,
    /// Held while a grammar is compiled.
    pub(super) compiling: Mutex<()>,
    /// Made for the first request that needs it.
    grammars: OnceLock<Result<Grammars, GrammarError>>,
}

#[derive(Debug)]
struct Chat {
    template: ChatTemplate,
    dialect: Dialect,
    /// Ids that end an answer.
    stop: Vec<u32>,
    /// Conversations that render nothing now.
    idle: Mutex<Vec<Conversation<'static>>>,
    answers: Mutex<Recent<Answered>>,
    calls: Mutex<Recent<Called>>,
}

/// The last answers, as many as are remembered.
#[derive(Debug)]
struct Recent<T> {
    /// With the bytes of each.
    items: VecDeque<(T, usize)>,
    bytes: usize,
}

impl<T> Default for Recent<T> {
    fn default() -> Recent<T> {
        Recent {
            items: VecDeque::new(),
            bytes: 0,
        }
    }
}

impl<T> Recent<T> {
    fn push(&mut self, item: T, bytes: usize) {
        self.items.push_back((item, bytes));
        self.bytes += bytes;
        while self.items.len() > ANSWERS || self.bytes > ANSWER_BYTES {
            let Some((_, bytes)) = self.items.pop_front() else {
                return;
            };
            self.bytes -= bytes;
        }
    }

    /// The newest one first.
    fn iter(&self) -> impl Iterator<Item = &T> {
        self.items.iter().rev().map(|(item, _)| item)
    }
}

/// A rendered text up to the end of an answer, and the ids of which the model chose the last ones.
#[derive(Debug)]
struct Answered {
    text: String,
    ids: Vec<u32>,
}

/// An answer with tool calls, as clients send it back and as the model wrote it.
#[derive(Debug)]
struct Called {
    calls: Vec<Value>,
    /// The answer after its reasoning.
    text: String,
}

/// What `served` needs of a model.
#[derive(Debug)]
pub struct Parts {
    /// What computes.
    pub engine: Engine,
    /// Its name for clients.
    pub name: String,
    /// Lives as long as the process.
    pub tokenizer: Option<&'static Tokenizer>,
    /// How its messages become text.
    pub template: Option<ChatTemplate>,
    /// For requests that do not say how tokens are drawn.
    pub sampling: Sampling,
    /// The model's stop tokens.
    pub stop: Vec<u32>,
    /// Number of token ids.
    pub vocabulary: usize,
}

impl Served {
    /// A model that is ready.
    pub fn new(parts: Parts) -> Served {
        let chat = match (parts.tokenizer, parts.template) {
            (Some(tokenizer), Some(template)) => Some(Chat::new(tokenizer, template, &parts.stop)),
            _ => None,
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let texts = Texts::new(parts.tokenizer, parts.engine.options().context);
        Served {
            texts,
            engine: parts.engine,
            name: parts.name,
            created: now.map_or(0, |now| now.as_secs()),
            tokenizer: parts.tokenizer,
            sampling: parts.sampling,
            stop: parts.stop,
            vocabulary: parts.vocabulary,
            chat,
            compiling: Mutex::default(),
            grammars: OnceLock::new(),
        }
    }

    /// The tokenizer, for a request whose field `field` has text.
    pub(super) fn tokenizer(&self, field: &str) -> Result<&'static Tokenizer, ApiError> {
        let problem = "the model has no tokenizer.json: give token ids";
        self.tokenizer
            .ok_or_else(|| ApiError::field(field, problem))
    }

    fn chat(&self) -> Result<&Chat, ApiError> {
        let problem = "the model has no chat template: use /v1/completions";
        (self.chat.as_ref()).ok_or_else(|| ApiError::field("messages", problem))
    }

    /// Checks that messages can be answered.
    pub(super) fn check_chat(&self) -> Result<(), ApiError> {
        self.chat().map(drop)
    }

    /// Text and ids of messages.
    pub(super) fn prompt(&self, asked: Asked) -> Result<(String, Vec<u32>), ApiError> {
        let chat = self.chat()?;
        let idle = lock(&chat.idle).pop();
        let mut conversation = match (idle, self.tokenizer) {
            (Some(conversation), _) => conversation,
            (None, Some(tokenizer)) => chat.conversation(tokenizer),
            (None, None) => return Err(ApiError::internal("the tokenizer is missing")),
        };
        let prompt = conversation.prompt(asked, |text| chat.known(text));
        lock(&chat.idle).push(conversation);
        Ok(prompt?)
    }

    /// Remembers the ids of an answer to a prompt, for the conversation's next message.
    pub(super) fn remember(&self, prompt: &str, prompt_ids: &[u32], answer: &str, ids: &[u32]) {
        let Some(chat) = &self.chat else { return };
        let ends = ids.last().is_some_and(|last| chat.stop.contains(last));
        let ids = &ids[..ids.len() - usize::from(ends)];
        let answered = Answered {
            text: prompt.to_owned() + answer,
            ids: [prompt_ids, ids].concat(),
        };
        let bytes = answered.text.len() + size_of_val(&answered.ids[..]);
        lock(&chat.answers).push(answered, bytes);
    }

    /// Remembers how the model wrote an answer with these calls, which are as templates read them.
    pub(super) fn remember_calls(&self, calls: Vec<Value>, text: &str) {
        let Some(chat) = &self.chat else { return };
        let text = text.to_owned();
        // The calls say what the text says.
        let bytes = 3 * text.len();
        lock(&chat.calls).push(Called { calls, text }, bytes);
    }

    /// Puts answers with tool calls back as the model wrote them, so that their rows are found. A template might write them otherwise.
    pub(super) fn replay(&self, mut messages: Vec<Message>) -> Vec<Message> {
        let Some(chat) = &self.chat else {
            return messages;
        };
        let called = lock(&chat.calls);
        for message in messages.iter_mut().filter(|m| !m.tool_calls.is_empty()) {
            let same = called
                .iter()
                .find(|known| known.calls == message.tool_calls);
            if let Some(same) = same {
                message.content.clone_from(&same.text);
                message.tool_calls.clear();
            }
        }
        messages
    }

    /// Variables of the template that make the model reason or not, for a word of the OpenAI API, like `none` or `high`.
    pub(super) fn effort(&self, effort: &str) -> Result<Vec<(String, Value)>, ApiError> {
        let field = "reasoning_effort";
        let template = &self.chat()?.template;
        let names = template
            .reads()
            .map_err(|error| ApiError::field(field, error))?;
        if names.iter().any(|name| name == field) {
            return Ok(vec![(field.to_owned(), effort.into())]);
        }
        let thinks = effort != "none";
        let switch = ["enable_thinking", "thinking"];
        match switch
            .iter()
            .find(|switch| names.iter().any(|name| name == *switch))
        {
            Some(switch) => Ok(vec![((*switch).to_owned(), thinks.into())]),
            None if thinks == self.dialect().thinks => Ok(Vec::new()),
            None => Err(ApiError::field(
                field,
                format!(
                    "{effort:?} is not possible: the chat template has no switch for reasoning"
                ),
            )),
        }
    }

    /// Compiles grammars, for field `field` of a request.
    pub(super) fn grammars(&self, field: &str) -> Result<&Grammars, ApiError> {
        let tokenizer = self.tokenizer(field)?;
        let made = self.grammars.get_or_init(|| {
            let stop = [&self.stop[..], self.chat_stop()].concat();
            Grammars::new(tokenizer, self.vocabulary, &stop)
        });
        made.as_ref().map_err(|error| ApiError::field(field, error))
    }

    /// Ids that end an answer.
    pub(super) fn chat_stop(&self) -> &[u32] {
        self.chat.as_ref().map_or(&[], |chat| &chat.stop)
    }

    pub(super) fn dialect(&self) -> Dialect {
        self.chat
            .as_ref()
            .map_or_else(Dialect::default, |chat| chat.dialect)
    }
}

impl Chat {
    fn new(tokenizer: &'static Tokenizer, template: ChatTemplate, stop: &[u32]) -> Chat {
        let mut chat = Chat {
            dialect: Dialect::of(&template),
            template,
            stop: stop.to_vec(),
            idle: Mutex::default(),
            answers: Mutex::default(),
            calls: Mutex::default(),
        };
        let conversation = chat.conversation(tokenizer);
        chat.stop.extend(conversation.end_tokens());
        chat.idle = Mutex::new(vec![conversation]);
        chat
    }

    fn conversation(&self, tokenizer: &'static Tokenizer) -> Conversation<'static> {
        let format = Format::Template(Box::new(self.template.clone()));
        Conversation::new(tokenizer, format, None)
    }

    /// The longest remembered beginning of `text`.
    fn known(&self, text: &str) -> Option<(usize, Vec<u32>)> {
        let answers = lock(&self.answers);
        let known = answers.iter().filter(|known| text.starts_with(&known.text));
        let longest = known.max_by_key(|known| known.text.len())?;
        Some((longest.text.len(), longest.ids.clone()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
