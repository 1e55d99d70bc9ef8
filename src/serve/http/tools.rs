//! Reads tools, the choice among them, and the format of the answer.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use crate::runtime::dialect::{Form, Tool, is_name};

/// Tools of a request at most, and bytes of their descriptions.
const TOOLS: usize = 128;
const TOOL_BYTES: usize = 1 << 20;

/// The tools of a request, and what the model may do with them.
#[derive(Debug, Default)]
pub struct Tools {
    /// As the template describes them to the model: objects of the OpenAI API.
    pub described: Vec<Value>,
    /// The same tools.
    pub tools: Vec<Tool>,
    pub choice: Choice,
    /// Whether an answer may have only one call.
    pub single: bool,
    bytes: usize,
}

/// What the model may do with the tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// Call them or not.
    #[default]
    Auto,
    /// Not call them.
    Never,
    /// Call at least one.
    Required,
    /// Call this one.
    Named(String),
}

/// A tool as a client describes it.
#[derive(Debug, Deserialize)]
struct Described {
    name: String,
    parameters: Option<Map<String, Value>>,
}

impl Tools {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls` of the OpenAI API.
    pub fn of_openai(
        tools: Option<Vec<Value>>,
        choice: Option<Value>,
        parallel: Option<bool>,
    ) -> Result<Tools, ApiError> {
        let mut read = Tools {
            single: parallel == Some(false),
            ..Tools::default()
        };
        for (index, tool) in tools.unwrap_or_default().into_iter().enumerate() {
            let wrong = |problem: String| ApiError::field(&format!("tools[{index}]"), problem);
            let kind = tool.get("type").and_then(Value::as_str).unwrap_or_default();
            if kind != "function" {
                return Err(wrong(format!(
                    "type {kind:?} is not supported, only \"function\""
                )));
            }
            let function = tool.get("function").cloned().unwrap_or_default();
            let function: Described = serde_json::from_value(function)
                .map_err(|error| wrong(format!("function: {error}")))?;
            read.add(function.name, function.parameters.unwrap_or_default(), tool)
                .map_err(wrong)?;
        }
        let problem = "it is none of \"none\", \"auto\", \"required\", {\"type\": \"function\", \"function\": {\"name\": NAME}}";
        let choice = match choice {
            None => None,
            Some(Value::String(word)) => Some(match word.as_str() {
                "auto" => Choice::Auto,
                "none" => Choice::Never,
                "required" => Choice::Required,
                _ => return Err(ApiError::field("tool_choice", problem)),
            }),
            Some(other) => match other["function"]["name"].as_str() {
                Some(name) if other["type"] == "function" => Some(Choice::Named(name.to_owned())),
                _ => return Err(ApiError::field("tool_choice", problem)),
            },
        };
        read.choose(choice.unwrap_or_default())?;
        Ok(read)
    }

    /// Adds a tool; `described` is what the template reads.
    pub fn add(
        &mut self,
        name: String,
        parameters: Map<String, Value>,
        described: Value,
    ) -> Result<(), String> {
        if !is_name(&name) {
            return Err(format!(
                "the name {name:?} is not of 1 to 128 letters, digits and _ - . : /"
            ));
        }
        if self.tools.iter().any(|tool| tool.name == name) {
            return Err(format!("there are two tools with the name {name:?}"));
        }
        if self.tools.len() == TOOLS {
            return Err(format!("there are more than {TOOLS}"));
        }
        self.bytes += described.to_string().len();
        if self.bytes > TOOL_BYTES {
            return Err(format!(
                "descriptions have more than {} MiB",
                TOOL_BYTES >> 20
            ));
        }
        self.described.push(described);
        self.tools.push(Tool { name, parameters });
        Ok(())
    }

    /// Sets the choice, which some of the tools have to allow.
    pub fn choose(&mut self, choice: Choice) -> Result<(), ApiError> {
        let problem = match &choice {
            Choice::Named(name) if !self.tools.iter().any(|tool| tool.name == *name) => {
                Some(format!("there is no tool {name:?}"))
            }
            Choice::Required if self.tools.is_empty() => Some("there are no tools".to_owned()),
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(ApiError::field("tool_choice", problem));
        }
        if choice == Choice::Never {
            self.tools.clear();
            self.described.clear();
        }
        self.choice = choice;
        Ok(())
    }

    /// What the answer has to be, if the choice or a `schema` limits it.
    pub fn form(&self, schema: Option<Value>) -> Option<Form> {
        let of = |wanted: Option<&str>| -> Vec<Tool> {
            let tools = self.tools.iter();
            let wanted = tools.filter(|tool| wanted.is_none_or(|name| tool.name == name));
            wanted.cloned().collect()
        };
        let several = !self.single;
        match (&self.choice, schema) {
            (Choice::Required, _) => Some(Form {
                schema: None,
                tools: of(None),
                several,
            }),
            (Choice::Named(name), _) => Some(Form {
                schema: None,
                tools: of(Some(name)),
                several: false,
            }),
            (Choice::Auto | Choice::Never, None) => None,
            (Choice::Auto | Choice::Never, schema) => Some(Form {
                schema,
                tools: of(None),
                several,
            }),
        }
    }
}

/// The schema that `response_format` asks for; `None` for any text.
pub fn schema(format: Option<&Value>) -> Result<Option<Value>, ApiError> {
    const FIELD: &str = "response_format";
    let Some(format) = format else {
        return Ok(None);
    };
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(json!({"type": "object"}))),
        Some("json_schema") => match format
            .get("json_schema")
            .and_then(|given| given.get("schema"))
        {
            Some(schema) => Ok(Some(schema.clone())),
            None => Err(ApiError::field(FIELD, "json_schema.schema is missing")),
        },
        Some(kind) => Err(ApiError::field(
            FIELD,
            format!(
                "type {kind:?} is not supported, only \"text\", \"json_object\" and \"json_schema\""
            ),
        )),
        None => Err(ApiError::field(FIELD, "it has no type")),
    }
}
