//! Finds the variables that a template reads, and reads the values that a user gives them.

use minijinja::value::Value;

use super::environment::environment;
use super::lexer::{Kind, Tag, tags};
use super::python::MODULO;

/// Names that are not variables of a caller: functions, and what the program sets.
const FUNCTIONS: [&str; 11] = [
    "range",
    "dict",
    "debug",
    "namespace",
    "cycler",
    "joiner",
    "raise_exception",
    "strftime_now",
    "loop",
    "caller",
    MODULO,
];
/// Variables that only the program sets.
pub const OWN: [&str; 2] = ["messages", "add_generation_prompt"];

/// The variables that a template in the language of the engine may read, sorted.
pub fn read_by(program: &str) -> Vec<String> {
    let source = for_analysis(program);
    let environment = environment(0);
    let Ok(template) = environment.template_from_str(&source) else {
        return Vec::new();
    };
    let tags = tags(program);
    let mut names: Vec<String> = (template.undeclared_variables(false).into_iter())
        .filter(|name| !FUNCTIONS.contains(&name.as_str()) && !OWN.contains(&name.as_str()))
        .filter(|name| reads_first(&tags, name))
        .collect();
    names.sort_unstable();
    names
}

/// Whether the template reads a variable before it sets it. The engine's analysis also has variables that only some branches set.
fn reads_first(tags: &[Tag], name: &str) -> bool {
    for tag in tags {
        let is = |at: usize, text: &str| tag.tokens.get(at).is_some_and(|token| token.is(text));
        let sets = tag.statement && is(0, "set") && is(1, name) && !is(2, ".");
        let reads = (usize::from(sets) * 2..tag.tokens.len()).any(|at| {
            let attribute = at > 0 && is(at - 1, ".");
            is(at, name) && !attribute && !is(at + 1, "=")
        });
        if sets || reads {
            return reads;
        }
    }
    false
}

/// The template, with all reads that the engine's analysis misses: of `x` in `set x = x` and in `x[1:]`.
fn for_analysis(program: &str) -> String {
    let (mut out, mut at) = (String::with_capacity(program.len()), 0);
    for tag in tags(program) {
        out += &program[at..tag.range.start];
        for name in missed(&tag) {
            out += &format!("{{{{ {name} }}}}");
        }
        at = tag.range.start;
    }
    out + &program[at..]
}

/// Names that a tag reads before it sets them, or of which it takes a slice.
fn missed<'s>(tag: &Tag<'s>) -> Vec<&'s str> {
    let tokens = &tag.tokens;
    let is = |at: usize, text: &str| tokens.get(at).is_some_and(|token| token.is(text));
    let sets = |at: usize| tag.statement && is(0, "set") && is(2, "=") && at > 2;
    let missed = (0..tokens.len()).filter(|&at| {
        let name = tokens[at].kind == Kind::Name && !tokens[at].is_keyword();
        let name = name && !(at > 0 && is(at - 1, "."));
        let itself = sets(at) && tokens[at].text == tokens[1].text && !is(at + 1, "=");
        name && (itself || is(at + 1, "["))
    });
    missed.map(|at| tokens[at].text).collect()
}

/// Whether the template has this text in quotes.
pub fn has_text(source: &str, text: &str) -> bool {
    let mut texts = tags(source).into_iter().flat_map(|tag| tag.tokens);
    texts.any(|token| token.unquoted() == Some(text))
}

/// The value that a user means: JSON, a word for a truth value or none in any spelling, or a text. A word that the template itself has in
/// quotes is a text.
pub fn value(text: &str, source: &str) -> Value {
    // Not by a JSON value, which would sort keys.
    if let Ok(value) = serde_json::from_str::<Value>(text) {
        return value;
    }
    let word = match text.to_ascii_lowercase().as_str() {
        "true" | "on" | "yes" => Value::from(true),
        "false" | "off" | "no" => Value::from(false),
        "none" | "null" => Value::from(()),
        _ => return Value::from(text),
    };
    match has_text(source, text) {
        true => Value::from(text),
        false => word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_found_where_they_are_read() {
        for (source, names) in [
            (
                "{{ a.b }}{% if c is defined and not d %}{% endif %}",
                "a c d",
            ),
            ("{% set a = a | default(1) %}{{ a }}", "a"),
            ("{% set a = a if a is defined else 1 %}", "a"),
            (
                "{% if not a is defined %}{% set a = 1 %}{% endif %}{{ a }}",
                "a",
            ),
            ("{% set n = 0 %}{% set n = n + 1 %}{{ n }}", ""),
            (
                "{% for m in messages[1:] %}{{ m[2:] }}{{ loop.index }}{% endfor %}",
                "",
            ),
            (
                "{% for x in documents[:3] %}{{ x }}{% endfor %}",
                "documents",
            ),
            (
                "{% macro f(x, y=z) %}{{ x ~ y ~ w }}{% endmacro %}{{ f(v) }}",
                "v w z",
            ),
            (
                "{% set ns = namespace(k=k) %}{{ ns.k ~ '%s' % u }}{{ raise_exception(strftime_now('x')) }}",
                "k u",
            ),
            ("{# a #}{% raw %}{{ b }}{% endraw %}{{ 'c' }}", ""),
        ] {
            let program = super::super::rewrite::for_engine(source);
            assert_eq!(read_by(&program).join(" "), names, "{source}");
        }
    }

    #[test]
    fn variables_that_only_branches_set_are_not_the_callers() {
        let source = "{% if messages %}{% set a = f(a=1) %}{% endif %}{{ a ~ c.a }}";
        assert_eq!(read_by(source), ["c", "f"]);
    }

    #[test]
    fn brackets_after_a_keyword_are_no_slice() {
        assert!(read_by("{% for x in [1] if x not in [2] %}{{ x }}{% endfor %}").is_empty());
    }

    #[test]
    fn a_value_is_what_people_mean() {
        let none = Value::from(());
        for (text, expected) in [
            ("false", Value::from(false)),
            ("False", Value::from(false)),
            ("FALSE", Value::from(false)),
            ("off", Value::from(false)),
            ("no", Value::from(false)),
            ("True", Value::from(true)),
            ("on", Value::from(true)),
            ("Yes", Value::from(true)),
            ("None", none.clone()),
            ("null", none),
            ("low", Value::from("low")),
            ("", Value::from("")),
            ("7", Value::from(7)),
            ("\"off\"", Value::from("off")),
            ("[1]", Value::from(vec![1])),
        ] {
            assert_eq!(value(text, "{{ x }}"), expected, "{text}");
        }
        let source = "{% if x == 'off' or x in [\"None\"] %}{% endif %}";
        assert_eq!(value("off", source), Value::from("off"));
        assert_eq!(value("None", source), Value::from("None"));
        assert_eq!(value("Off", source), Value::from(false));
        let keys = value(r#"{"b": 1, "a": 2}"#, "");
        assert_eq!(keys.to_string(), "{'b': 1, 'a': 2}");
    }
}
