//! Reads a call as one JSON object: `{"name": NAME, "arguments": {...}}`.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::pairs::is_name;

#[derive(Deserialize)]
struct Call {
    name: String,
    #[serde(alias = "parameters", default)]
    arguments: Arguments,
}

/// Some models write the object into a string.
#[derive(Deserialize)]
#[serde(untagged)]
enum Arguments {
    Object(Map<String, Value>),
    Text(String),
}

impl Default for Arguments {
    fn default() -> Arguments {
        Arguments::Object(Map::new())
    }
}

/// Name and arguments of a call; `None` if the text is none.
pub fn call(text: &str) -> Option<(String, String)> {
    let call: Call = serde_json::from_str(text.trim()).ok()?;
    let arguments = match call.arguments {
        Arguments::Object(object) => object,
        Arguments::Text(text) => serde_json::from_str(&text).ok()?,
    };
    is_name(&call.name).then(|| (call.name, Value::from(arguments).to_string()))
}
