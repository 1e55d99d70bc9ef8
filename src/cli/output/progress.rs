//! Progress on stderr; nothing where that is no terminal, or one that cannot move its cursor.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use colibri_uring::model::Runner;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::output::pluralize::pluralize;
use crate::cli::output::terminal;

/// A bar over a number of bytes.
pub fn bytes(total: u64) -> ProgressBar {
    late(
        total,
        "{bar:32} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
        String::new(),
    )
}

/// A bar over a number of steps, with a message. It is there at once, and moves while a step takes its time.
pub fn steps(total: u64) -> ProgressBar {
    let template = "{spinner} {bar:32} {pos} of {len}, {elapsed}: {msg}";
    let bar = hidden(total, template);
    if terminal::moves(&io::stderr()) {
        show(&bar);
        bar.tick();
    }
    bar
}

/// A bar over a prompt of `tokens` tokens that `runner` is going to compute.
pub fn reading(runner: &mut Runner, tokens: usize) -> ProgressBar {
    /// As fine as is shown.
    const PARTS: u64 = 100_000;
    let bar = late(
        PARTS,
        "{bar:32} {percent_precise}% of {msg}, {eta} left",
        pluralize(tokens, "token"),
    );
    let observed = bar.clone();
    runner.observe(move |progress| {
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
    late(
        total,
        "{bar:32} {pos} of {msg}, {eta} left",
        pluralize(total, "token"),
    )
}

/// Something that takes a while.
pub fn spinner(message: String) -> ProgressBar {
    late(0, "{spinner} {msg}", message)
}

/// A bar that is there when it has been waited for. What is over by then would only flash.
fn late(total: u64, template: &str, message: String) -> ProgressBar {
    const PATIENCE: Duration = Duration::from_millis(500);
    let bar = hidden(total, template).with_message(message);
    if terminal::moves(&io::stderr()) {
        after(PATIENCE, &bar, show);
    }
    bar
}

/// A bar that nobody sees yet.
fn hidden(total: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Shows a bar, and has a thread of its own draw it.
fn show(bar: &ProgressBar) {
    bar.set_draw_target(ProgressDrawTarget::stderr());
    bar.enable_steady_tick(Duration::from_millis(200));
}

/// Does something with a bar after a while, unless it is finished or gone by then.
fn after(
    wait: Duration,
    bar: &ProgressBar,
    act: impl FnOnce(&ProgressBar) + Send + 'static,
) -> JoinHandle<()> {
    let bar = bar.downgrade();
    thread::spawn(move || {
        thread::sleep(wait);
        // One that is finished in this very moment draws nothing any more.
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
    fn a_bar_that_is_finished_is_not_shown() {
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
