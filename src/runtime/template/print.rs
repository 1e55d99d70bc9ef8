//! Prints values like the template engine, but refuses those that contain themselves.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, escape_formatter};

use super::json::{float, float_text};

/// Depth of nesting that is printed.
const MAX_DEPTH: usize = 128;
/// Values that are printed at once. A list that shares elements may contain exponentially many.
const MAX_VALUES: usize = 1 << 20;

/// Writes a value.
///
/// # Errors
/// A value that is endless, too deep or too large.
pub fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    if !ends(value, MAX_DEPTH, &mut 0) {
        let why = "a value cannot be printed: it contains itself, or too many others";
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    }
    match float(value).filter(|number| number.is_finite()) {
        Some(number) => Ok(out.write_str(&float_text(number))?),
        None => escape_formatter(out, state, value),
    }
}

/// Whether a value has at most `depth` levels and, with the `seen` values before it, at most [`MAX_VALUES`] values.
fn ends(value: &Value, depth: usize, seen: &mut usize) -> bool {
    *seen += 1;
    let kind = value.kind();
    let contains = matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::Iterable);
    // Iterators without a length are printed without their elements.
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
