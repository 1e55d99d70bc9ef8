//! `--lookahead`: the prefetch statistics, and the file of --save-routing.

use serde_json::Value;

use crate::common::shipped;
use crate::process::{error_of, finish, json_of, on_model, stderr};

/// Feeds 11 ids, of which the first 4 are the prompt.
fn decode(args: &[&str]) -> std::process::Output {
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids");
    std::fs::write(&ids, "1 2 3 4 5 6 7 8 9 10 11").unwrap();
    let replay = ["--replay", ids.to_str().unwrap()];
    let model = shipped().join("f16-long");
    finish(on_model("decode", &[model], &[&replay, args].concat()))
}

#[test]
fn precision_and_recall_are_told_for_every_sparse_layer() {
    let stats = json_of(&decode(&[
        "--lookahead",
        "2",
        "--cache-slots",
        "0",
        "--json",
    ]))["stats"]
        .clone();
    let layers = stats["lookahead"].as_array().unwrap();
    assert!(!layers.is_empty());
    for layer in layers {
        assert_eq!(layer["width"], 2);
        // The prompt is short enough to count.
        assert_eq!(layer["guessed"], 22);
        for key in ["precision", "recall", "top_k_recall"] {
            let share = layer[key].as_f64().unwrap();
            assert!((0.0..=1.0).contains(&share), "{layer}");
        }
    }
    let off = json_of(&decode(&[
        "--lookahead",
        "off",
        "--cache-slots",
        "0",
        "--json",
    ]));
    assert_eq!(off["stats"]["lookahead"].as_array().unwrap().len(), 0);
}

#[test]
fn routing_is_kept_line_by_line_and_changes_no_token() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("routing.jsonl");
    let saving = ["--save-routing", file.to_str().unwrap(), "--json"];
    let with = json_of(&decode(&[&saving[..], &["--lookahead", "off"]].concat()));
    let without = json_of(&decode(&["--json"]));
    assert_eq!(with["token_ids"], without["token_ids"]);
    let text = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<Value> = (text.lines())
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let top_k = lines[0]["top_k"].as_u64().unwrap();
    let of = |kind: &str| lines.iter().filter(|l| !l[kind].is_null()).count();
    // The prompt in one piece, and seven tokens.
    assert!(of("routed") > 0 && of("routed").is_multiple_of(8));
    assert_eq!(of("computed"), of("routed"));
    assert!(of("look") >= of("routed"), "also without lookahead");
    assert_eq!(lines[lines.len() - 1]["measured"]["tokens"], 7);
    let routed = lines
        .iter()
        .filter_map(|l| l["routed"]["experts"].as_array());
    let tokens: u64 = routed.map(|ids| ids.len() as u64 / top_k).sum();
    assert_eq!(tokens, of("routed") as u64 / 8 * 11);
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        1,
        "no temporary file is left"
    );
}

#[test]
fn a_routing_file_that_cannot_be_written_is_one_error() {
    let error = error_of(&decode(&["--save-routing", "/nowhere/routing.jsonl"]));
    assert_eq!(
        error,
        "error: cannot write /nowhere/routing.jsonl: No such file or directory (os error 2)\n"
    );
    // The disk fills up during the run. The tokens are printed anyway.
    let output = decode(&["--save-routing", "/dev/full"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(!output.stdout.is_empty());
    let error = stderr(&output);
    assert!(error.contains("cannot write /dev/full"), "{error}");
}

#[test]
fn a_file_that_is_something_else_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in [
        ("model.safetensors", &b"\x08\0\0\0"[..]),
        ("config.json", b"{}"),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        let error = error_of(&decode(&["--save-routing", path.to_str().unwrap()]));
        assert!(error.contains("is not overwritten"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), content);
    }
    let routing = dir.path().join("r.jsonl");
    for _ in 0..2 {
        let again = decode(&["--save-routing", routing.to_str().unwrap(), "--json"]);
        json_of(&again);
    }
}
