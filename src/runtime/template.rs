//! Renders chat templates: Jinja programs that ship with a model and turn messages into the text that it was trained on.
//!
//! A template is not trusted. Its time and memory are bounded by the size of the messages. It sees only the messages, the tokenizer's named
//! tokens and the caller's variables.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytesize::ByteSize;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::{Deserialize, Serialize};
use watch::{Limits, NoResult};

use crate::arch::ConfigError;
use crate::runtime::tokenizer::{Settings, TemplateSource};

mod json;
mod print;
#[cfg(test)]
mod tests;
mod watch;

/// Why a chat template cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The model has no template.
    #[error(
        "the model has no chat template: neither {} nor the key chat_template in {}",
        dir.join(FILE).display(), dir.join("tokenizer_config.json").display()
    )]
    Missing {
        /// The model's directory.
        dir: PathBuf,
    },
    /// The file exists and cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The template.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// `tokenizer_config.json` cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The key `chat_template` does not hold a template.
    #[error("{}: chat_template {message}", path.display())]
    Source {
        /// The `tokenizer_config.json`.
        path: PathBuf,
        /// What it holds.
        message: String,
    },
    /// The template is not valid Jinja.
    #[error("the chat template in {} is not valid: {message}", path.display())]
    Invalid {
        /// Where it is from.
        path: PathBuf,
        /// The reason, with its line.
        message: String,
    },
    /// The template itself refuses the messages.
    #[error("the chat template in {} refuses these messages: {message}", path.display())]
    Refused {
        /// Where it is from.
        path: PathBuf,
        /// What it says.
        message: String,
    },
    /// The template needs more time or memory than putting messages in order can take.
    #[error("the chat template in {} was stopped: it takes more time or memory than putting messages in order can take", path.display())]
    Exhausted {
        /// Where it is from.
        path: PathBuf,
    },
    /// No thread can be made to run it on.
    #[error(
        "cannot run the chat template in {}: no thread can be made with {} of address space for its stack: {source}; a limit \
         (`ulimit -v`) has to be raised",
        path.display(), ByteSize::b(*stack).display().iec()
    )]
    NoThread {
        /// Where it is from.
        path: PathBuf,
        /// Bytes of its stack.
        stack: u64,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The template failed.
    #[error("the chat template in {} fails: {message}", path.display())]
    Failed {
        /// Where it is from.
        path: PathBuf,
        /// The reason, with its line.
        message: String,
    },
}

impl TemplateError {
    fn without_result(path: PathBuf, none: NoResult) -> TemplateError {
        match none {
            NoResult::Exhausted => TemplateError::Exhausted { path },
            NoResult::NoThread(stack, source) => TemplateError::NoThread {
                path,
                stack,
                source,
            },
        }
    }
}

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
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Message {
    /// Its author.
    pub role: Role,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: content.into(),
        }
    }
}

/// Preferred to the key in `tokenizer_config.json`.
const FILE: &str = "chat_template.jinja";
/// Known templates have some kilobytes.
const MAX_TEMPLATE_BYTES: u64 = 256 << 10;
const TOO_LARGE: &str = "larger than 256 KiB";
/// Depth of nested calls.
const MAX_RECURSION: usize = 64;
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

/// A model's chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
    path: PathBuf,
    /// Named tokens, like `bos_token`: name and text.
    tokens: Vec<(&'static str, String)>,
    /// Further variables.
    variables: Vec<(String, serde_json::Value)>,
}

impl ChatTemplate {
    /// Loads the chat template of a model directory: `chat_template.jinja`, or the one in `tokenizer_config.json` (of several, the one
    /// named `default`).
    ///
    /// # Errors
    /// [`TemplateError::Missing`], or that the template cannot be read or is not valid.
    pub fn load(dir: &Path) -> Result<ChatTemplate, TemplateError> {
        let settings = Settings::load(dir)?;
        let path = dir.join(FILE);
        let (source, path) = match read(&path) {
            Ok(source) => (source, path),
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(TemplateError::Read { path, source });
            }
            Err(_) => {
                let path = dir.join("tokenizer_config.json");
                let message = match settings.chat_template {
                    None => return Err(TemplateError::Missing { dir: dir.into() }),
                    Some(TemplateSource::Text(source))
                        if source.len() as u64 > MAX_TEMPLATE_BYTES =>
                    {
                        format!("is {TOO_LARGE}")
                    }
                    Some(TemplateSource::Text(source)) => {
                        return ChatTemplate::new(source, path, settings.tokens);
                    }
                    Some(TemplateSource::Named(names)) => {
                        format!("has no template named default, only: {}", names.join(", "))
                    }
                    Some(TemplateSource::Other(kind)) => {
                        format!("is {kind}, neither a text nor a list of named ones")
                    }
                };
                return Err(TemplateError::Source { path, message });
            }
        };
        ChatTemplate::new(source, path, settings.tokens)
    }

    fn new(
        source: String,
        path: PathBuf,
        tokens: Vec<(&'static str, String)>,
    ) -> Result<ChatTemplate, TemplateError> {
        let template = ChatTemplate {
            source: without_generation_tags(&source),
            path,
            tokens,
            variables: Vec::new(),
        };
        let source = template.source.clone();
        let parse = move || match environment(0).template_from_str(&source) {
            Ok(_) => Ok(()),
            Err(error) => Err(describe(&error)),
        };
        let path = template.path.clone();
        match watch::within(READING, parse) {
            Ok(Ok(())) => Ok(template),
            Ok(Err(message)) => Err(TemplateError::Invalid { path, message }),
            Err(none) => Err(TemplateError::without_result(path, none)),
        }
    }

    /// Sets a variable that the template may read, like `enable_thinking`.
    pub fn set(&mut self, name: String, value: serde_json::Value) {
        self.variables.push((name, value));
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of `messages`, up to the beginning of the model's answer.
    ///
    /// # Errors
    /// [`TemplateError::Refused`], [`TemplateError::Exhausted`], [`TemplateError::Failed`].
    pub fn render(&self, messages: &[Message]) -> Result<String, TemplateError> {
        let bytes: usize = messages.iter().map(|m| m.content.len()).sum();
        let limits = Limits {
            // One second and 32 copies for each megabyte of messages.
            time: LIMITS.time + Duration::from_micros(bytes as u64),
            memory: LIMITS
                .memory
                .saturating_add((bytes as u64).saturating_mul(32)),
        };
        let (template, messages) = (self.clone(), messages.to_vec());
        let rendered = watch::within(limits, move || template.run(&messages, bytes as u64));
        let path = self.path.clone();
        rendered.unwrap_or_else(|none| Err(TemplateError::without_result(path, none)))
    }

    fn run(&self, messages: &[Message], bytes: u64) -> Result<String, TemplateError> {
        let fuel = FUEL
            .saturating_add(FUEL_PER_MESSAGE.saturating_mul(messages.len() as u64))
            .saturating_add(bytes);
        let environment = environment(fuel);
        let tokens = (self.tokens.iter()).map(|(name, text)| (*name, Value::from(text.as_str())));
        let variables =
            (self.variables.iter()).map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let named = Value::from_pairs(tokens.chain(variables));
        let context = context! {
            // Defined as none: templates ask `tools is not none`.
            tools => (), documents => (),
            messages => Serde(messages), add_generation_prompt => true, ..named
        };
        let template = environment.template_from_str(&self.source);
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

/// The message of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

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

/// The settings, functions and filters that templates rely on, as in transformers.
fn environment(fuel: u64) -> Environment<'static> {
    let mut environment = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    if let Ok(syntax) = syntax.trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax);
    }
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_fuel(Some(fuel));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_formatter(print::print);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            let error = Error::new(ErrorKind::InvalidOperation, message.clone());
            Err(error.with_source(Raised(message)))
        },
    );
    environment.add_function("strftime_now", |format: String| strftime_now(&format));
    environment.add_filter("tojson", |value: Value, options: Kwargs| {
        json::to_json(&value, &options)
    });
    environment
}

/// The local time, formatted by strftime.
fn strftime_now(format: &str) -> Result<String, Error> {
    let now = jiff::ZonedDateTime::now();
    jiff::fmt::strtime::format(format, &now)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// Replaces `{% generation %}` blocks, which mark text for training, by blocks without effect.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let (before, tag) = (&rest[..start + 2], &rest[start + 2..start + length]);
        out += before;
        let word = tag.trim_matches(['-', '+', ' ', '\n', '\t']);
        out += &match word {
            "generation" => tag.replace("generation", "if true"),
            "endgeneration" => tag.replace("endgeneration", "endif"),
            _ => tag.to_owned(),
        };
        rest = &rest[start + length..];
    }
    out + rest
}

/// Reads a regular file of limited size.
fn read(path: &Path) -> io::Result<String> {
    // Checked before opening: opening a FIFO would wait for a writer.
    let found = std::fs::metadata(path)?;
    if !found.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    if found.len() > MAX_TEMPLATE_BYTES {
        return Err(io::Error::other(TOO_LARGE));
    }
    std::fs::read_to_string(path)
}
