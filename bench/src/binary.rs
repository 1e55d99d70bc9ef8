//! The `colibri-uring` binary, run as a user runs it.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

/// The binary that was built beside the running program.
///
/// # Errors
/// When there is none, with the command that makes it.
pub fn path() -> anyhow::Result<PathBuf> {
    let here = std::env::current_exe().context("where is this program?")?;
    let binary = here.with_file_name("colibri-uring");
    ensure!(
        binary.exists(),
        "{} is missing: cargo build --release --workspace",
        binary.display()
    );
    Ok(binary)
}

/// What a command that was given `--json` printed.
///
/// # Errors
/// When it fails: what it said.
pub fn json(mut command: Command) -> anyhow::Result<Value> {
    // Runs that are compared must not learn from one another.
    let output = command
        .env("COLIBRI_NO_USAGE", "1")
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", said.trim());
    serde_json::from_slice(&output.stdout).with_context(|| format!("{command:?}: {said}"))
}
