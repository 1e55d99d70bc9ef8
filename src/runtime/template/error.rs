//! Names why a chat template cannot be used.

use std::io;
use std::path::PathBuf;

use bytesize::ByteSize;

use super::source::{FILE, JSON_FILE};
use super::watch::NoResult;
use crate::arch::ConfigError;

/// Why a chat template cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The model has no template.
    #[error(
        "the model has no chat template: neither {FILE}, nor {JSON_FILE}, nor the key chat_template of tokenizer_config.json in {}; \
         copy {FILE} there from the model's download page, or name another file (ChatTemplate::from_file)",
        dir.display()
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
    /// A JSON file that may hold the template cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The key `chat_template` does not hold a template.
    #[error("{}: chat_template {message}", path.display())]
    Source {
        /// The JSON file.
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
    /// The template does not read a variable, or the program sets it.
    #[error("the chat template in {} {message}", path.display())]
    Variable {
        /// Where it is from.
        path: PathBuf,
        /// The name, and the names that the template reads.
        message: String,
    },
    /// A message has no influence on the text.
    #[error(
        "the chat template in {} leaves out the {role} message: its text is {text:?}, whatever the message; copy the template again from \
         the model's download page, or name another file (ChatTemplate::from_file)",
        path.display()
    )]
    LeavesOut {
        /// Where it is from.
        path: PathBuf,
        /// The author of the message.
        role: &'static str,
        /// The beginning of the text.
        text: String,
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
    pub(super) fn without_result(path: PathBuf, none: NoResult) -> TemplateError {
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
