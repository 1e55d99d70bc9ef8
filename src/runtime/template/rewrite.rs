//! Rewrites what published templates use and the engine lacks: `{% generation %}` blocks, and the operator `%` of texts.

use super::lexer::{Kind, Tag, Token, tags};
use super::python::MODULO;

/// The template in the language of the engine. Replaces `{% generation %}` blocks, which mark text for training, by blocks without effect,
/// and `a % b` by a call of [`MODULO`].
pub fn for_engine(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut at = 0;
    for tag in tags(source) {
        let Some(inner) = replacement(&tag, &source[tag.inner.clone()]) else {
            continue;
        };
        out += &source[at..tag.inner.start];
        out += &inner;
        at = tag.inner.end;
    }
    out + &source[at..]
}

/// The new content of a tag.
fn replacement(tag: &Tag, inner: &str) -> Option<String> {
    match &tag.tokens[..] {
        [word] if tag.statement && word.is("generation") => {
            Some(inner.replace("generation", "if true"))
        }
        [word] if tag.statement && word.is("endgeneration") => {
            Some(inner.replace("endgeneration", "endif"))
        }
        tokens if tokens.iter().any(|token| token.is("%")) => Some(with_calls(tokens, inner)),
        _ => None,
    }
}

/// The content of a tag, with a call for each operator `%`.
fn with_calls(tokens: &[Token], inner: &str) -> String {
    let mut tokens = tokens.to_vec();
    let (mut from, mut changed) = (0, false);
    // Each call is an operand of the operators after it.
    while let Some(at) = tokens[from..].iter().position(|token| token.is("%")) {
        let at = from + at;
        from = at + 1;
        let left = left_operand(&tokens, at);
        // The engine computes with numbers.
        let number = at - left == 1 && tokens[left].kind == Kind::Number;
        let (Some(right), false) = (right_operand(&tokens, at + 1), number || left == at) else {
            continue;
        };
        let other = |text| Token {
            kind: Kind::Operator,
            text,
        };
        let bracket = |kind, text| Token { kind, text };
        tokens[at] = other(",");
        tokens.insert(right, bracket(Kind::Close, ")"));
        tokens.insert(left, bracket(Kind::Open, "("));
        tokens.insert(
            left,
            Token {
                kind: Kind::Name,
                text: MODULO,
            },
        );
        from += 2;
        changed = true;
    }
    if !changed {
        return inner.to_owned();
    }
    let texts: Vec<&str> = tokens.iter().map(|token| token.text).collect();
    let text = texts.join(" ");
    // Error messages name lines.
    let lines = |text: &str| text.matches('\n').count();
    let lost = "\n".repeat(lines(inner).saturating_sub(lines(&text)));
    format!(" {text}{lost} ")
}

/// Whether an operand may end with this token.
fn ends_operand(token: &Token) -> bool {
    match token.kind {
        Kind::Name => !token.is_keyword(),
        Kind::Number | Kind::Text | Kind::Close => true,
        Kind::Open | Kind::Operator => false,
    }
}

/// Operators that bind as tightly as `%`, or more.
const TIGHT: [&str; 6] = ["*", "/", "//", "**", ".", "|"];

/// The first token of the operand that ends before `at`: factors up to an operator that binds less.
fn left_operand(tokens: &[Token], at: usize) -> usize {
    let (mut start, mut depth) = (at, 0usize);
    while start > 0 {
        let token = &tokens[start - 1];
        let attribute = start >= 2 && tokens[start - 2].is(".");
        match token.kind {
            Kind::Close => depth += 1,
            Kind::Open if depth == 0 => break,
            Kind::Open => depth -= 1,
            _ if depth > 0 => {}
            Kind::Name if token.is_keyword() && !attribute => break,
            Kind::Operator if token.is("-") || token.is("+") => {
                let unary = start < 2 || !ends_operand(&tokens[start - 2]);
                if !unary {
                    break;
                }
            }
            Kind::Operator if !TIGHT.contains(&token.text) => break,
            _ => {}
        }
        start -= 1;
    }
    start
}

/// The end of the operand that begins at `at`: a factor with what is called on it.
fn right_operand(tokens: &[Token], mut at: usize) -> Option<usize> {
    let is = |at: usize, text: &str| tokens.get(at).is_some_and(|token| token.is(text));
    loop {
        while is(at, "-") || is(at, "+") {
            at += 1;
        }
        match tokens.get(at)?.kind {
            Kind::Open => at = after_bracket(tokens, at)?,
            Kind::Text => {
                while tokens.get(at).is_some_and(|token| token.kind == Kind::Text) {
                    at += 1;
                }
            }
            Kind::Name | Kind::Number => at += 1,
            Kind::Close | Kind::Operator => return None,
        }
        loop {
            if is(at, "(") || is(at, "[") {
                at = after_bracket(tokens, at)?;
            } else if is(at, ".") || is(at, "|") {
                at += 2;
            } else {
                break;
            }
        }
        if !is(at, "**") {
            return Some(at.min(tokens.len()));
        }
        at += 1;
    }
}

/// The token after the bracket that closes the one at `at`.
fn after_bracket(tokens: &[Token], at: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (i, token) in tokens.iter().enumerate().skip(at) {
        match token.kind {
            Kind::Open => depth += 1,
            Kind::Close => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(i + 1);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_blocks_have_no_effect() {
        let source = "{%- generation -%} a {%+endgeneration%}{{ '{% generation %}' }}{% raw %}{% generation %}{% endraw %}";
        let expected = "{%- if true -%} a {%+endif%}{{ '{% generation %}' }}{% raw %}{% generation %}{% endraw %}";
        assert_eq!(for_engine(source), expected);
    }

    #[test]
    fn a_modulo_has_the_operands_of_jinja2() {
        for (expression, expected) in [
            ("'%s' % x", "M ( '%s' , x )"),
            (
                "1 + a.b * c % -d.e[0]|f(1) + 2",
                "1 + M ( a . b * c , - d . e [ 0 ] | f ( 1 ) ) + 2",
            ),
            ("a % b % c", "M ( M ( a , b ) , c )"),
            (
                "x ~ 'a' 'b' % (1, 2) ~ y",
                "x ~ M ( 'a' 'b' , ( 1 , 2 ) ) ~ y",
            ),
            ("f(g % 2) == -h % 3", "f ( M ( g , 2 ) ) == M ( - h , 3 )"),
            ("a - b % c", "a - M ( b , c )"),
        ] {
            let source = format!("{{{{ {expression} }}}}");
            let expected = format!("{{{{ {} }}}}", expected.replace('M', MODULO));
            let found = for_engine(&source)
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ");
            assert_eq!(found, expected, "{expression}");
        }
        for unchanged in [
            "{{ 7 % 3 }}",
            "{{ '%s' }}",
            "a % b",
            "{# a % b #}",
            "{{ % }}",
            "{{ a % }}",
        ] {
            assert_eq!(for_engine(unchanged), unchanged);
        }
    }
}
