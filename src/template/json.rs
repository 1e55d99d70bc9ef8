//! The filter `tojson`, as templates know it from Python: spaces after commas and colons, nothing escaped for HTML.

use std::io;

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// More is for no human and no model.
const MAX_INDENT: usize = 16;
/// A small value may contain others so often that all the memory there is does not hold its text.
const MAX_BYTES: usize = 64 << 20;

/// `value` as JSON. Of the keyword arguments `indent` is used; that others are given is no error.
pub fn to_json(value: &Value, options: &Kwargs) -> Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?;
    for known in ["ensure_ascii", "separators", "sort_keys"] {
        let _ = options.get::<Option<Value>>(known);
    }
    options.assert_all_used()?;
    let mut out = Limited(Vec::new());
    let written = match indent {
        Some(width) => {
            let spaces = " ".repeat(width.min(MAX_INDENT));
            let pretty = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, pretty))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)),
    };
    let failed = |error: &dyn std::fmt::Display| {
        Error::new(ErrorKind::BadSerialization, format!("tojson: {error}"))
    };
    written.map_err(|error| failed(&error))?;
    String::from_utf8(out.0).map_err(|error| failed(&error))
}

/// Takes [`MAX_BYTES`] and no more.
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len().saturating_add(bytes.len()) > MAX_BYTES {
            return Err(io::Error::other("too much text"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `{"a": 1, "b": [2, 3]}`
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        separate(out, first)
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        separate(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

fn separate<W: ?Sized + io::Write>(out: &mut W, first: bool) -> io::Result<()> {
    match first {
        true => Ok(()),
        false => out.write_all(b", "),
    }
}
