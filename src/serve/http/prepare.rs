//! Turns a conversation into the ids of a prompt and the constraint of its answer.

use serde_json::Value;

use super::error::ApiError;
use super::served::Served;
use super::tools::Tools;
use crate::runtime::chat::{Asked, ChatError};
use crate::runtime::dialect::{Form, Splitter, Tool};
use crate::runtime::grammar::{Constraint, Grammar};
use crate::runtime::template::{Message, TemplateError};

/// A conversation whose next message is wanted.
#[derive(Debug, Default)]
pub struct Wanted {
    pub messages: Vec<Message>,
    pub tools: Tools,
    /// A schema for the answer.
    pub schema: Option<Value>,
    /// Variables of the template.
    pub variables: Vec<(String, Value)>,
    /// Whether the model is to reason: a word of the OpenAI API, like `none` or `high`.
    pub effort: Option<String>,
}

/// What the engine needs to answer a conversation, and what its answer needs to be split.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The rendered text.
    pub prompt: String,
    pub ids: Vec<u32>,
    pub constraint: Option<Constraint>,
    pub tools: Vec<Tool>,
    /// Whether only the first call of the answer counts.
    pub single: bool,
}

impl Prepared {
    /// A splitter for the answer.
    pub fn splitter(&self, served: &Served) -> Splitter {
        served.dialect().splitter(&self.prompt, self.tools.clone())
    }
}

/// Prepares an answer. Takes seconds for hostile texts and schemas.
pub fn prepare(served: &Served, wanted: Wanted) -> Result<Prepared, ApiError> {
    let Wanted {
        messages,
        tools,
        schema,
        mut variables,
        effort,
    } = wanted;
    if !tools.tools.is_empty() && served.dialect().calls.is_none() {
        let problem = "the model's chat template has no tools in a format that is known";
        return Err(ApiError::field("tools", problem));
    }
    if let Some(effort) = effort {
        variables.extend(served.effort(&effort)?);
    }
    let form = tools.form(schema);
    let Tools {
        described,
        tools,
        single,
        ..
    } = tools;
    let bytes = messages.iter().map(|message| message.content.len()).sum();
    served.texts.check("messages", bytes)?;
    let _permit = served.texts.wait(bytes);
    let asked = Asked {
        messages: served.replay(messages),
        tools: (!described.is_empty()).then(|| described.into()),
        variables,
    };
    let (prompt, ids) = served.prompt(asked)?;
    let constraint = form
        .map(|form| constraint(served, &form, &prompt))
        .transpose()?;
    Ok(Prepared {
        prompt,
        ids,
        constraint,
        tools,
        single,
    })
}

fn constraint(served: &Served, form: &Form, prompt: &str) -> Result<Constraint, ApiError> {
    let field = match form.schema {
        Some(_) => "response_format",
        None => "tools",
    };
    let tokenizer = served.tokenizer(field)?;
    let grammar = served.dialect().grammar(form, prompt, tokenizer);
    let grammar = grammar.map_err(|error| ApiError::field(field, error))?;
    let problem = "the model cannot call tools";
    let grammar = grammar.ok_or_else(|| ApiError::field(field, problem))?;
    compile(served, &grammar, field)
}

/// Compiles a grammar that field `field` asks for.
pub fn compile(served: &Served, grammar: &Grammar, field: &str) -> Result<Constraint, ApiError> {
    let grammars = served.grammars(field)?;
    // One at a time: a hostile grammar takes memory.
    let _turn = served.compiling.lock();
    let compiled = grammars.compile(grammar);
    compiled.map_err(|error| ApiError::field(field, error))
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> ApiError {
        let field = match &error {
            ChatError::Template(TemplateError::Variable { .. }) => "chat_template_kwargs",
            _ => "messages",
        };
        ApiError::field(field, error)
    }
}
