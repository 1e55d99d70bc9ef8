//! Splits a model's answer into reasoning, tool calls and content, while it is generated.
//!
//! Models mark these parts with tags that their chat template writes, too: that is how the dialect is recognised.

use serde_json::{Map, Value};

use crate::runtime::template::ChatTemplate;

mod form;
mod json;
mod pairs;
mod section;
mod split;
#[cfg(test)]
mod tests;

pub use form::Form;
pub use pairs::is_name;
pub use section::{Section, Style};
pub use split::Splitter;

/// How a model writes a tool call, between `<tool_call>` and `</tool_call>` if nothing else is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFormat {
    /// The function's name, then pairs of `<arg_key>` and `<arg_value>`: GLM-4.5 and later.
    Pairs,
    /// One JSON object with the keys `name` and `arguments`: Hermes, Qwen.
    Json,
    /// Calls in a section between special tokens: DeepSeek, Kimi K2.
    Section(&'static Section),
}

/// The tags of a model's answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialect {
    /// Whether the model writes `<think>` and `</think>` around its reasoning.
    pub thinks: bool,
    /// How it calls tools; `None` if it cannot.
    pub calls: Option<CallFormat>,
}

/// A function that the model may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments.
    pub parameters: Map<String, Value>,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text of the reasoning.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// A tool call begins. Calls are counted from 0.
    Call {
        /// Number of the call.
        index: usize,
        /// The function.
        name: String,
    },
    /// JSON text of the arguments, to be appended to what came before of the same call.
    Arguments {
        /// Number of the call.
        index: usize,
        /// The text.
        text: String,
    },
}

impl Dialect {
    /// The dialect of the models that `template` belongs to.
    pub fn of(template: &ChatTemplate) -> Dialect {
        let writes = |tag| template.source().contains(tag);
        let calls = match writes("<tool_call>") {
            true if writes("<arg_key>") => Some(CallFormat::Pairs),
            true => Some(CallFormat::Json),
            false => section::of(template.source()).map(CallFormat::Section),
        };
        Dialect {
            thinks: writes("</think>"),
            calls,
        }
    }

    /// A splitter for the answer to `prompt`, the rendered text. Without `tools`, calls stay content.
    pub fn splitter(&self, prompt: &str, tools: Vec<Tool>) -> Splitter {
        // Templates may begin the reasoning themselves.
        let opened = self.thinks && prompt.trim_end().ends_with("<think>");
        let calls = self.calls.filter(|_| !tools.is_empty());
        Splitter::new(self.thinks, opened, calls, tools)
    }
}

/// Bytes at the end of `text` with which `tag` may begin.
pub(crate) fn beginning(text: &str, tag: &str) -> usize {
    let starts = tag.char_indices().map(|(at, _)| at).filter(|at| *at > 0);
    starts
        .rev()
        .find(|n| text.ends_with(&tag[..*n]))
        .unwrap_or(0)
}
