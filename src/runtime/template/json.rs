//! Implements the filter `tojson` like Python: spaces after commas and colons, no HTML escapes.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Spaces for a level.
const MAX_INDENT: usize = 16;
/// A small value may contain others so often that all the memory there is does not hold its text.
const MAX_BYTES: usize = 64 << 20;
const MAX_DEPTH: usize = 128;

/// `value` as JSON. Of the keyword arguments `indent` is used; that others are given is no error.
pub fn to_json(value: &Value, options: &Kwargs) -> Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?;
    for known in ["ensure_ascii", "separators", "sort_keys"] {
        let _ = options.get::<Option<Value>>(known);
    }
    options.assert_all_used()?;
    let mut writer = Writer {
        out: String::new(),
        indent: indent.map(|width| width.min(MAX_INDENT)),
    };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer {
    out: String,
    /// Spaces for a level; `None` is all in one line.
    indent: Option<usize>,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH || self.out.len() > MAX_BYTES {
            return Err(failed("the value is too large"));
        }
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.out += "null",
            ValueKind::Bool => self.out += if value.is_true() { "true" } else { "false" },
            ValueKind::Number => self.out += &value.to_string(),
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => self.items(value, depth, None)?,
            ValueKind::Map => self.items(value, depth, Some(value))?,
            kind => return Err(failed(&format!("a {kind} has no JSON"))),
        }
        Ok(())
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        self.out += &serde_json::to_string(text).map_err(|error| failed(&error.to_string()))?;
        Ok(())
    }

    /// The elements of a list, or the keys and values of a map.
    fn items(&mut self, value: &Value, depth: usize, map: Option<&Value>) -> Result<(), Error> {
        let brackets = if map.is_some() {
            ['{', '}']
        } else {
            ['[', ']']
        };
        self.out.push(brackets[0]);
        let mut any = false;
        for item in value.try_iter()? {
            if any {
                self.out.push(',');
            }
            match self.indent {
                None if any => self.out.push(' '),
                _ => self.line(depth + 1),
            }
            any = true;
            let Some(map) = map else {
                self.value(&item, depth + 1)?;
                continue;
            };
            self.string(&item.to_string())?;
            self.out += ": ";
            self.value(&map.get_item(&item)?, depth + 1)?;
        }
        if any {
            self.line(depth);
        }
        self.out.push(brackets[1]);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(width) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', width * depth));
        }
    }
}

fn failed(what: &str) -> Error {
    Error::new(ErrorKind::BadSerialization, format!("tojson: {what}"))
}
