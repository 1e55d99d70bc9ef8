//! Turns an error into one line, and names the flags where the library names its own options.

use std::io::{self, Write};

use super::open_line;
use super::printer::shown;

/// Whether the reader of the output is gone, as with `| head -1`.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let kind = error.chain().find_map(|cause| {
        let io = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        // serde_json wraps the error of the writer.
        io.or_else(|| {
            cause
                .downcast_ref::<serde_json::Error>()
                .and_then(serde_json::Error::io_error_kind)
        })
    });
    kind == Some(io::ErrorKind::BrokenPipe)
}

/// Longest error line, in characters.
const LONGEST: usize = 4000;

/// Remedies of the library, and the flags that apply them.
const FLAGS: [(&str, &str); 3] = [
    ("EngineKind::Pread", "--engine pread"),
    ("DirectMode::Off", "--direct off"),
    ("ChatTemplate::from_file", "--chat-template FILE"),
];

/// Replaces the library's options by the flags that set them.
fn with_flags(text: String) -> String {
    let replaced = |text: String, (term, flag): &(&str, &str)| text.replace(term, flag);
    FLAGS.iter().fold(text, replaced)
}

/// Writes log lines to stderr, with flags as in errors, and never into an unfinished line of stdout. The logger writes a line at once.
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = with_flags(String::from_utf8_lossy(line).into_owned());
        open_line::log(text.as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Joins the error and its causes in one line. Skips a cause that the message before it ends with.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if line.is_empty() {
            line = text;
        } else if !line.ends_with(&text) {
            line = format!("{line}: {text}");
        }
    }
    let line = with_flags(line);
    // The text may come from a file, and a terminal obeys control characters.
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    let shown: String = line.chars().take(LONGEST).map(shown).collect();
    match line.chars().nth(LONGEST) {
        Some(_) => shown + " ...",
        None => shown,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn an_error_is_one_line_without_repetition() {
        let io = io::Error::other("disk on\nfire");
        let error = Err::<(), _>(io)
            .context("cannot read a: disk on\nfire")
            .context("cannot load the model")
            .unwrap_err();
        assert_eq!(
            one_line(&error),
            "cannot load the model: cannot read a: disk on fire"
        );
    }

    #[test]
    fn a_remedy_of_the_library_becomes_a_flag() {
        let refused = colibri_ring::KernelError {
            call: colibri_ring::KernelCall::Enter,
            errno: 11,
        };
        let line = one_line(&refused.into());
        assert!(line.contains("(--engine pread)"), "{line}");
    }

    #[test]
    fn a_closed_pipe_is_recognised_behind_context_and_json() {
        let pipe = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_closed_pipe(
            &anyhow::Error::from(pipe()).context("cannot write")
        ));
        assert!(is_closed_pipe(&serde_json::Error::io(pipe()).into()));
        assert!(!is_closed_pipe(&io::Error::other("x").into()));
    }
}
