//! Tells what a stream can display.

use std::ffi::OsStr;
use std::io::IsTerminal;

/// Whether the cursor can move: the stream is a terminal, and not a dumb one.
pub fn moves(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && understands(std::env::var_os("TERM").as_deref())
}

/// Whether to write colours: the cursor can move and NO_COLOR is unset.
pub fn styled(stream: &impl IsTerminal) -> bool {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !plain && moves(stream)
}

/// Whether a terminal with this `TERM` obeys control characters.
fn understands(term: Option<&OsStr>) -> bool {
    term.is_some_and(|term| !term.is_empty() && term != "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_and_a_dumb_terminal_show_nothing() {
        assert!(!moves(&tempfile::tempfile().unwrap()));
        assert!(understands(Some(OsStr::new("xterm-256color"))));
        for term in [None, Some(OsStr::new("")), Some(OsStr::new("dumb"))] {
            assert!(!understands(term));
        }
    }
}
