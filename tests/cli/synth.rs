//! `synth`: a model out of nothing that every other command takes.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::process::{colibri, error_of, finish, json_of, on_model, stderr};

/// A shape that is made in no time, with a row length that leaves a short last group.
const TINY: &[&str] = &[
    "--layers",
    "4",
    "--dense-layers",
    "1",
    "--hidden",
    "96",
    "--intermediate",
    "128",
    "--moe-intermediate",
    "80",
    "--routed-experts",
    "16",
    "--experts-per-token",
    "2",
    "--heads",
    "4",
    "--q-lora-rank",
    "64",
    "--kv-lora-rank",
    "32",
    "--qk-nope-head-dim",
    "16",
    "--qk-rope-head-dim",
    "16",
    "--v-head-dim",
    "16",
    "--vocab",
    "256",
    "--index-topk",
    "4",
    "--index-head-dim",
    "32",
];

fn synth(dir: &Path, args: &[&str]) -> Command {
    let mut command = colibri();
    command.arg("synth").arg(dir).args(TINY).args(args);
    command
}

fn made(dir: &Path, args: &[&str]) -> Value {
    json_of(&finish(synth(dir, &[args, &["--json"]].concat())))
}

fn on(command: &str, dir: &Path, args: &[&str]) -> Output {
    finish(on_model(command, &[dir.to_path_buf()], args))
}

fn decoded(dir: &Path) -> Value {
    let args = ["--prompt-ids", "1,2,3,4,5,6,7", "-n", "5", "--json"];
    json_of(&on("decode", dir, &args))["token_ids"].clone()
}

fn names(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = names
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn every_format_decodes_and_the_seed_decides() {
    let dir = tempfile::tempdir().unwrap();
    for format in ["int4-g64", "int4", "int8", "int2", "bf16"] {
        let model = dir.path().join(format);
        made(&model, &["--experts-format", format, "--mtp-layer"]);
        assert_eq!(decoded(&model).as_array().unwrap().len(), 5, "{format}");
    }
    let model = |name: &str, args: &[&str]| {
        let model = dir.path().join(name);
        made(&model, args);
        decoded(&model)
    };
    // Threads and shards change no weight.
    let one = model("one", &["--seed", "7"]);
    let again = ["--seed", "7", "--threads", "1", "--shard-size", "20kB"];
    assert_eq!(model("again", &again), one);
    assert!(names(&dir.path().join("again")).len() > 10);
    assert_ne!(model("other", &["--seed", "8"]), one);
}

#[test]
fn holes_read_as_zeros_and_logits_stay_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let (sparse, full) = (dir.path().join("sparse"), dir.path().join("full"));
    let report = made(&sparse, &["--sparse"]);
    let whole = made(&full, &[]);
    assert_eq!(report["bytes"], whole["bytes"]);
    assert_eq!(whole["written_bytes"], whole["bytes"]);
    assert!(report["written_bytes"].as_u64() < report["bytes"].as_u64());
    let score = json_of(&on("score", &sparse, &["--ids", "1,2,3,4,5,6,7", "--json"]));
    let logits = score["last_logits"].as_array().unwrap();
    assert!(logits.iter().all(|logit| logit.as_f64().is_some()));
    assert!(logits.iter().any(|logit| logit.as_f64() != Some(0.0)));
}

#[test]
fn a_disk_that_is_too_small_is_said_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut command = colibri();
    // Petabytes.
    command.arg("synth").arg(&out).args([
        "--layers",
        "20",
        "--hidden",
        "1048576",
        "--moe-intermediate",
        "1048576",
    ]);
    let line = error_of(&finish(command));
    assert!(
        line.contains("bytes free, the model takes") && line.contains("--sparse"),
        "{line}"
    );
    assert!(!out.exists());
}

#[test]
fn what_is_there_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("mine"), "mine").unwrap();
    let line = error_of(&finish(synth(dir.path(), &[])));
    assert!(line.contains("is not an empty directory"), "{line}");
    assert_eq!(names(dir.path()), ["mine"]);

    let file = dir.path().join("mine");
    assert!(error_of(&finish(synth(&file, &[]))).contains("cannot use"));
    // An empty directory is taken.
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    made(&empty, &[]);
    assert!(names(&empty).contains(&"config.json".to_owned()));
    assert!(names(&empty).iter().all(|name| !name.ends_with(".part")));
}

#[test]
fn impossible_shapes_are_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    for (args, part) in [
        (&["--experts-per-token", "97"][..], "num_experts_per_tok"),
        (&["--hidden", "1"], "could not be told from another format"),
        (&["--routed-experts", "0"], "n_routed_experts"),
        (&["--hidden", "99999999999"], "hidden_size"),
        (&["--shard-size", "0"], "--shard-size"),
    ] {
        let mut command = colibri();
        command.arg("synth").arg(&out).args(args);
        let line = error_of(&finish(command));
        assert!(line.contains(part), "{line}");
        assert!(!out.exists());
    }
}

#[test]
fn an_interrupt_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut command = colibri();
    command.arg("synth").arg(&out).args(["--threads", "1"]);
    let child = command
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // As soon as it writes.
    while !out.exists() || names(&out).is_empty() {
        std::thread::yield_now();
    }
    // SAFETY: a signal to a child that has not been waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(!out.exists(), "{:?}", names(&out));
}

#[test]
fn inspect_and_doctor_know_what_was_made() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    made(&model, &["--mtp-layer", "--experts-format", "int2"]);
    let report = json_of(&on("inspect", &model, &["--json"]));
    assert_eq!(
        report["layers"],
        serde_json::json!({ "dense": 1, "sparse": 3, "mtp": 1 })
    );
    let tensors = |format: &str| report["formats"][format]["tensors"].as_u64().unwrap();
    // Three matrices, whose scales are no tensors of their own, for each expert; embeddings and head, and all of the prediction layer: experts, attention, shared
    // expert and projection.
    assert_eq!(tensors("int2-row"), 3 * 16 * 3);
    assert_eq!(tensors("int8-row"), 2 + 16 * 3 + 5 + 3 + 1);
    assert!(tensors("int4-g64") > 0);

    let report = json_of(&on("doctor", &model, &["--json"]));
    let checks = report["checks"].as_array().unwrap();
    let model = checks
        .iter()
        .find(|check| check["name"] == "model")
        .unwrap();
    assert_eq!(model["details"]["fits"], true, "{model}");
}

#[test]
fn doctor_plans_no_longer_context_than_the_model_has() {
    let mut dir = std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    dir.push("demo/model");
    let said = String::from_utf8(on("doctor", &dir, &[]).stdout).unwrap();
    assert!(said.contains("for 1024 tokens of context"), "{said}");
}
