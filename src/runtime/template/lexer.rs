//! Splits a template into its tags, and the expressions in them into tokens.

use std::ops::Range;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A name or a keyword.
    Name,
    /// A number.
    Number,
    /// A text, with its quotes.
    Text,
    /// An opening bracket.
    Open,
    /// A closing bracket.
    Close,
    /// Anything else.
    Operator,
}

/// A token of an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token<'s> {
    pub kind: Kind,
    /// As it is written.
    pub text: &'s str,
}

impl<'s> Token<'s> {
    /// Whether it is this operator, bracket, name or keyword.
    pub fn is(&self, text: &str) -> bool {
        self.kind != Kind::Text && self.text == text
    }

    /// Whether it is a keyword or the name of a statement, and so no variable.
    pub fn is_keyword(&self) -> bool {
        const KEYWORDS: [&str; 12] = [
            "if", "elif", "else", "and", "or", "not", "in", "is", "set", "for", "print", "do",
        ];
        self.kind == Kind::Name && KEYWORDS.contains(&self.text)
    }

    /// The text between its quotes, if it is a text.
    pub fn unquoted(&self) -> Option<&'s str> {
        let inner = self.text.get(1..self.text.len().checked_sub(1)?)?;
        (self.kind == Kind::Text).then_some(inner)
    }
}

/// A tag, `{{ expression }}` or `{% statement %}`.
#[derive(Clone, Debug)]
pub struct Tag<'s> {
    /// Its bytes in the template, with its brackets.
    pub range: Range<usize>,
    /// The bytes of its tokens, without marks like the hyphen of `{%-`.
    pub inner: Range<usize>,
    /// Whether it is a statement.
    pub statement: bool,
    pub tokens: Vec<Token<'s>>,
}

/// The tags of a template, in order, without comments and raw blocks. Ends before a tag that is not closed.
pub fn tags(source: &str) -> Vec<Tag<'_>> {
    let (mut tags, mut at, mut raw) = (Vec::new(), 0, false);
    while let Some(found) = source[at..].find('{') {
        let start = at + found;
        let rest = &source[start..];
        if rest.starts_with("{#") && !raw {
            let Some(end) = rest.find("#}") else { break };
            at = start + end + 2;
        } else if rest.starts_with("{%") || rest.starts_with("{{") && !raw {
            let Some(tag) = tag(source, start) else {
                if raw {
                    at = start + 2;
                    continue;
                }
                break;
            };
            let word = |word: &str| tag.statement && tag.tokens.first().is_some_and(|t| t.is(word));
            if raw && !word("endraw") {
                at = start + 2;
                continue;
            }
            raw = word("raw");
            at = tag.range.end;
            tags.push(tag);
        } else {
            at = start + 1;
        }
    }
    tags
}

/// The tag that begins at `start`; `None` if it has no end.
fn tag(source: &str, start: usize) -> Option<Tag<'_>> {
    let statement = source[start..].starts_with("{%");
    let close = if statement { "%}" } else { "}}" };
    let mut at = start + 2;
    if source[at..].starts_with(['-', '+']) {
        at += 1;
    }
    let first = at;
    let (mut tokens, mut depth) = (Vec::new(), 0usize);
    loop {
        let rest = &source[at..];
        let c = rest.chars().next()?;
        let mark = usize::from(matches!(c, '-' | '+'));
        if depth == 0 && rest[mark..].starts_with(close) {
            return Some(Tag {
                range: start..at + mark + 2,
                inner: first..at,
                statement,
                tokens,
            });
        }
        if c.is_whitespace() {
            at += c.len_utf8();
            continue;
        }
        let (kind, length) = token(rest, c)?;
        match kind {
            Kind::Open => depth += 1,
            Kind::Close => depth = depth.saturating_sub(1),
            _ => {}
        }
        tokens.push(Token {
            kind,
            text: &rest[..length],
        });
        at += length;
    }
}

/// The kind and the bytes of the token at the beginning of `rest`; `None` for a text without end.
fn token(rest: &str, first: char) -> Option<(Kind, usize)> {
    let length = |more: &dyn Fn(char) -> bool| rest.find(|c| !more(c)).unwrap_or(rest.len());
    let word = |c: char| c.is_alphanumeric() || c == '_';
    Some(match first {
        '"' | '\'' => (Kind::Text, quoted(rest, first)?),
        '(' | '[' | '{' => (Kind::Open, 1),
        ')' | ']' | '}' => (Kind::Close, 1),
        c if c.is_ascii_digit() => {
            let mut end = length(&word);
            let fraction = rest[end..].strip_prefix('.').unwrap_or_default();
            if fraction.starts_with(|c: char| c.is_ascii_digit()) {
                end += 1 + fraction.find(|c| !word(c)).unwrap_or(fraction.len());
            }
            (Kind::Number, end)
        }
        c if word(c) => (Kind::Name, length(&word)),
        c => {
            let two = ["**", "//", "==", "!=", "<=", ">="];
            let long = two.iter().any(|operator| rest.starts_with(operator));
            (Kind::Operator, if long { 2 } else { c.len_utf8() })
        }
    })
}

/// The bytes of a text, with both quotes.
fn quoted(rest: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_end_outside_of_texts_and_brackets() {
        let source = "a {# {{ no }} #}{{- {'b': {}}['}}'] -}} { x {%+ if c %}{% raw %}{{ no }}{% no %}{% endraw %}{{ 'open";
        let found = tags(source);
        let texts: Vec<_> = found.iter().map(|tag| &source[tag.inner.clone()]).collect();
        assert_eq!(texts, [" {'b': {}}['}}'] ", " if c ", " raw ", " endraw "]);
        assert_eq!(&source[found[0].range.clone()], "{{- {'b': {}}['}}'] -}}");
        let tokens: Vec<_> = found[0].tokens.iter().map(|token| token.text).collect();
        assert_eq!(tokens, ["{", "'b'", ":", "{", "}", "}", "[", "'}}'", "]"]);
    }

    #[test]
    fn tokens_have_kinds() {
        let source = r#"{% set ns.x = 1.5 ** n2|f("a\"b", -3) %}"#;
        let tags = tags(source);
        let kinds: Vec<_> = (tags[0].tokens.iter())
            .map(|token| (token.kind, token.text))
            .collect();
        let expected = [
            (Kind::Name, "set"),
            (Kind::Name, "ns"),
            (Kind::Operator, "."),
            (Kind::Name, "x"),
            (Kind::Operator, "="),
            (Kind::Number, "1.5"),
            (Kind::Operator, "**"),
            (Kind::Name, "n2"),
            (Kind::Operator, "|"),
            (Kind::Name, "f"),
            (Kind::Open, "("),
            (Kind::Text, r#""a\"b""#),
            (Kind::Operator, ","),
            (Kind::Operator, "-"),
            (Kind::Number, "3"),
            (Kind::Close, ")"),
        ];
        assert_eq!(kinds, expected);
    }
}
