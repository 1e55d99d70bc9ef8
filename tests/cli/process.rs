//! Runs the binary, and says what became of it.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;

/// Nothing on a fixture takes as long, so that what does hangs.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The binary, in an environment that configures nothing but that fixtures, and the home directory, stay as they are.
pub fn colibri() -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("colibri-uring"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("COLIBRI_")) {
        command.env_remove(name);
    }
    command.env_remove("RUST_LOG");
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

/// Runs it to its end, which must come in time.
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

/// What it said on stderr, of which [`complaints`] remain.
pub fn stderr(output: &Output) -> String {
    complaints(&String::from_utf8_lossy(&output.stderr))
}

/// The lines without those about what this machine denies to anybody: no test but the one about it can expect or
/// exclude them. (The limit on locked memory is one for all processes of a user, and tests run at the same time.)
pub fn complaints(text: &str) -> String {
    const OF_THE_MACHINE: [&str; 2] = ["registered with io_uring", "reading with pread"];
    let of_the_machine = |line: &&str| OF_THE_MACHINE.iter().any(|part| line.contains(part));
    let lines = text.split_inclusive('\n');
    lines.filter(|line| !of_the_machine(line)).collect()
}

/// The one JSON object of a run that must succeed.
#[track_caller]
pub fn json_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The one line of a run that must fail.
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

/// Either of the two: what must hold whatever a file contains.
#[track_caller]
pub fn error_or_json(output: &Output) -> Result<Value, String> {
    match output.status.code() {
        Some(0) => Ok(json_of(output)),
        _ => Err(error_of(output)),
    }
}

/// Ids as a flag takes them.
pub fn list(ids: &[u32]) -> String {
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    ids.join(",")
}
