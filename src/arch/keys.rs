//! Reads keys of a JSON object with type and range checks; errors name file, key and value.

use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use super::ConfigError;
use crate::stand_in::StandIn;

/// No real config comes near; a larger file is refused unread.
const MAX_FILE: u64 = 16 << 20;

// Ranges of dimensions: no product of them overflows 64 bits.
pub const MAX_VOCAB: u64 = 1 << 24;
pub const MAX_WIDTH: u64 = 1 << 20;
pub const MAX_RANK: u64 = 1 << 16;
pub const MAX_HEADS: u64 = 1 << 12;
pub const MAX_HEAD_DIM: u64 = 1 << 13;
pub const MAX_LAYERS: u64 = 1 << 10;
pub const MAX_EXPERTS: u64 = 1 << 14;

/// Reads a file that must hold one JSON object.
pub fn read_object(path: &Path) -> Result<Value, ConfigError> {
    if let Some(stand_in) = StandIn::find(path) {
        return Err(ConfigError::StandIn {
            path: path.into(),
            remedy: stand_in.remedy(path),
            stand_in,
        });
    }
    let read = || {
        // Looked at before it is opened: opening a FIFO would wait for a writer.
        if !std::fs::metadata(path)?.is_file() {
            return Err(std::io::Error::other("not a regular file"));
        }
        let mut text = Vec::new();
        let file = std::fs::File::open(path)?;
        file.take(MAX_FILE + 1).read_to_end(&mut text)?;
        if text.len() as u64 > MAX_FILE {
            return Err(std::io::Error::other("larger than 16 MiB"));
        }
        Ok(text)
    };
    let text = read().map_err(|source| ConfigError::Read {
        path: path.into(),
        source,
    })?;
    serde_json::from_slice(&text).map_err(|e| ConfigError::Json {
        path: path.into(),
        reason: format!("not valid JSON: {e}"),
    })
}

/// One JSON object of a file: the whole file, or the object under a key of it.
pub struct Keys<'a> {
    path: &'a Path,
    /// Dotted prefix of the keys in messages, empty at the top.
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    pub fn new(path: &'a Path, value: &'a Value) -> Result<Keys<'a>, ConfigError> {
        let map = value.as_object().ok_or_else(|| ConfigError::Json {
            path: path.into(),
            reason: "not a JSON object".into(),
        })?;
        Ok(Keys {
            path,
            prefix: String::new(),
            map,
        })
    }

    /// The object under `key`, which must be one.
    pub fn nested(&self, key: &str, value: &'a Value) -> Result<Keys<'a>, ConfigError> {
        let map = value
            .as_object()
            .ok_or_else(|| self.wrong_type(key, "an object"))?;
        Ok(Keys {
            path: self.path,
            prefix: format!("{}{key}.", self.prefix),
            map,
        })
    }

    pub fn find(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key)
    }

    /// All keys with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
        self.map.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value under `key`, unless it is null.
    pub fn given(&self, key: &str) -> Option<&'a Value> {
        self.find(key).filter(|value| !value.is_null())
    }

    /// The first of `keys` that is given, else the last: names of one thing.
    pub fn first_of(&self, keys: &[&'static str]) -> &'static str {
        let given = keys.iter().find(|key| self.given(key).is_some());
        given.or(keys.last()).copied().unwrap_or_default()
    }

    /// Refuses any other value than `supported` under `key`; absent and null pass.
    pub fn only(&self, key: &str, supported: &Value) -> Result<(), ConfigError> {
        let Some(value) = self.given(key) else {
            return Ok(());
        };
        let (same, right_type, expected) = match supported {
            Value::String(_) => (value == supported, value.is_string(), "a string"),
            Value::Bool(_) => (value == supported, value.is_boolean(), "true or false"),
            _ => {
                let same = value.as_f64() == supported.as_f64();
                (same, value.is_number(), "a number")
            }
        };
        match (same && right_type, right_type) {
            (true, _) => Ok(()),
            (_, false) => Err(self.wrong_type(key, expected)),
            _ => {
                let text = supported.as_str().map(str::to_owned);
                let text = text.unwrap_or_else(|| supported.to_string());
                Err(self.unsupported(key, text))
            }
        }
    }

    pub fn required(&self, key: &str) -> Result<&'a Value, ConfigError> {
        self.find(key).ok_or_else(|| ConfigError::Missing {
            path: self.path.into(),
            key: self.name(key),
        })
    }

    /// An integer in `min..=max`; absent is `default`, or an error where there is none.
    pub fn int(
        &self,
        key: &str,
        min: u64,
        max: u64,
        default: Option<usize>,
    ) -> Result<usize, ConfigError> {
        match (self.find(key), default) {
            (None, Some(default)) => Ok(default),
            _ => Ok(self.check_int(key, self.required(key)?, min, max)? as usize),
        }
    }

    /// Checks one integer that was found under `key`, itself or as an element of a list.
    pub fn check_int(
        &self,
        key: &str,
        value: &Value,
        min: u64,
        max: u64,
    ) -> Result<u64, ConfigError> {
        match value.as_u64() {
            Some(n) if (min..=max).contains(&n) => Ok(n),
            // An integer that is negative or does not fit 64 bits is out of range, not of another type.
            _ if value.as_u64().is_some() || value.as_i64().is_some() || is_whole(value) => {
                Err(self.range_of(key, value, format!("{min} to {max}")))
            }
            _ => Err(self.type_of(key, value, "an integer")),
        }
    }

    /// A finite number in `min..=max`; absent is `default`, or an error where there is none.
    pub fn float(
        &self,
        key: &str,
        min: f64,
        max: f64,
        default: Option<f64>,
    ) -> Result<f64, ConfigError> {
        let value = match (self.find(key), default) {
            (None, Some(default)) => return Ok(default),
            _ => self.required(key)?,
        };
        match value.as_f64() {
            Some(x) if (min..=max).contains(&x) => Ok(x),
            Some(_) => Err(self.range_of(key, value, format!("{min} to {max}"))),
            None => Err(self.type_of(key, value, "a number")),
        }
    }

    pub fn bool(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.find(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(value) => Err(self.type_of(key, value, "true or false")),
        }
    }

    /// The value under `key` is of the wrong type.
    pub fn wrong_type(&self, key: &str, expected: &'static str) -> ConfigError {
        self.type_of(key, self.find(key).unwrap_or(&Value::Null), expected)
    }

    /// The value under `key` is outside its range.
    pub fn range(&self, key: &str, allowed: String) -> ConfigError {
        self.range_of(key, self.find(key).unwrap_or(&Value::Null), allowed)
    }

    /// The value under `key` is not implemented.
    pub fn unsupported(&self, key: &str, supported: String) -> ConfigError {
        self.unsupported_of(key, self.find(key).unwrap_or(&Value::Null), supported)
    }

    /// An element of the list under `key` is not implemented.
    pub fn unsupported_of(&self, key: &str, value: &Value, supported: String) -> ConfigError {
        ConfigError::Unsupported {
            path: self.path.into(),
            key: self.name(key),
            value: shorten(value),
            supported,
        }
    }

    fn type_of(&self, key: &str, value: &Value, expected: &'static str) -> ConfigError {
        ConfigError::Type {
            path: self.path.into(),
            key: self.name(key),
            value: shorten(value),
            expected,
        }
    }

    fn range_of(&self, key: &str, value: &Value, allowed: String) -> ConfigError {
        ConfigError::Range {
            path: self.path.into(),
            key: self.name(key),
            value: shorten(value),
            allowed,
        }
    }

    fn name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
}

/// JSON integers beyond 64 bits are parsed as floats without a fraction.
fn is_whole(value: &Value) -> bool {
    value.as_f64().is_some_and(|x| x.abs() >= 2f64.powi(63))
}

/// The value as JSON, cut so that a message stays one readable line.
fn shorten(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
