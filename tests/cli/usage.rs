//! The command line as a user or a script meets it: exit codes, one error line, one JSON object.

use std::process::Stdio;

use serde_json::Value;

use crate::child::{colibri, error_of, finish, stderr};
use crate::common::Saved;

/// Runs it and expects exit 1, nothing on stdout and one line on stderr, which is returned.
fn error_line(args: &[&str]) -> String {
    let mut command = colibri();
    command.args(args);
    error_of(&finish(command))
}

#[test]
fn wrong_usage_is_exit_code_2() {
    let wrong: &[&[&str]] = &[
        &["fly"],
        &["convert"],
        &["inspect", "--model"],
        &["doctor", "--sideways"],
    ];
    for args in wrong {
        let output = colibri().args(*args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn help_and_version_are_exit_code_0() {
    for args in [
        &["--help"][..],
        &["inspect", "--help"],
        &["doctor", "--help"],
    ] {
        let output = colibri().args(args).output().unwrap();
        assert!(output.status.success());
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(help.contains("Usage: colibri-uring"), "{help}");
    }
    assert!(
        colibri()
            .arg("--version")
            .output()
            .unwrap()
            .status
            .success()
    );
}

#[test]
fn a_model_that_is_not_there_is_one_line() {
    let line = error_line(&["inspect", "--model", "/nonexistent/model"]);
    assert!(line.contains("/nonexistent/model"), "{line}");
    let line = error_line(&["inspect", "--model", "/nonexistent/model", "--json"]);
    assert!(line.contains("/nonexistent/model"), "{line}");
}

#[test]
fn doctor_looks_at_everything_and_never_fails() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.safetensors"), [0; 8192]).unwrap();
    let output = colibri()
        .arg("doctor")
        .arg(dir.path())
        .arg("--json")
        .output()
        .unwrap();
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let names: Vec<&str> = checks.iter().map(|c| c["name"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "kernel",
            "io_uring",
            "memlock",
            "huge pages",
            "descriptors",
            "O_DIRECT",
            "cpu",
            "memory"
        ]
    );
    for check in checks {
        let ok = check["ok"].as_bool().unwrap();
        assert_eq!(
            ok,
            check["advice"].is_null(),
            "advice exactly where it is needed: {check}"
        );
        assert!(!check["found"].as_str().unwrap().is_empty());
    }
    assert_eq!(report["ok"], checks.iter().all(|c| c["ok"] == true));
    assert_eq!(checks[5]["details"]["dir"], dir.path().to_str().unwrap());
}

#[test]
fn doctor_warns_of_a_directory_that_is_not_there() {
    let output = colibri()
        .args(["doctor", "/nonexistent/dir"])
        .output()
        .unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text
        .lines()
        .find(|l| l.contains("/nonexistent/dir"))
        .unwrap();
    assert!(line.starts_with("warn"), "{line}");
}

#[test]
fn flags_come_from_the_environment_too() {
    let dir = &Saved::named("bf16-shared").dirs[0];
    let output = colibri()
        .arg("doctor")
        .env("COLIBRI_MODEL", dir)
        .env("COLIBRI_JSON", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["checks"][5]["details"]["dir"], dir.to_str().unwrap());
}

#[test]
fn inspect_counts_shards_and_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let header = br#"{"model.layers.0.mlp.experts.0.up_proj.weight":{"dtype":"BF16","shape":[2,4],"data_offsets":[0,16]},
        "model.norm.weight":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.extend_from_slice(&[0; 32]);
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    let output = colibri()
        .arg("inspect")
        .arg("--json")
        .arg("--model")
        .arg(dir.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["shards"], 1);
    assert_eq!(report["tensors"], 2);
    assert_eq!(report["bytes"], 32);
    assert_eq!(report["expert_bytes"], 16);
    assert_eq!(report["formats"]["BF16"]["tensors"], 1);
    assert!(report["index_seconds"].as_f64().unwrap() >= 0.0);
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = colibri()
        .arg("doctor")
        .stdout(Stdio::from(writer))
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(stderr(&output), "");
    assert!(output.status.success());
}
