//! Wrong usage, `doctor` and `inspect`: exit codes, one error line, one JSON object.

use std::process::Stdio;

use serde_json::Value;

use crate::common::Saved;
use crate::process::{colibri, error_of, finish, stderr};

/// Runs the binary, which must fail with one line, and returns that line.
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
fn wrong_usage_shows_the_usage_of_the_command() {
    let model = Saved::named("bf16-shared").dirs[0].display().to_string();
    let mirrors = ["--mirror", "/", "--mirror-weights", "1"];
    for (command, args, why) in [
        ("decode", &[][..], "no prompt"),
        (
            "decode",
            &["--prompt-ids", "1", "--system", "s"],
            "--system needs --chat",
        ),
        (
            "decode",
            &[&["--prompt-ids", "1"][..], &mirrors].concat(),
            "has 1 weight, and there are 2 drives",
        ),
        (
            "mirror bench",
            &mirrors,
            "has 1 weight, and there are 2 drives",
        ),
    ] {
        let mut colibri = colibri();
        colibri.args(command.split(' ')).args(["--model", &model]);
        colibri.args(args).stdin(Stdio::null());
        let output = finish(colibri);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.starts_with("error: ") && said.contains(why), "{said}");
        assert!(
            said.contains(&format!("Usage: colibri-uring {command} ")),
            "{said}"
        );
    }
}

#[test]
fn a_negative_number_is_refused_as_a_value() {
    for (args, why) in [
        (
            &["decode", "--temperature", "-1"][..],
            "a temperature is a number, 0 or more",
        ),
        (&["chat", "--top-p", "-0.5"], "a probability is more than 0"),
        (&["decode", "-n", "-1"], "'-1' for '-n <N>'"),
        (
            &["profile", "--seconds", "-1"],
            "a time is a number of seconds",
        ),
        (
            &["profile", "--queue-depth", "1", "-2"],
            "'-2' for '--queue-depth",
        ),
    ] {
        let mut command = colibri();
        command.args(args);
        let output = finish(command);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(why), "{said}");
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
fn a_missing_model_is_one_line() {
    let line = error_line(&["inspect", "--model", "/nonexistent/model"]);
    assert!(line.contains("/nonexistent/model"), "{line}");
    let line = error_line(&["inspect", "--model", "/nonexistent/model", "--json"]);
    assert!(line.contains("/nonexistent/model"), "{line}");
}

#[test]
fn doctor_runs_all_checks_and_never_fails() {
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
            "advice if and only if it is not ok: {check}"
        );
        assert!(!check["found"].as_str().unwrap().is_empty());
    }
    assert_eq!(report["ok"], checks.iter().all(|c| c["ok"] == true));
    assert_eq!(checks[5]["details"]["dir"], dir.path().to_str().unwrap());
}

#[test]
fn doctor_warns_of_a_missing_directory() {
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
