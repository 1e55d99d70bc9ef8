//! Reads a call as pairs of tags: `NAME <arg_key>K</arg_key> <arg_value>V</arg_value> ...`.

use serde_json::{Map, Value};

use super::Tool;

const KEY: (&str, &str) = ("<arg_key>", "</arg_key>");
const VALUE: (&str, &str) = ("<arg_value>", "</arg_value>");

/// A call, up to where it has been read.
#[derive(Debug, Default)]
pub struct Pairs {
    name: Option<String>,
    keys: Vec<String>,
}

/// What the text begins with.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// The function's name.
    Name(String),
    /// A pair, as JSON text that continues the arguments.
    Arguments(String),
    /// Nothing, or something that is not complete.
    Nothing,
    /// Something that no call has.
    Other,
}

impl Pairs {
    /// Reads the next element of `text` and says how many bytes it takes. `complete` tells that the call ends after `text`.
    pub fn step(&mut self, text: &str, complete: bool, tools: &[Tool]) -> (Found, usize) {
        let Some(name) = &self.name else {
            return self.begin(text, complete);
        };
        let Some(pair) = pair(text) else {
            return (Found::Other, 0);
        };
        let Some((key, value, end)) = pair else {
            return (Found::Nothing, 0);
        };
        // Of equal keys, the first one counts.
        if self.keys.iter().any(|known| known == key) {
            return (Found::Arguments(String::new()), end);
        }
        let tool = tools.iter().find(|tool| tool.name == *name);
        let separator = if self.keys.is_empty() { "{" } else { ", " };
        let json = json_of(tool, key, value);
        let text = format!("{separator}{}: {json}", Value::from(key));
        self.keys.push(key.to_owned());
        (Found::Arguments(text), end)
    }

    fn begin(&mut self, text: &str, complete: bool) -> (Found, usize) {
        let end = match text.find(KEY.0) {
            Some(end) => end,
            None if complete => text.len(),
            None => return (Found::Nothing, 0),
        };
        let name = text[..end].trim();
        if !is_name(name) {
            return (Found::Other, 0);
        }
        self.name = Some(name.to_owned());
        (Found::Name(name.to_owned()), end)
    }

    /// Whether the name has been read.
    pub fn is_named(&self) -> bool {
        self.name.is_some()
    }

    /// The end of the arguments.
    pub fn end(&self) -> &'static str {
        match self.keys.is_empty() {
            true => "{}",
            false => "}",
        }
    }
}

/// Whether a function may have this name.
pub fn is_name(name: &str) -> bool {
    let valid = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    (1..=128).contains(&name.len()) && name.chars().all(valid)
}

/// Key and value of the pair that `text` begins with, and where it ends: `Some(None)` if it is not complete, `None` if there is none.
fn pair(text: &str) -> Option<Option<(&str, &str, usize)>> {
    let Some(after) = after(text, KEY.0)? else {
        return Some(None);
    };
    let Some((key, rest)) = after.split_once(KEY.1) else {
        return Some(None);
    };
    let value = self::after(rest, VALUE.0)?;
    let found = value.and_then(|value| value.split_once(VALUE.1));
    Some(found.map(|(value, rest)| (key.trim(), value, text.len() - rest.len())))
}

/// The text after `tag`, with which `text` begins; `Some(None)` if it may yet, `None` if it does not.
fn after<'t>(text: &'t str, tag: &str) -> Option<Option<&'t str>> {
    let text = text.trim_start();
    match text.strip_prefix(tag) {
        Some(rest) => Some(Some(rest)),
        None => tag.starts_with(text).then_some(None),
    }
}

/// The JSON of a value. Templates write strings as they are, and other values as JSON.
fn json_of(tool: Option<&Tool>, key: &str, value: &str) -> Value {
    let types = tool.and_then(|tool| {
        let property = tool.parameters.get("properties")?.get(key)?;
        types(property.as_object()?)
    });
    let Ok(json) = serde_json::from_str::<Value>(value.trim()) else {
        return value.into();
    };
    let Some(types) = types else {
        return json;
    };
    let names = |name: &str| types.contains(&name);
    let fits = match &json {
        Value::Null => names("null"),
        Value::Bool(_) => names("boolean"),
        Value::Number(n) => names("number") || !n.is_f64() && names("integer"),
        // A string has no quotes, so these belong to it.
        Value::String(_) => false,
        Value::Array(_) => names("array"),
        Value::Object(_) => names("object"),
    };
    match names("string") && !fits {
        true => value.into(),
        false => json,
    }
}

/// The types that a schema allows; `None` if it does not tell.
fn types(schema: &Map<String, Value>) -> Option<Vec<&str>> {
    match schema.get("type") {
        Some(Value::String(one)) => return Some(vec![one]),
        Some(Value::Array(several)) => return several.iter().map(Value::as_str).collect(),
        _ => {}
    }
    let any = schema.get("anyOf").or_else(|| schema.get("oneOf"))?;
    let of_each = any.as_array()?.iter().map(|one| types(one.as_object()?));
    Some(of_each.collect::<Option<Vec<_>>>()?.concat())
}
