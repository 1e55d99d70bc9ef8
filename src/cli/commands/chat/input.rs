//! Where the lines of a conversation come from: a person at a terminal, or a script.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, BufRead, IsTerminal, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Behavior, Completer, Config, Editor, Helper, Highlighter, Hinter};

use crate::cli::args::prompt::Utf8;
use crate::cli::interrupt;

#[derive(Debug, PartialEq, Eq)]
pub enum Input {
    /// A message or command, possibly of several lines, without the last newline.
    Line(String),
    /// Ctrl-C.
    Interrupted,
    /// End of input.
    End,
}

/// The source of lines.
pub enum Lines {
    /// With line editing and history.
    Terminal(Box<Terminal>),
    /// The standard input; the number of lines read so far.
    Piped(usize),
}

impl Lines {
    pub fn open() -> Lines {
        match io::stdin().is_terminal() {
            // Without line editing, read plain lines.
            true => Terminal::open().map_or(Lines::Piped(0), |t| Lines::Terminal(Box::new(t))),
            false => Lines::Piped(0),
        }
    }

    /// Whether the input is a terminal.
    pub fn interactive(&self) -> bool {
        matches!(self, Lines::Terminal(_))
    }

    /// The next message or command.
    pub fn next(&mut self) -> anyhow::Result<Input> {
        let next = match self {
            Lines::Terminal(terminal) => terminal.next(),
            Lines::Piped(read) => continued(&mut io::stdin().lock(), read),
        };
        next.context("cannot read the standard input")
    }
}

/// A terminal with line editing.
pub struct Terminal {
    editor: Editor<Backslash, DefaultHistory>,
    history: Option<PathBuf>,
}

/// A line that ends with a backslash is not complete.
#[derive(Completer, Helper, Highlighter, Hinter)]
struct Backslash;

impl Validator for Backslash {
    fn validate(&self, context: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        Ok(match context.input().ends_with('\\') {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Terminal {
    fn open() -> Option<Terminal> {
        // The line editor turns off echo and line mode.
        interrupt::restore_mode_at_end().ok()?;
        let behavior = match io::stdout().is_terminal() {
            true => Behavior::Stdio,
            // Answers go to a file; show the typed text on the terminal.
            false => Behavior::PreferTerm,
        };
        let config = Config::builder()
            .behavior(behavior)
            .auto_add_history(true)
            .build();
        let mut editor = Editor::with_config(config).ok()?;
        editor.set_helper(Some(Backslash));
        let history = match history_file() {
            Ok(path) => path,
            Err(error) => {
                tracing::warn!("your lines are not saved: {error:#}");
                None
            }
        };
        if let Some(path) = &history
            && let Err(error) = editor.load_history(path)
        {
            tracing::warn!("cannot read {}: {error}", path.display());
        }
        Some(Terminal { editor, history })
    }

    fn next(&mut self) -> io::Result<Input> {
        match self.editor.readline("> ") {
            Ok(line) => {
                // After each line, so that no exit loses one. `open` has warned if the file cannot be written.
                if let Some(path) = &self.history {
                    let _ = self.editor.append_history(path);
                }
                Ok(Input::Line(line.replace("\\\n", "\n")))
            }
            Err(ReadlineError::Eof) => Ok(Input::End),
            Err(ReadlineError::Interrupted) => Ok(Input::Interrupted),
            Err(ReadlineError::Io(error)) => Err(error),
            Err(error) => Err(io::Error::other(error.to_string())),
        }
    }
}

/// `colibri-uring/history` in the user's state directory, readable by the user only; `None` without a home.
fn history_file() -> anyhow::Result<Option<PathBuf>> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|p| p.is_absolute())
    };
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    let Some(dir) = state.map(|state| state.join("colibri-uring")) else {
        return Ok(None);
    };
    let path = dir.join("history");
    let make = || {
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        let mut options = OpenOptions::new();
        let file = options.append(true).create(true).mode(0o600).open(&path)?;
        // An existing file may have a wider mode.
        match file.metadata()?.permissions().mode() & 0o077 {
            0 => Ok(()),
            _ => fs::set_permissions(&path, PermissionsExt::from_mode(0o600)),
        }
    };
    let made: io::Result<()> = make();
    made.with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Some(path))
}

/// Longer than any context.
const MAX_LINE: u64 = 64 << 20;

/// Reads lines up to one that does not end with a backslash. Counts them in `number`.
fn continued(from: &mut impl BufRead, number: &mut usize) -> io::Result<Input> {
    let mut text = String::new();
    loop {
        let mut bytes = Vec::new();
        let room = MAX_LINE.saturating_sub(text.len() as u64);
        from.take(room).read_until(b'\n', &mut bytes)?;
        *number += 1;
        if bytes.len() as u64 == room {
            return Err(io::Error::other(format!("line {number} is too long")));
        }
        let ended = bytes.is_empty();
        let Utf8(line) = Utf8::try_from(bytes)
            .map_err(|why| io::Error::other(format!("line {number} {why}")))?;
        let line = line.strip_suffix('\n').unwrap_or(&line);
        let line = line.strip_suffix('\r').unwrap_or(line);
        match line.strip_suffix('\\') {
            Some(part) => {
                text += part;
                text.push('\n');
            }
            None if ended && text.is_empty() => return Ok(Input::End),
            None => return Ok(Input::Line(text + line)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backslash_continues_a_line() {
        let mut text = &b"one\ntwo\\\nand\\\nthree\r\n\nlast"[..];
        let mut all = Vec::new();
        let mut read = 0;
        while let Input::Line(line) = continued(&mut text, &mut read).unwrap() {
            all.push(line);
        }
        assert_eq!(all, ["one", "two\nand\nthree", "", "last"]);
        assert_eq!(
            continued(&mut &b"a\\"[..], &mut 0).unwrap(),
            Input::Line("a\n".into())
        );
    }

    #[test]
    fn a_line_that_is_no_text_is_located() {
        let mut text = &b"one\ntwo\\\nthree\ncaf\xe9\n"[..];
        let mut read = 0;
        for _ in 0..2 {
            continued(&mut text, &mut read).unwrap();
        }
        let error = continued(&mut text, &mut read).unwrap_err();
        assert_eq!(
            error.to_string(),
            "line 4 is not UTF-8 text: byte 0xe9 at offset 3"
        );
    }
}
