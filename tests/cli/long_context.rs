//! Long contexts: prompts in slices, their memory plan, and the limit of config.json.

use serde_json::Value;

use crate::common::Saved;
use crate::corrupt::Broken;
use crate::kv::Talk;
use crate::process::{error_of, finish, json_of, list, on_model};

use serde_json::json;

fn prompt() -> String {
    list(&(0..1000u32).map(|i| i * i % 97 % 31).collect::<Vec<_>>())
}

/// In slices of 64 or in one piece, logits and tokens are the same, and memory stays within what `plan` says.
#[test]
fn a_long_prompt_in_slices() {
    let model = Saved::named("f16-long");
    let ids = prompt();
    let run = |command: &str, args: &[&str]| {
        let args = [args, &["--ram", "96MiB", "--json"]].concat();
        json_of(&finish(on_model(command, &model.dirs, &args)))
    };
    let planned = |args: &[&str]| {
        let args = [&["--context", "1008", "--prompt-tokens", "1000"], args].concat();
        run("plan", &args)["total_bytes"].as_u64().unwrap()
    };
    let draw = ["--temperature", "2", "--seed", "3", "-n", "8"];
    let mut results: Vec<(Value, Value)> = Vec::new();
    for slice in [&[][..], &["--prefill-slice", "64"]] {
        let scored = run("score", &[&["--ids", &ids], slice].concat());
        let decode = [&["--prompt-ids", &ids], &draw[..], slice].concat();
        let decoded = run("decode", &decode);
        let peak = decoded["stats"]["peak_rss_bytes"].as_u64().unwrap();
        assert!(peak <= planned(slice), "{slice:?}: {peak}");
        assert_eq!(decoded["stats"]["prefilled_tokens"], 1000);
        results.push((scored, decoded["token_ids"].clone()));
        // Saved and restored.
        let talk = Talk::new();
        let args = [&decode[..], &["--ram", "96MiB"]].concat();
        for reused in [0, 999] {
            let report = talk.report(&model, &args);
            assert_eq!(report["token_ids"], decoded["token_ids"]);
            assert_eq!(report["stats"]["reused_tokens"], reused);
            let peak = report["stats"]["peak_rss_bytes"].as_u64().unwrap();
            assert!(peak <= planned(slice), "{slice:?} with --kv: {peak}");
        }
    }
    assert_eq!(results[0], results[1]);
}

#[test]
fn contexts_beyond_the_model_are_refused() {
    let model = Broken::copy("f32-smallest");
    let mut config = model.config();
    config.insert("max_position_embeddings".to_owned(), json!(20));
    model.set_config(&config);
    let twenty = list(&[1; 20]);
    let talk = Talk::new();
    let path = talk.path();
    let kv = ["--kv", path.to_str().unwrap()];
    let decode = |args: &[&str]| model.run("decode", args);
    json_of(&finish(decode(&[
        "--prompt-ids",
        "1,2,3",
        "-n",
        "17",
        "--json",
    ])));
    json_of(&finish(model.run("score", &["--ids", &twenty, "--json"])));
    let saved = [&["--prompt-ids", "1,2,3", "-n", "10", "--json"], &kv[..]].concat();
    let said = json_of(&finish(decode(&saved)))["token_ids"]
        .as_array()
        .unwrap()
        .len();
    let too_many = (18 - said).to_string();
    for (command, named) in [
        (
            decode(&["--prompt-ids", "1,2,3", "-n", "18"]),
            "-n 18 is too much: after a prompt of 3 tokens",
        ),
        (
            decode(&["--prompt-ids", "1", "-n", "18446744073709551615"]),
            "after a prompt of 1 token there",
        ),
        (
            model.run("score", &["--ids", &(twenty.clone() + ",1")]),
            "21 tokens",
        ),
        (
            decode(&[&["--kv-append", "-n", &too_many], &kv[..]].concat()),
            "is too much: after the 13 tokens in",
        ),
        (model.run("plan", &["--context", "21"]), "21 tokens"),
    ] {
        let line = error_of(&finish(command));
        assert!(
            line.contains("max_position_embeddings") && line.contains("20"),
            "{line}"
        );
        assert!(line.contains(named), "{line}");
    }
    let zero = json!(0);
    config.insert("max_position_embeddings".to_owned(), zero);
    model.set_config(&config);
    let line = model.refused();
    assert!(line.contains("max_position_embeddings is 0"), "{line}");
}
