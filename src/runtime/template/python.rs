//! Implements methods and operators of Python's types that the engine lacks or that differ.

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

/// The function that computes `a % b`.
pub const MODULO: &str = "__modulo";

/// `left % right`: the remainder, or `left` formatted with the values of `right`.
///
/// # Errors
/// A division by zero, and operands that have no remainder.
pub fn modulo(state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    if left.as_str().is_some() {
        let values = match right.downcast_object_ref::<Tuple>() {
            Some(values) => values.to_vec(),
            None => vec![right],
        };
        return state.apply_filter("format", &[vec![left], values].concat());
    }
    let integers = || Some((integer(&left)?, integer(&right)?));
    let remainder = match integers() {
        Some((_, 0)) => None,
        // The sign is that of the divisor.
        Some((a, b)) => a.checked_rem(b).map(|r| {
            Value::from(match r != 0 && (r < 0) != (b < 0) {
                true => r + b,
                false => r,
            })
        }),
        None => match (f64::try_from(left.clone()), f64::try_from(right.clone())) {
            (Ok(a), Ok(b)) if b != 0.0 => Some(Value::from(a - b * (a / b).floor())),
            _ => None,
        },
    };
    let (a, b) = (left.kind(), right.kind());
    remainder.ok_or_else(|| wrong(&format!("tried to use % operator on {a} and {b}")))
}

fn integer(value: &Value) -> Option<i128> {
    let whole = value.is_integer() || value.kind() == ValueKind::Bool;
    i128::try_from(value.clone()).ok().filter(|_| whole)
}

/// Whether `value` has elements by position or key, for which Python's text, list, tuple and dict all count.
pub fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::Map | ValueKind::String
    )
}

/// Calls a method of a value.
pub fn call_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let found = match value.as_str() {
        Some(text) => method_of_text(text, method, args),
        None if value.kind() == ValueKind::Seq && method == "index" => {
            let (what,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *what);
            Ok(Some(Value::from(
                at.ok_or_else(|| wrong("the list lacks the value"))?,
            )))
        }
        None => Ok(None),
    };
    match found? {
        Some(result) => Ok(result),
        None => unknown_method_callback(state, value, method, args),
    }
}

/// Longest text that a method pads to.
const MAX_WIDTH: usize = 1 << 16;

/// A method of `text`; `None` if the engine has it.
fn method_of_text(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let absent = || wrong("the text lacks the substring");
    let result = match method {
        "partition" | "rpartition" => {
            let (at,): (&str,) = from_args(args)?;
            if at.is_empty() {
                return Err(wrong("empty separator"));
            }
            let (found, parts) = match method {
                "partition" => (text.split_once(at), [text, "", ""]),
                _ => (text.rsplit_once(at), ["", "", text]),
            };
            let parts = found.map_or(parts, |(before, after)| [before, at, after]);
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "split" | "rsplit" => split(text, method == "rsplit", args)?,
        "startswith" | "endswith" if args.len() > 1 => {
            let (what, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
            method_with(slice(text, start, end).1, method, what)?
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            let (before, part) = slice(text, start, end);
            let found = match method.starts_with('r') {
                true => part.rfind(what),
                false => part.find(what),
            };
            match found.map(|at| before + part[..at].chars().count()) {
                Some(at) => Value::from(at),
                None if method.ends_with("find") => Value::from(-1),
                None => return Err(absent()),
            }
        }
        "ljust" | "rjust" | "center" | "zfill" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            Value::from(padded(text, method, width, fill.unwrap_or(' '))?)
        }
        "title" => Value::from(title(text)),
        "casefold" => Value::from(text.to_lowercase()),
        "swapcase" => {
            let swap = |c: char| match c.is_uppercase() {
                true => c.to_lowercase().collect::<String>(),
                false => c.to_uppercase().collect(),
            };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        "isdecimal" => Value::from(!text.is_empty() && text.chars().all(|c| c.is_ascii_digit())),
        _ => return Ok(None),
    };
    Ok(Some(result))
}

/// `startswith` or `endswith` of a text, with one text or a tuple of them.
fn method_with(text: &str, method: &str, what: &Value) -> Result<Value, Error> {
    let fits = |what: &Value| {
        what.as_str().is_some_and(|what| match method {
            "startswith" => text.starts_with(what),
            _ => text.ends_with(what),
        })
    };
    let any = match what.as_str() {
        Some(_) => fits(what),
        None => what.try_iter()?.any(|what| fits(&what)),
    };
    Ok(Value::from(any))
}

/// `split` and `rsplit`: separator and greatest number of splits, by position or name.
fn split(text: &str, from_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (Rest(given), named): (Rest<Value>, Kwargs) = from_args(args)?;
    let at = match given.first() {
        Some(at) => at.clone(),
        None => named.get::<Option<Value>>("sep")?.unwrap_or_default(),
    };
    let most = match given.get(1) {
        Some(most) => i64::try_from(most.clone())?,
        None => named.get::<Option<i64>>("maxsplit")?.unwrap_or(-1),
    };
    named.assert_all_used()?;
    let most = usize::try_from(most).map_or(usize::MAX, |most| most.saturating_add(1));
    let mut parts: Vec<&str> = match at.as_str() {
        Some("") => return Err(wrong("empty separator")),
        Some(at) if from_right => text.rsplitn(most, at).collect(),
        Some(at) => text.splitn(most, at).collect(),
        None if at.is_none() || at.is_undefined() => words(text, most, from_right),
        None => return Err(wrong("the separator is no text")),
    };
    if from_right {
        parts.reverse();
    }
    Ok(Value::from_iter(parts.into_iter().map(Value::from)))
}

/// Up to `most` parts between white space, from the left or from the right. The last one is the rest.
fn words(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let trim = match from_right {
        true => str::trim_end,
        false => str::trim_start,
    };
    let (mut parts, mut rest) = (Vec::new(), trim(text));
    while !rest.is_empty() {
        let found = match from_right {
            _ if parts.len() + 1 >= most => None,
            true => rest.rsplit_once(char::is_whitespace).map(|(a, b)| (b, a)),
            false => rest.split_once(char::is_whitespace),
        };
        let (part, more) = found.unwrap_or((rest, ""));
        parts.push(part);
        rest = trim(more);
    }
    parts
}

/// The characters `start..end` of a text, counted as in Python, and the number of those before them.
fn slice(text: &str, start: Option<i64>, end: Option<i64>) -> (usize, &str) {
    if start.is_none() && end.is_none() {
        return (0, text);
    }
    let length = text.chars().count();
    let place = |at: i64| match usize::try_from(at) {
        Ok(at) => at.min(length),
        Err(_) => length.saturating_sub(usize::try_from(at.unsigned_abs()).unwrap_or(length)),
    };
    let (start, end) = (start.map_or(0, place), end.map_or(length, place));
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(at, _)| at);
    (start, &text[byte(start)..byte(end.max(start))])
}

fn padded(text: &str, method: &str, width: usize, fill: char) -> Result<String, Error> {
    if width > MAX_WIDTH {
        return Err(wrong("the width is too large"));
    }
    let more = width.saturating_sub(text.chars().count());
    let run = |n: usize| fill.to_string().repeat(n);
    Ok(match method {
        "ljust" => text.to_owned() + &run(more),
        "rjust" => run(more) + text,
        // Of an odd number, the one more is on the right, and on the left where the width is odd.
        "center" => {
            let left = more / 2 + (more & width & 1);
            run(left) + text + &run(more - left)
        }
        _ => {
            let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
            let sign = &text[..text.len() - digits.len()];
            format!("{sign}{}{digits}", "0".repeat(more))
        }
    })
}

/// The first letter of each run of letters in upper case, the others in lower case.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut within = false;
    for c in text.chars() {
        match within {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        within = c.is_alphabetic();
    }
    out
}

fn wrong(why: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, why.to_owned())
}
