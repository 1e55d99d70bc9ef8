//! `profile` at a terminal: somebody who waits wants to know for what, and for how long.

use crate::child::on_model;
use crate::common::Saved;
use crate::pty::Terminal;

#[test]
fn what_is_to_be_done_is_said_before_it_is() {
    let args = ["--engine", "pread", "--queue-depth", "1", "2"];
    let args = [&args[..], &["--seconds", "0.06"]].concat();
    let dirs = Saved::named("bf16-shared").dirs;
    let mut terminal = Terminal::start(on_model("profile", &dirs, &args));
    terminal.expect("runs of 0.06 s");
    // The first run is on its way, and nothing is done yet.
    terminal.expect("0 of ");
    terminal.expect("pread of ");
    terminal.expect("MiB/s");
    assert!(terminal.end().success(), "{}", terminal.seen);
}

#[test]
fn without_a_time_all_runs_together_take_half_a_minute() {
    let dirs = Saved::named("bf16-shared").dirs;
    // 2 sizes, 16 depths, pread alone. A quarter of each comes before it.
    let depths: Vec<String> = (1..=16).map(|depth| depth.to_string()).collect();
    let depths: Vec<&str> = depths.iter().map(String::as_str).collect();
    let args = ["--engine", "pread", "--block-size", "4KiB", "8KiB"];
    let args = [&args[..], &["--queue-depth"], &depths].concat();
    let mut terminal = Terminal::start(on_model("profile", &dirs, &args));
    terminal.expect("32 runs of 0.75 s, some 30 s in all");
    // Ctrl-C: that is enough.
    terminal.write("\x03");
    assert!(!terminal.end().success());
}
