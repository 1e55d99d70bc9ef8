//! Runs the binary and checks how it ends.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;

use crate::child;

/// A run on a fixture that takes longer hangs.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The binary. It writes neither to fixtures nor to the home directory.
pub fn colibri() -> Command {
    let mut command = child::colibri();
    command.env("COLIBRI_NO_USAGE", "1");
    command.env("COLIBRI_NO_KV", "1");
    command
}

/// `command --model dirs... args...`
pub fn on_model(command: &str, dirs: &[PathBuf], args: &[&str]) -> Command {
    let mut colibri = colibri();
    colibri.arg(command).arg("--model").args(dirs).args(args);
    colibri
}

/// Runs the command, which must exit within the timeout.
pub fn finish(command: Command) -> Output {
    let what = format!("{command:?}");
    let output = assert_cmd::Command::from_std(command)
        .timeout(TIMEOUT)
        .output()
        .unwrap();
    assert!(
        output.status.code().is_some(),
        "{what}: {}: {}",
        output.status,
        stderr(&output)
    );
    output
}

/// The stderr of a run, filtered by [`complaints`].
pub fn stderr(output: &Output) -> String {
    complaints(&String::from_utf8_lossy(&output.stderr))
}

/// Removes the lines about limits of this machine. They depend on other tests: all processes of a user share the limit on
/// locked memory.
pub fn complaints(text: &str) -> String {
    const OF_THE_MACHINE: [&str; 2] = ["registered with io_uring", "reading with pread"];
    let of_the_machine = |line: &&str| OF_THE_MACHINE.iter().any(|part| line.contains(part));
    let lines = text.split_inclusive('\n');
    lines.filter(|line| !of_the_machine(line)).collect()
}

/// Returns the JSON object of a run, which must succeed.
#[track_caller]
pub fn json_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the error line of a run, which must fail.
#[track_caller]
pub fn error_of(output: &Output) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(output.stdout.is_empty(), "{text}");
    assert!(text.starts_with("error: "), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// Returns the JSON object or the error line of a run, which must end with one of them.
#[track_caller]
pub fn error_or_json(output: &Output) -> Result<Value, String> {
    match output.status.code() {
        Some(0) => Ok(json_of(output)),
        _ => Err(error_of(output)),
    }
}

/// Joins ids with commas.
pub fn list(ids: &[u32]) -> String {
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    ids.join(",")
}
