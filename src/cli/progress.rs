//! Progress on stderr; nothing where that is no terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over a number of bytes.
pub fn bytes(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    let template = "{bar:32} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// A bar over a number of steps, with a message. It moves while a step takes its time.
pub fn steps(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    let template = "{spinner} {bar:32} {pos} of {len}, {elapsed}: {msg}";
    let bar = match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    };
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Something that takes a while.
pub fn spinner(message: String) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(message);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
