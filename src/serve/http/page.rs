//! Assembles the chat page from its sources, and the Content-Security-Policy that allows nothing else.

use std::sync::LazyLock;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use sha2::{Digest, Sha256};

const MARKUP: &str = include_str!("page/index.html");
const STYLE: &str = include_str!("page/style.css");
// One module: a source uses what those before it declare.
const SCRIPT: &str = concat!(
    include_str!("page/markdown.js"),
    include_str!("page/answer.js"),
    include_str!("page/engine.js"),
    include_str!("page/chat.js"),
    include_str!("page/page.js"),
);

/// The page, a single HTML document.
static HTML: LazyLock<String> = LazyLock::new(|| {
    MARKUP
        .replace("/*STYLE*/", STYLE)
        .replace("/*SCRIPT*/", SCRIPT)
});

/// Value of the page's Content-Security-Policy: its own style and script, and requests to its own server.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "default-src 'none'; style-src {}; script-src {}; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        source_hash(STYLE),
        source_hash(SCRIPT)
    )
});

/// Answers `/`.
pub async fn handle() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Another version of the program has another page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, HTML.as_str()).into_response()
}

fn source_hash(text: &str) -> String {
    format!("'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_in_the_page_as_the_policy_allows_them() {
        for (open, source, close) in [
            ("<style>", STYLE, "</style>"),
            ("<script type=\"module\">", SCRIPT, "</script>"),
        ] {
            assert!(HTML.contains(&format!("{open}{source}{close}")), "{open}");
            assert!(!source.contains(close), "{close} would end {open}");
            assert!(POLICY.contains(&source_hash(source)));
        }
        assert!(
            POLICY.bytes().all(|byte| (b' '..=b'~').contains(&byte)),
            "a header's value is one line of ASCII"
        );
    }

    #[test]
    fn page_refers_to_no_other_host() {
        let text = HTML.replace("http://www.w3.org/2000/svg", "");
        assert!(!text.contains("http://") && !text.contains("https://") && !text.contains("url("));
    }
}
