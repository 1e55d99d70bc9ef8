//! Holds log lines back while stdout, on the same terminal or file as stderr, has an unfinished line.

use std::io::{self, Write};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use rustix::fs::fstat;

/// The unfinished line of stdout.
#[derive(Debug, Default)]
struct OpenLine {
    open: bool,
    /// Log lines that wait for its end.
    held: Vec<u8>,
}

static LINE: Mutex<OpenLine> = Mutex::new(OpenLine {
    open: false,
    held: Vec::new(),
});

fn line() -> MutexGuard<'static, OpenLine> {
    LINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether stdout has an unfinished line where stderr writes, too.
pub fn is_open() -> bool {
    line().open
}

/// Whether stdout and stderr are the same terminal, file or pipe.
fn shared() -> bool {
    static SHARED: LazyLock<bool> = LazyLock::new(|| {
        let found = |file: Result<rustix::fs::Stat, _>| file.ok().map(|s| (s.st_dev, s.st_ino));
        let out = found(fstat(io::stdout()));
        out.is_some() && out == found(fstat(io::stderr()))
    });
    *SHARED
}

/// Notes that stdout got `text`. At the end of a line the log lines that waited are written.
pub fn printed(text: &str) {
    if text.is_empty() || !shared() {
        return;
    }
    let mut line = line();
    line.open = !text.ends_with('\n');
    if !line.open {
        // A closed stderr is not an error.
        let _ = io::stderr().write_all(&line.held);
        line.held.clear();
    }
}

/// Writes a log line to stderr, or holds it back.
pub fn log(text: &[u8]) -> io::Result<()> {
    let mut line = line();
    match line.open {
        true => line.held.write_all(text),
        false => io::stderr().write_all(text),
    }
}
