//! Prints results to stdout: JSON, text, and tokens as they are generated.

use std::io::{self, IsTerminal, Write};

use anyhow::Context;
use colibri_uring::runtime::tokenizer::{TextStream, Tokenizer};

use super::open_line;

const STDOUT: &str = "cannot write to the standard output";

/// Writes a result to the standard output and flushes it. The error names the standard output.
pub fn to_stdout(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let written = write(&mut out).and_then(|()| out.flush());
    written.context(STDOUT)
}

/// Prints the one JSON object of `--json`.
pub fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    // Serialise everything first: stdout never gets half an object.
    let mut json = serde_json::to_vec(value)?;
    json.push(b'\n');
    to_stdout(|out| out.write_all(&json))
}

/// Prints each token at once: its text, or its id without a tokenizer.
pub struct Printer<'a, W> {
    out: W,
    stream: Option<TextStream<'a>>,
    empty: bool,
    terminal: bool,
    /// Whether the output is stdout, and not a sink.
    stdout: bool,
}

impl<'a, W: Write> Printer<'a, W> {
    pub fn new(out: W, tokenizer: Option<&'a Tokenizer>) -> Printer<'a, W> {
        Printer {
            out,
            stream: tokenizer.map(Tokenizer::stream),
            empty: true,
            terminal: false,
            stdout: false,
        }
    }

    /// Marks the output as stdout, so that log lines wait for the end of its lines. On a terminal, control characters are escaped, so
    /// that a model cannot control it.
    pub fn on_stdout(mut self) -> Printer<'a, W> {
        self.stdout = true;
        self.terminal = io::stdout().is_terminal();
        self
    }

    /// Prints the whole characters that one more token completes.
    pub fn token(&mut self, id: u32) -> anyhow::Result<()> {
        let text = match &mut self.stream {
            Some(stream) => stream.push(id)?,
            None if self.empty => id.to_string(),
            None => format!(" {id}"),
        };
        self.empty = false;
        self.print(&text)
    }

    /// Prints incomplete characters and ends the line.
    pub fn finish(mut self) -> anyhow::Result<()> {
        let held_back = self.stream.take().map(TextStream::finish).transpose()?;
        self.print(&(held_back.unwrap_or_default() + "\n"))
    }

    /// Ends an unfinished line where the error that ended the text is about to be printed.
    pub fn abandon(mut self) {
        if self.stdout && open_line::is_open() {
            // The error that ended the text is reported, not this one.
            let _ = self.print("\n");
        }
    }

    /// Prints a text and flushes.
    pub fn print(&mut self, text: &str) -> anyhow::Result<()> {
        let written = write_text(&mut self.out, text, self.terminal);
        let flushed = written.and_then(|()| self.out.flush()).context(STDOUT);
        if self.stdout {
            open_line::printed(text);
        }
        flushed
    }
}

/// Writes text. For a terminal, replaces control characters other than newline and tab by their Unicode pictures.
fn write_text(out: &mut impl Write, text: &str, terminal: bool) -> io::Result<()> {
    if !terminal || text.chars().all(harmless) {
        return out.write_all(text.as_bytes());
    }
    let text: String = text.chars().map(shown).collect();
    out.write_all(text.as_bytes())
}

fn harmless(c: char) -> bool {
    !c.is_control() || matches!(c, '\n' | '\t')
}

/// Replaces a control character other than newline and tab by its Unicode picture.
pub fn shown(c: char) -> char {
    match c {
        c if harmless(c) => c,
        '\u{7f}' => '\u{2421}',
        // U+2400 to U+241F are the pictures of U+0000 to U+001F.
        c => char::from_u32(0x2400 + u32::from(c))
            .filter(|_| c < ' ')
            .unwrap_or(char::REPLACEMENT_CHARACTER),
    }
}

/// The standard output, locked.
pub fn stdout() -> Box<dyn Write> {
    Box::new(io::stdout().lock())
}

/// Discards tokens: `--json` prints one object at the end.
pub fn nowhere() -> Box<dyn Write> {
    Box::new(io::sink())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_separated_by_spaces() {
        let mut out = Vec::new();
        let mut printer = Printer::new(&mut out, None);
        for id in [3, 14, 159] {
            printer.token(id).unwrap();
        }
        printer.finish().unwrap();
        assert_eq!(out, b"3 14 159\n");
    }

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        let text = "a\x1b[2J\r\n\tb\u{7f}\u{9b}é";
        let written = |terminal| {
            let mut out = Vec::new();
            write_text(&mut out, text, terminal).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(written(false), text);
        assert_eq!(written(true), "a␛[2J␍\n\tb␡\u{fffd}é");
    }

    #[test]
    fn a_closed_pipe_is_an_error_that_main_recognises() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let error = Printer::new(Closed, None).token(3).unwrap_err();
        assert!(crate::cli::output::error::is_closed_pipe(&error));
    }
}
