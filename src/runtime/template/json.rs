//! Implements the filter `tojson` with the arguments and the text of Python's `json.dumps`.

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Spaces for a level.
const MAX_INDENT: usize = 16;
/// A small value may contain others so often that all the memory there is does not hold its text.
const MAX_BYTES: usize = 64 << 20;
const MAX_DEPTH: usize = 128;

/// `value` as JSON. The arguments are those of transformers, by name or in this order: `ensure_ascii` (false), `indent`, `separators`,
/// `sort_keys`.
pub fn to_json(value: &Value, given: &Rest<Value>, named: &Kwargs) -> Result<String, Error> {
    let argument = |at: usize, name: &str| -> Result<Value, Error> {
        let by_name = named.get::<Option<Value>>(name)?;
        Ok(by_name.or(given.get(at).cloned()).unwrap_or_default())
    };
    let ascii = argument(0, "ensure_ascii")?.is_true();
    let indent = indent(&argument(1, "indent")?)?;
    let separators = separators(&argument(2, "separators")?, indent.is_some())?;
    let sorted = argument(3, "sort_keys")?.is_true();
    named.assert_all_used()?;
    let mut writer = Writer {
        out: String::new(),
        ascii,
        indent,
        separators,
        sorted,
    };
    writer.value(value, 0)?;
    Ok(writer.out)
}

/// The text before a line, for each level; `None` is all in one line.
fn indent(value: &Value) -> Result<Option<String>, Error> {
    let text = match value.as_str() {
        Some(text) => text.chars().take(MAX_INDENT).collect(),
        None if value.is_none() || value.is_undefined() => return Ok(None),
        None => {
            let spaces = i64::try_from(value.clone())?;
            " ".repeat(usize::try_from(spaces).unwrap_or(0).min(MAX_INDENT))
        }
    };
    Ok(Some(text))
}

/// What is between two items, and between a key and its value.
fn separators(value: &Value, lines: bool) -> Result<[String; 2], Error> {
    if value.is_none() || value.is_undefined() {
        let items = if lines { "," } else { ", " };
        return Ok([items, ": "].map(str::to_owned));
    }
    let texts: Vec<String> = (value.try_iter()?)
        .filter_map(|text| Some(text.as_str()?.to_owned()))
        .collect();
    texts
        .try_into()
        .map_err(|_| failed("separators are two texts"))
}

struct Writer {
    out: String,
    /// Whether to escape all other characters.
    ascii: bool,
    indent: Option<String>,
    separators: [String; 2],
    /// Whether to sort keys.
    sorted: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH || self.out.len() > MAX_BYTES {
            return Err(failed("the value is too large"));
        }
        match value.kind() {
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => self.items(value, depth)?,
            ValueKind::Map => self.entries(value, depth)?,
            kind => match scalar(value) {
                Some(text) => self.out += &text,
                None => return Err(failed(&format!("a {kind} has no JSON"))),
            },
        }
        Ok(())
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        let quoted = serde_json::to_string(text).map_err(|error| failed(&error.to_string()))?;
        if !self.ascii {
            self.out += &quoted;
            return Ok(());
        }
        for c in quoted.chars() {
            match c {
                ' '..='~' => self.out.push(c),
                c => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out += &format!("\\u{unit:04x}");
                    }
                }
            }
        }
        Ok(())
    }

    fn items(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut any = false;
        for item in value.try_iter()? {
            self.next(&mut any, depth);
            self.value(&item, depth + 1)?;
        }
        self.end(any, depth, ']');
        Ok(())
    }

    fn entries(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<(String, Value)> = (value.try_iter()?)
            .map(|key| (scalar(&key).unwrap_or_else(|| key.to_string()), key))
            .collect();
        if self.sorted {
            keys.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.out.push('{');
        let mut any = false;
        for (name, key) in keys {
            self.next(&mut any, depth);
            self.string(&name)?;
            self.out += &self.separators[1];
            self.value(&value.get_item(&key)?, depth + 1)?;
        }
        self.end(any, depth, '}');
        Ok(())
    }

    /// Separates an element from `any` before it.
    fn next(&mut self, any: &mut bool, depth: usize) {
        if std::mem::replace(any, true) {
            self.out += &self.separators[0];
        }
        self.line(depth + 1);
    }

    fn end(&mut self, any: bool, depth: usize, bracket: char) {
        if any {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out += &indent.repeat(depth);
        }
    }
}

/// A number, a truth value or none.
fn scalar(value: &Value) -> Option<String> {
    Some(match value.kind() {
        ValueKind::Undefined | ValueKind::None => "null".to_owned(),
        ValueKind::Bool => value.is_true().to_string(),
        ValueKind::Number => match float(value) {
            Some(number) if number.is_nan() => "NaN".to_owned(),
            Some(number) if number.is_infinite() => {
                let sign = if number < 0.0 { "-" } else { "" };
                format!("{sign}Infinity")
            }
            Some(number) => float_text(number),
            None => value.to_string(),
        },
        _ => return None,
    })
}

/// The value, if it is a number with a decimal point.
pub fn float(value: &Value) -> Option<f64> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    f64::try_from(value.clone()).ok().filter(|_| is_float)
}

/// A finite number as Python writes it: `1.0`, `1e+16`, `1e-07`.
pub fn float_text(number: f64) -> String {
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    match exponent {
        -4..16 => format!("{number:?}"),
        _ => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
        }
    }
}

fn failed(what: &str) -> Error {
    Error::new(ErrorKind::BadSerialization, format!("tojson: {what}"))
}
