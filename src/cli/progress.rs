//! Progress on stderr; nothing where that is no terminal, or one that cannot move its cursor.

use std::io;
use std::time::Duration;

use colibri_uring::model::Session;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::terminal;

/// A bar over a number of bytes.
pub fn bytes(total: u64) -> ProgressBar {
    bar(
        total,
        "{bar:32} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
    )
}

/// A bar over a number of steps, with a message. It moves while a step takes its time.
pub fn steps(total: u64) -> ProgressBar {
    let template = "{spinner} {bar:32} {pos} of {len}, {elapsed}: {msg}";
    moving(total, template, String::new())
}

/// A bar over a prompt of `tokens` tokens that `session` is going to read.
pub fn reading(session: &mut Session, tokens: usize) -> ProgressBar {
    /// As fine as is shown.
    const PARTS: u64 = 100_000;
    let bar = moving(
        PARTS,
        "{bar:32} {percent_precise}% of {msg} tokens, {eta} left",
        tokens.to_string(),
    );
    let observed = bar.clone();
    session.observe(move |progress| {
        // What is computed after the prompt is nobody's progress.
        if !observed.is_finished() {
            let share = progress.done as f64 / progress.all as f64;
            observed.set_position((share * PARTS as f64) as u64);
        }
    });
    bar
}

/// A bar over a number of tokens.
pub fn tokens(total: u64) -> ProgressBar {
    moving(
        total,
        "{bar:32} {pos} of {len} tokens, {eta} left",
        String::new(),
    )
}

/// Something that takes a while.
pub fn spinner(message: String) -> ProgressBar {
    moving(0, "{spinner} {msg}", message)
}

fn bar(total: u64, template: &str) -> ProgressBar {
    let target = match terminal::moves(&io::stderr()) {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(total), target);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// A bar that is there at once, and drawn by a thread of its own.
fn moving(total: u64, template: &str, message: String) -> ProgressBar {
    let bar = bar(total, template).with_message(message);
    bar.tick();
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
