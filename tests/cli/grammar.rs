//! `--json-schema`: the text is what the schema accepts.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::Saved;
use crate::process::{colibri, error_of, finish, json_of, on_model, stderr};

fn cat() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 30},
            "kind": {"enum": ["cat", "lion"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": false,
    })
}

/// `decode` of the demo model with a schema, in a directory with its cache.
fn decode(dir: &Path, schema: &str, args: &[&str]) -> Command {
    let path = dir.join("schema.json");
    std::fs::write(&path, schema).unwrap();
    let mut command = colibri();
    command.env("XDG_CACHE_HOME", dir).stdin(Stdio::null());
    command.args(["decode", "--prompt", "The cat", "--json-schema"]);
    command.arg(path).args(args);
    command
}

#[test]
fn drafts_change_no_text_of_a_schema() {
    let dir = TempDir::new().unwrap();
    for seed in ["1", "2", "3"] {
        let mut texts = Vec::new();
        for mtp in ["off", "auto", "3"] {
            let args = [
                "-n",
                "90",
                "--temperature",
                "0.9",
                "--seed",
                seed,
                "--mtp",
                mtp,
                "--json",
            ];
            let report = json_of(&finish(decode(dir.path(), &cat().to_string(), &args)));
            assert_eq!(report["finish_reason"], "stop", "{report}");
            let mtp = &report["stats"]["mtp"];
            let passes = mtp["forwards"].as_u64().unwrap();
            let tokens = report["token_ids"].as_array().unwrap().len() as u64;
            assert!(
                passes + 5 < tokens,
                "{passes} passes for {tokens}, of which many are forced"
            );
            texts.push(report["text"].as_str().unwrap().to_owned());
        }
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        let value: Value = serde_json::from_str(&texts[0]).unwrap();
        assert!(value["name"].as_str().unwrap().chars().count() <= 12);
        assert!(value["age"].as_u64().unwrap() <= 30);
        assert!(["cat", "lion"].contains(&value["kind"].as_str().unwrap()));
        assert_eq!(value.as_object().unwrap().len(), 3);
    }
}

#[test]
fn a_kept_context_continues_after_a_schema() {
    let dir = TempDir::new().unwrap();
    let kv = dir.path().join("kv");
    let kv = kv.to_str().unwrap();
    let args = ["-n", "200", "--kv", kv, "--kv-append", "--json"];
    let first = json_of(&finish(decode(dir.path(), &cat().to_string(), &args)));
    assert_eq!(first["finish_reason"], "stop");
    let length = |report: &Value, key: &str| report[key].as_array().unwrap().len();
    let second = json_of(&finish(decode(
        dir.path(),
        "{\"type\": \"boolean\"}",
        &args,
    )));
    let all = length(&first, "prompt_ids") + length(&first, "token_ids");
    assert!(length(&second, "prompt_ids") >= all);
    assert_eq!(second["stats"]["reused_tokens"], json!(all - 1));
    let text = second["text"].as_str().unwrap();
    assert!(["true", "false"].contains(&text), "{text}");
}

#[test]
fn a_schema_that_cannot_be_used_is_one_error() {
    let dir = TempDir::new().unwrap();
    for (schema, named) in [
        ("{\"not\": {}}", "unsupported keywords: [\"not\"]"),
        ("{\"type\": ", "is not JSON"),
        ("[1]", "object or boolean"),
    ] {
        let output = decode(dir.path(), schema, &["-n", "4"]).output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(
            text.contains("schema.json") && text.contains(named),
            "{text}"
        );
        assert!(output.stdout.is_empty());
    }
    let missing = [
        "--json-schema",
        "/nowhere/schema.json",
        "-n",
        "1",
        "--prompt",
        "a",
    ];
    let dirs = Saved::named("tiny-text").dirs;
    let output = on_model("decode", &dirs, &missing).output().unwrap();
    assert!(error_of(&output).contains("/nowhere/schema.json"));
}
