//! Provides the settings, functions, filters and tests that templates rely on, as in transformers.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use super::{json, print, python};

/// Depth of nested calls.
const MAX_RECURSION: usize = 64;

/// The message of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Raised(pub String);

/// An environment in which a template may take `fuel` steps.
pub fn environment(fuel: u64) -> Environment<'static> {
    let mut environment = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    if let Ok(syntax) = syntax.trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax);
    }
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_fuel(Some(fuel));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_formatter(print::print);
    environment.set_unknown_method_callback(python::call_method);
    minijinja_contrib::add_to_environment(&mut environment);
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            let error = Error::new(ErrorKind::InvalidOperation, message.clone());
            Err(error.with_source(Raised(message)))
        },
    );
    environment.add_function("strftime_now", |format: String| strftime_now(&format));
    environment.add_function(python::MODULO, python::modulo);
    environment.add_filter(
        "tojson",
        |value: Value, given: Rest<Value>, named: Kwargs| json::to_json(&value, &given, &named),
    );
    environment.add_test("sequence", |value: Value| python::is_sequence(&value));
    environment.add_test("callable", |value: Value| value.kind() == ValueKind::Plain);
    environment
}

/// The local time, formatted by strftime.
fn strftime_now(format: &str) -> Result<String, Error> {
    let now = jiff::ZonedDateTime::now();
    jiff::fmt::strtime::format(format, &now)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}
