//! Reads messages and tools of the Anthropic API.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::said;
use super::tools::{Choice, Tools};
use crate::runtime::template::{Message, Role};

/// A message of a request.
#[derive(Debug, Deserialize)]
pub struct Said {
    role: String,
    content: Blocks,
}

/// A text, or blocks.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "it is no text and no list of blocks")]
pub enum Blocks {
    Text(String),
    List(Vec<Block>),
}

/// A block of content.
#[derive(Debug, Default, Deserialize)]
pub struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Map<String, Value>>,
    tool_use_id: Option<String>,
    content: Option<Box<Blocks>>,
}

impl Blocks {
    fn list(self) -> Vec<Block> {
        match self {
            Blocks::List(blocks) => blocks,
            Blocks::Text(text) => vec![Block {
                kind: "text".into(),
                text: Some(text),
                ..Block::default()
            }],
        }
    }

    /// The text of blocks that have nothing else.
    fn text(self, field: &str) -> Result<String, ApiError> {
        let texts = self.list().into_iter().map(|block| match block.text {
            Some(text) if block.kind == "text" => Ok(text),
            _ => Err(unsupported(field, &block.kind)),
        });
        Ok(texts.collect::<Result<Vec<_>, _>>()?.concat())
    }
}

fn unsupported(field: &str, kind: &str) -> ApiError {
    ApiError::field(
        field,
        format!("content of type {kind:?} is not supported here"),
    )
}

/// The messages of a request, as templates read them.
pub fn messages(system: Option<Blocks>, said: Vec<Said>) -> Result<Vec<Message>, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = system {
        let text = system.text("system")?;
        if !text.is_empty() {
            messages.push(Message::new(Role::System, text));
        }
    }
    for (index, said) in said.into_iter().enumerate() {
        let field = format!("messages[{index}]");
        match said.role.as_str() {
            "user" => user(said.content, &field, &mut messages)?,
            "assistant" => messages.push(assistant(said.content, &field)?),
            role => {
                let problem =
                    format!("role {role:?} is not supported, only \"user\" and \"assistant\"");
                return Err(ApiError::field(&field, problem));
            }
        }
    }
    match messages.last().map(|last| last.role) {
        Some(Role::User | Role::Tool) => Ok(messages),
        None | Some(Role::System) => Err(ApiError::field("messages", "there is none")),
        Some(Role::Assistant) => Err(ApiError::field(
            "messages",
            "the last one is the assistant's, and an answer cannot be continued",
        )),
    }
}

/// Results of tools are messages of their own, before the text.
fn user(content: Blocks, field: &str, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let mut texts = Vec::new();
    let mut results = false;
    for block in content.list() {
        match (block.kind.as_str(), block.text) {
            ("text", Some(text)) => texts.push(text),
            ("tool_result", _) => {
                let id = block.tool_use_id;
                let id =
                    id.ok_or_else(|| ApiError::field(field, "a tool_result has no tool_use_id"))?;
                let text = block
                    .content
                    .map(|content| content.text(field))
                    .transpose()?;
                results = true;
                messages.push(Message {
                    tool_call_id: Some(id),
                    ..Message::new(Role::Tool, text.unwrap_or_default())
                });
            }
            (kind, _) => return Err(unsupported(field, kind)),
        }
    }
    if !texts.is_empty() || !results {
        messages.push(Message::new(Role::User, texts.concat()));
    }
    Ok(())
}

fn assistant(content: Blocks, field: &str) -> Result<Message, ApiError> {
    let mut message = Message::new(Role::Assistant, "");
    for block in content.list() {
        match block.kind.as_str() {
            "text" => message.content += &block.text.unwrap_or_default(),
            "thinking" => {
                let reasoning = message.reasoning_content.get_or_insert_default();
                *reasoning += &block.thinking.unwrap_or_default();
            }
            // Only its author can read it.
            "redacted_thinking" => {}
            "tool_use" => {
                let name = block.name;
                let name = name.ok_or_else(|| ApiError::field(field, "a tool_use has no name"))?;
                let input = block.input.unwrap_or_default();
                message
                    .tool_calls
                    .push(said::call(block.id.as_deref(), &name, input));
            }
            kind => return Err(unsupported(field, kind)),
        }
    }
    Ok(message)
}

/// A tool of a request.
#[derive(Debug, Deserialize)]
struct Described {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    input_schema: Option<Map<String, Value>>,
}

/// The choice among tools.
#[derive(Debug, Deserialize)]
struct Chosen {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

/// Reads `tools` and `tool_choice`.
pub fn tools(described: Option<Vec<Value>>, choice: Option<Value>) -> Result<Tools, ApiError> {
    let mut tools = Tools::default();
    for (index, tool) in described.unwrap_or_default().into_iter().enumerate() {
        let wrong = |problem: String| ApiError::field(&format!("tools[{index}]"), problem);
        let tool: Described =
            serde_json::from_value(tool).map_err(|error| wrong(error.to_string()))?;
        if let Some(kind) = tool.kind.filter(|kind| kind != "custom") {
            return Err(wrong(format!(
                "type {kind:?} is not supported, only \"custom\""
            )));
        }
        let parameters = tool.input_schema.unwrap_or_default();
        let function = json!({
            "name": tool.name,
            "description": tool.description.unwrap_or_default(),
            "parameters": parameters,
        });
        let openai = json!({"type": "function", "function": function});
        tools.add(tool.name, parameters, openai).map_err(wrong)?;
    }
    let Some(choice) = choice else {
        return Ok(tools);
    };
    let wrong = |problem: String| ApiError::field("tool_choice", problem);
    let choice: Chosen =
        serde_json::from_value(choice).map_err(|error| wrong(error.to_string()))?;
    tools.single = choice.disable_parallel_tool_use == Some(true);
    tools.choose(match (choice.kind.as_str(), choice.name) {
        ("auto", _) => Choice::Auto,
        ("none", _) => Choice::Never,
        ("any", _) => Choice::Required,
        ("tool", Some(name)) => Choice::Named(name),
        ("tool", None) => return Err(wrong("it has no name".into())),
        (kind, _) => return Err(wrong(format!("type {kind:?} is not supported"))),
    })?;
    Ok(tools)
}
