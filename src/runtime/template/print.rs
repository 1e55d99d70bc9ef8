//! How values are printed: as the template engine does, but for those that contain themselves.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, escape_formatter};

/// Deeper is nothing that a template means to print.
const MAX_DEPTH: usize = 128;
/// A list may have another one twice, and that one a third one, and so on: then there are more values than memory holds.
const MAX_VALUES: usize = 1 << 20;

/// Writes a value.
///
/// # Errors
/// That it has no end.
pub fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    if !ends(value, MAX_DEPTH, &mut 0) {
        let why = "a value cannot be printed: it contains itself, or too many others";
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    }
    escape_formatter(out, state, value)
}

/// Whether a value has at most `depth` levels, and not too many values in them, of which `seen` were before it.
fn ends(value: &Value, depth: usize, seen: &mut usize) -> bool {
    *seen += 1;
    let kind = value.kind();
    let contains = matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::Iterable);
    // What does not know its length is printed without its elements, which can be had only once.
    if !contains || value.len().is_none() {
        return true;
    }
    if depth == 0 || *seen > MAX_VALUES {
        return false;
    }
    let Ok(mut items) = value.try_iter() else {
        return true;
    };
    items.all(|item| {
        let inner = match kind {
            ValueKind::Map => value.get_item(&item).unwrap_or_default(),
            _ => item,
        };
        ends(&inner, depth - 1, seen)
    })
}
