//! Limits what a grammar may cost, so that a hostile one ends in an error.

use llguidance::api::ParserLimits;
use serde_json::Value;

use super::Grammar;

/// Longest token in bytes. A longer one is never chosen.
pub const TOKEN: usize = 1000;
/// Longest grammar in bytes.
const TEXT: usize = 256 << 10;
/// Longest regular expression in bytes.
const REGEX: usize = 16 << 10;
/// Deepest schema.
const DEPTH: usize = 64;
/// Keywords that bound a number.
const BOUNDS: [&str; 5] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];
/// Largest bound of a number.
const LARGEST: f64 = (1u64 << 53) as f64;
/// Stack of the thread that compiles, in bytes. The compiler recurses along chains of `$ref`.
const STACK: usize = 64 << 20;

/// Limits of compiling, and of the work for one token.
pub fn parser() -> ParserLimits {
    ParserLimits {
        // Otherwise errors have the whole text and grammar.
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Refuses what is too large to compile.
pub fn check(grammar: &Grammar) -> Result<(), String> {
    let (bytes, most) = match grammar {
        Grammar::JsonObject => return Ok(()),
        Grammar::JsonSchema(schema) => {
            if schema.get("x-guidance").is_some() {
                return Err("x-guidance is not supported: it can switch off checks".into());
            }
            if depth(schema) > DEPTH {
                return Err(format!("it is nested deeper than {DEPTH} levels"));
            }
            numbers(schema)?;
            (schema.to_string().len(), TEXT)
        }
        Grammar::Regex(text) => (text.len(), REGEX),
        Grammar::Lark(text) => (text.len(), TEXT),
    };
    match bytes > most {
        true => Err(format!(
            "it has {bytes} bytes, and at most {most} are allowed"
        )),
        false => Ok(()),
    }
}

/// Refuses bounds that the compiler, which counts in i64, does not tell from others.
fn numbers(schema: &Value) -> Result<(), String> {
    match schema {
        Value::Array(items) => items.iter().try_for_each(numbers),
        Value::Object(members) => members.iter().try_for_each(|(key, value)| {
            let bound = BOUNDS.contains(&key.as_str());
            match value.as_f64() {
                Some(number) if bound && number.abs() > LARGEST => Err(format!(
                    "{key} of {value} is not supported: bounds are within 2^53"
                )),
                _ => numbers(value),
            }
        }),
        _ => Ok(()),
    }
}

fn depth(value: &Value) -> usize {
    let inner = match value {
        Value::Array(items) => items.iter().map(depth).max(),
        Value::Object(members) => members.values().map(depth).max(),
        _ => return 0,
    };
    1 + inner.unwrap_or(0)
}

/// Runs on a thread with a large stack.
///
/// # Errors
/// The thread cannot be started, or it panicked.
pub fn with_stack<T: Send>(run: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK);
        let thread = thread.spawn_scoped(scope, run);
        let thread = thread.map_err(|error| format!("no thread can be started: {error}"))?;
        thread.join().map_err(|_| "the compiler failed".to_owned())
    })
}

/// An error of the library in one line, without its backtrace, in words that do not name the library's options.
pub fn one_line(error: impl std::fmt::Display) -> String {
    let text = error.to_string();
    let text = text.split("<backtrace>").next().unwrap_or_default();
    let words: Vec<&str> = text.split_whitespace().take(60).collect();
    let text = words.join(" ");
    let other = [
        ("Unimplemented keys", "unsupported keywords"),
        (
            "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
            "oneOf is not supported where options may overlap: use anyOf",
        ),
        (
            "Only absolute $ref's (#/...) are supported without 'referencing' feature; ref",
            "a $ref is supported within the schema only (#/...), not",
        ),
    ];
    (other.iter()).fold(text, |text, (from, to)| text.replace(from, to))
}
