//! Draws progress bars on stderr if it is a terminal that can move its cursor.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use colibri_uring::model::Runner;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::output::pluralize::pluralize;
use crate::cli::output::terminal;

/// A bar over bytes.
pub fn bytes(total: u64) -> ProgressBar {
    late(
        total,
        "{bar:32} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
        String::new(),
    )
}

/// A bar over steps, with a message. It is visible at once, and its spinner moves during a step.
pub fn steps(total: u64) -> ProgressBar {
    let template = "{spinner} {bar:32} {pos} of {len}, {elapsed}: {msg}";
    let bar = hidden(total, template);
    if terminal::moves(&io::stderr()) {
        show(&bar);
        bar.tick();
    }
    bar
}

/// A bar over the prompt's `tokens` tokens, which `runner` is about to compute.
pub fn reading(runner: &mut Runner, tokens: usize) -> ProgressBar {
    /// The resolution that the bar shows.
    const PARTS: u64 = 100_000;
    let bar = late(
        PARTS,
        "{bar:32} {percent_precise}% of {msg}, {eta} left",
        pluralize(tokens, "token"),
    );
    let observed = bar.clone();
    runner.observe(move |progress| {
        // The runner also reports tokens after the prompt.
        if !observed.is_finished() {
            let share = progress.done as f64 / progress.all as f64;
            observed.set_position((share * PARTS as f64) as u64);
        }
    });
    bar
}

/// A bar over tokens.
pub fn tokens(total: u64) -> ProgressBar {
    late(
        total,
        "{bar:32} {pos} of {msg}, {eta} left",
        pluralize(total, "token"),
    )
}

/// A spinner with a message.
pub fn spinner(message: String) -> ProgressBar {
    late(0, "{spinner} {msg}", message)
}

/// A bar that appears after half a second, so that short work shows none.
fn late(total: u64, template: &str, message: String) -> ProgressBar {
    const PATIENCE: Duration = Duration::from_millis(500);
    let bar = hidden(total, template).with_message(message);
    if terminal::moves(&io::stderr()) {
        after(PATIENCE, &bar, show);
    }
    bar
}

/// A bar that is not drawn yet.
fn hidden(total: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Draws a bar five times per second, on another thread.
fn show(bar: &ProgressBar) {
    bar.set_draw_target(ProgressDrawTarget::stderr());
    bar.enable_steady_tick(Duration::from_millis(200));
}

/// Calls `act` after `wait`, unless the bar is finished or dropped by then.
fn after(
    wait: Duration,
    bar: &ProgressBar,
    act: impl FnOnce(&ProgressBar) + Send + 'static,
) -> JoinHandle<()> {
    let bar = bar.downgrade();
    thread::spawn(move || {
        thread::sleep(wait);
        // A bar that finishes right now draws nothing any more.
        if let Some(bar) = bar.upgrade().filter(|bar| !bar.is_finished()) {
            act(&bar);
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_finished_bar_is_not_shown() {
        let shown = |bar: &ProgressBar| {
            let (send, shown) = channel();
            let waiting = after(Duration::ZERO, bar, move |_| send.send(()).unwrap());
            waiting.join().unwrap();
            shown.try_recv().is_ok()
        };
        let bar = hidden(1, "{bar}");
        assert!(bar.is_hidden() && shown(&bar));
        bar.finish_and_clear();
        assert!(!shown(&bar));
    }
}
