//! Reads the messages of a chat completion.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use crate::runtime::template::{Message, Role};

/// A message of a request.
#[derive(Debug, Deserialize)]
pub struct Said {
    role: String,
    content: Option<Content>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<Call>>,
    tool_call_id: Option<String>,
    name: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "it is no text and no list of parts")]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Debug, Deserialize)]
struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Call {
    id: Option<String>,
    function: Function,
}

#[derive(Debug, Deserialize)]
struct Function {
    name: String,
    arguments: Option<Value>,
}

/// The messages of a request.
pub fn messages(said: Vec<Said>) -> Result<Vec<Message>, ApiError> {
    if said.is_empty() {
        return Err(ApiError::field("messages", "there is none"));
    }
    let said = said.into_iter().enumerate();
    said.map(|(index, said)| said.message(index)).collect()
}

/// A call as templates read it.
pub fn call(id: Option<&str>, name: &str, arguments: Map<String, Value>) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

impl Said {
    fn message(self, index: usize) -> Result<Message, ApiError> {
        let wrong = |problem: String| ApiError::field(&format!("messages[{index}]"), problem);
        let role = match self.role.as_str() {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => Role::Tool,
            role => return Err(wrong(format!("role {role:?} is not supported"))),
        };
        let calls = self.tool_calls.unwrap_or_default();
        if role != Role::Assistant && !calls.is_empty() {
            return Err(wrong(format!("role {:?} has no tool_calls", self.role)));
        }
        let calls = calls.into_iter().enumerate();
        let tool_calls = calls
            .map(|(n, call)| call.described(&format!("messages[{index}].tool_calls[{n}]")))
            .collect::<Result<_, _>>()?;
        let content = match self.content {
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => {
                let text = parts.into_iter().map(|part| match part.text {
                    Some(text) if part.kind == "text" => Ok(text),
                    _ => Err(wrong(format!(
                        "content of type {:?} is not supported, only text",
                        part.kind
                    ))),
                });
                text.collect::<Result<Vec<_>, _>>()?.concat()
            }
            None if role == Role::Assistant => String::new(),
            None => return Err(wrong("it has no content".into())),
        };
        Ok(Message {
            reasoning_content: self.reasoning_content.filter(|_| role == Role::Assistant),
            tool_calls,
            tool_call_id: self.tool_call_id.filter(|_| role == Role::Tool),
            name: self.name.filter(|_| role == Role::Tool),
            ..Message::new(role, content)
        })
    }
}

impl Call {
    fn described(self, field: &str) -> Result<Value, ApiError> {
        let arguments = match self.function.arguments {
            None => Some(Map::new()),
            Some(Value::Object(object)) => Some(object),
            Some(Value::String(text)) if text.trim().is_empty() => Some(Map::new()),
            Some(Value::String(text)) => serde_json::from_str(&text).ok(),
            Some(_) => None,
        };
        let arguments = arguments.ok_or_else(|| {
            ApiError::field(
                &format!("{field}.function.arguments"),
                "they are no JSON object",
            )
        })?;
        Ok(call(self.id.as_deref(), &self.function.name, arguments))
    }
}
