//! Renders chat templates: Jinja programs that ship with a model and turn messages into the text that it was trained on.
//!
//! A template is not trusted. Its time and memory are bounded by the size of the messages. It sees only the messages, the tokenizer's named
//! tokens and the caller's variables.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use minijinja::value::{Serde, Value};
use minijinja::{Error, ErrorKind, context};
use serde::{Deserialize, Serialize};

use crate::runtime::tokenizer::Settings;
use environment::{Raised, environment};
use watch::Limits;

mod environment;
mod error;
mod json;
pub(super) mod lexer;
mod print;
mod python;
mod rewrite;
mod source;
#[cfg(test)]
mod tests;
mod variables;
mod watch;

pub use error::TemplateError;

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The author of the system message.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// A tool that the model called.
    Tool,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Message {
    /// Its author.
    pub role: Role,
    /// The text.
    pub content: String,
    /// The model's reasoning before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The model's calls of tools, after it: objects with `id`, `type` and `function`, whose `arguments` are an object.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<serde_json::Value>,
    /// The call that a tool answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The tool that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// Bytes of its texts.
    fn bytes(&self) -> usize {
        let reasoning = self.reasoning_content.as_deref().map_or(0, str::len);
        // Of calls, the JSON text.
        let calls = self.tool_calls.iter().map(|call| call.to_string().len());
        self.content.len() + reasoning + calls.sum::<usize>()
    }

    /// A message of `role`.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: content.into(),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }
}

/// Steps of fuel for any conversation. A step is an instruction or 64 bytes of text: a fraction of a second, and 32 MiB.
const FUEL: u64 = 1 << 19;
/// More steps for each message. Enough for thousands of messages in templates that scan all messages for each of them.
const FUEL_PER_MESSAGE: u64 = 1 << 12;

/// Bounds for single steps, which fuel does not bound. The memory is that of the whole process.
const LIMITS: Limits = Limits {
    time: Duration::from_secs(5),
    memory: 1 << 30,
};
/// Parsing a template takes milliseconds; one expression with 10,000 operators takes seconds.
const READING: Limits = Limits {
    time: Duration::from_secs(2),
    ..LIMITS
};

/// A longer message that is part of a text is not there by chance.
const LONG: usize = 64;
/// Characters of a text that an error shows.
const SHOWN: usize = 60;

/// A model's chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
    /// `source` in the language of the engine.
    program: String,
    path: PathBuf,
    /// Named tokens, like `bos_token`: name and text.
    tokens: Vec<(&'static str, String)>,
    /// Further variables.
    variables: Vec<(String, Value)>,
    /// What it reads, once that is known.
    names: Arc<OnceLock<Vec<String>>>,
}

impl ChatTemplate {
    /// Loads the chat template of a model directory: `chat_template.jinja`, else the key `chat_template` of `chat_template.json` or
    /// `tokenizer_config.json` (of several, the one named `default`).
    ///
    /// # Errors
    /// [`TemplateError::Missing`], or that the template cannot be read or is not valid.
    pub fn load(dir: &Path) -> Result<ChatTemplate, TemplateError> {
        let settings = Settings::load(dir)?;
        let (source, path) = source::find(dir, &settings)?;
        ChatTemplate::new(source, path, settings.tokens)
    }

    /// Loads a chat template from a file, for the model in `dir`.
    ///
    /// # Errors
    /// That the file cannot be read or is not valid.
    pub fn from_file(path: &Path, dir: &Path) -> Result<ChatTemplate, TemplateError> {
        let settings = Settings::load(dir)?;
        let path = path.to_owned();
        match source::read(&path) {
            Ok(source) => ChatTemplate::new(source, path, settings.tokens),
            Err(source) => Err(TemplateError::Read { path, source }),
        }
    }

    fn new(
        source: String,
        path: PathBuf,
        tokens: Vec<(&'static str, String)>,
    ) -> Result<ChatTemplate, TemplateError> {
        let text = source.clone();
        let parse = move || {
            let program = rewrite::for_engine(&text);
            let parsed = environment(0).template_from_str(&program).map(drop);
            parsed.map_err(|error| describe(&error)).map(|()| program)
        };
        match watch::within(READING, parse) {
            Ok(Ok(program)) => Ok(ChatTemplate {
                source,
                program,
                path,
                tokens,
                variables: Vec::new(),
                names: Arc::default(),
            }),
            Ok(Err(message)) => Err(TemplateError::Invalid { path, message }),
            Err(none) => Err(TemplateError::without_result(path, none)),
        }
    }

    /// Sets a variable that the template reads, like `enable_thinking`, to a value as a user writes it: JSON, `False`, `off`, `None` and
    /// the like in any spelling, or a text.
    ///
    /// # Errors
    /// [`TemplateError::Variable`]: the template does not read the variable, or the program sets it.
    pub fn set(&mut self, name: &str, text: &str) -> Result<(), TemplateError> {
        self.check_reads(name)?;
        let value = variables::value(text, &self.source);
        self.variables.push((name.to_owned(), value));
        Ok(())
    }

    /// Checks that a caller may set a variable.
    fn check_reads(&self, name: &str) -> Result<(), TemplateError> {
        let path = || self.path.clone();
        let refuse = |message| {
            Err(TemplateError::Variable {
                path: path(),
                message,
            })
        };
        if variables::OWN.contains(&name) {
            return refuse(format!("gets its variable {name:?} from the program alone"));
        }
        let names = self.reads()?;
        match names.iter().any(|read| read == name) {
            true => Ok(()),
            false if names.is_empty() => {
                refuse(format!("does not read a variable {name:?}, nor any other"))
            }
            false => refuse(format!(
                "does not read a variable {name:?}, only: {}",
                names.join(", ")
            )),
        }
    }

    /// The same template with further variables, which replace those of the same name.
    ///
    /// # Errors
    /// As [`ChatTemplate::set`].
    pub fn with(
        &self,
        variables: impl IntoIterator<Item = (String, serde_json::Value)>,
    ) -> Result<ChatTemplate, TemplateError> {
        let mut template = self.clone();
        for (name, value) in variables {
            template.check_reads(&name)?;
            template.variables.push((name, Value::from(Serde(value))));
        }
        Ok(template)
    }

    /// The variables that it reads, besides the messages.
    pub fn reads(&self) -> Result<Vec<String>, TemplateError> {
        if let Some(names) = self.names.get() {
            return Ok(names.clone());
        }
        let program = self.program.clone();
        let names = watch::within(READING, move || variables::read_by(&program));
        let names = names.map_err(|none| TemplateError::without_result(self.path.clone(), none))?;
        Ok(self.names.get_or_init(|| names).clone())
    }

    /// The same template without the variables that were set.
    pub(super) fn without_variables(&self) -> ChatTemplate {
        ChatTemplate {
            variables: Vec::new(),
            ..self.clone()
        }
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The file that it is from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The text of `messages`, up to the beginning of the model's answer.
    ///
    /// # Errors
    /// [`TemplateError::Refused`], [`TemplateError::Exhausted`], [`TemplateError::Failed`].
    pub fn render(&self, messages: &[Message]) -> Result<String, TemplateError> {
        let bytes = messages.iter().map(Message::bytes).sum();
        self.render_any(messages.to_vec(), bytes)
    }

    /// The text of messages that have `bytes` of content.
    pub(super) fn render_any<M: Serialize + Send + 'static>(
        &self,
        messages: Vec<M>,
        bytes: usize,
    ) -> Result<String, TemplateError> {
        let bytes = bytes as u64;
        let limits = Limits {
            // One second and 32 copies for each megabyte of messages.
            time: LIMITS.time + Duration::from_micros(bytes),
            memory: LIMITS.memory.saturating_add(bytes.saturating_mul(32)),
        };
        let template = self.clone();
        let rendered = watch::within(limits, move || template.run(&messages, bytes));
        let path = self.path.clone();
        rendered.unwrap_or_else(|none| Err(TemplateError::without_result(path, none)))
    }

    /// Checks that the system message and the last message have an influence on `text`, which is rendered from `messages`.
    ///
    /// # Errors
    /// [`TemplateError::LeavesOut`].
    pub(super) fn check_includes(
        &self,
        messages: &[Message],
        text: &str,
    ) -> Result<(), TemplateError> {
        let system = messages.iter().take(1).filter(|m| m.role == Role::System);
        let last = messages.len().saturating_sub(1);
        for at in [last].into_iter().chain(0..system.count()) {
            let content = messages[at].content.trim();
            if content.len() >= LONG && text.contains(content) {
                continue;
            }
            let mut other = messages.to_vec();
            other[at].content = format!("other {}", content.len());
            // An error is not a text: the template reads the message.
            if self.render(&other).is_ok_and(|other| other == text) {
                return Err(TemplateError::LeavesOut {
                    path: self.path.clone(),
                    role: messages[at].role.name(),
                    text: text.chars().take(SHOWN).collect(),
                });
            }
        }
        Ok(())
    }

    fn run<M: Serialize>(&self, messages: &[M], bytes: u64) -> Result<String, TemplateError> {
        let fuel = FUEL
            .saturating_add(FUEL_PER_MESSAGE.saturating_mul(messages.len() as u64))
            .saturating_add(bytes);
        let environment = environment(fuel);
        // Defined as none: templates ask `tools is not none`.
        let none = ["tools", "documents"].map(|name| (name, Value::from(())));
        let tokens = (self.tokens.iter()).map(|(name, text)| (*name, Value::from(text.as_str())));
        let variables = (self.variables.iter()).map(|(name, value)| (name.as_str(), value.clone()));
        let named = Value::from_pairs(none.into_iter().chain(tokens).chain(variables));
        let context = context! {
            messages => Serde(messages), add_generation_prompt => true, ..named
        };
        let template = environment.template_from_str(&self.program);
        template
            .and_then(|template| template.render(context))
            .map_err(|error| self.failure(&error))
    }

    fn failure(&self, error: &Error) -> TemplateError {
        let path = self.path.clone();
        if let Some(Raised(message)) = cause(error) {
            let message = message.clone();
            return TemplateError::Refused { path, message };
        }
        match exhausted(error) {
            true => TemplateError::Exhausted { path },
            false => TemplateError::Failed {
                path,
                message: describe(error),
            },
        }
    }
}

fn cause<T: std::error::Error + 'static>(error: &Error) -> Option<&T> {
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        source = error.source();
    }
    None
}

fn exhausted(error: &Error) -> bool {
    error.kind() == ErrorKind::OutOfFuel
        || cause::<Error>(error).is_some_and(|inner| inner.kind() == ErrorKind::OutOfFuel)
}

/// One line: the kind, the details and the line.
fn describe(error: &Error) -> String {
    let detail = error.detail().unwrap_or_default();
    let mut text = match detail {
        "" => error.kind().to_string(),
        _ => format!("{}: {detail}", error.kind()),
    };
    if let Some(line) = error.line() {
        text += &format!(" (line {line})");
    }
    text
}
