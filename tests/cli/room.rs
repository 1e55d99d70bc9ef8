//! Prompts that leave no room for an answer.

use std::fs;

use serde_json::json;

use crate::common::Saved;
use crate::corrupt::Broken;
use crate::process::{error_of, finish, json_of, list, on_model, stderr};

/// A model with a context of 64 tokens.
fn small() -> Broken {
    let model = Broken::copy("tiny-text");
    let mut config = model.config();
    config.insert("max_position_embeddings".to_owned(), json!(64));
    model.set_config(&config);
    model
}

fn ids(range: std::ops::Range<u32>) -> String {
    list(&range.collect::<Vec<_>>())
}

#[test]
fn a_prompt_that_fills_the_context_is_refused() {
    let model = small();
    let prompt = ids(100..164);
    let line = error_of(&finish(model.run("decode", &["--prompt-ids", &prompt])));
    for part in [
        "the prompt has 64 tokens",
        "holds 64",
        "no room for an answer",
    ] {
        assert!(line.contains(part), "{line}");
    }
    let line = error_of(&finish(
        model.run("decode", &["--prompt-ids", &prompt, "-n", "1"]),
    ));
    assert!(line.contains("room for 0"), "{line}");
    // One token fits, and -n 0 asks for no answer.
    let one = finish(model.run("decode", &["--prompt-ids", &ids(100..163), "--json"]));
    assert_eq!(json_of(&one)["token_ids"].as_array().unwrap().len(), 1);
    let none = ["--prompt-ids", &prompt, "-n", "0", "--json"];
    json_of(&finish(model.run("decode", &none)));
}

#[test]
fn an_addition_that_fills_the_context_is_refused_in_its_own_numbers() {
    let model = small();
    let file = model.file("text.kv");
    let kv = ["--kv", file.to_str().unwrap()];
    let prompt = ids(100..130);
    let run = |args: &[&str]| finish(model.run("decode", &[&kv[..], args].concat()));
    json_of(&run(&["--prompt-ids", &prompt, "-n", "4", "--json"]));
    let before = fs::read(&file).unwrap();
    let line = error_of(&run(&["--kv-append", "--prompt-ids", &prompt]));
    for part in [
        "text.kv has 34 tokens and the prompt 30, 64 together",
        "no room for an answer",
    ] {
        assert!(line.contains(part), "{line}");
    }
    let line = error_of(&run(&["--kv-append", "--prompt-ids", &ids(100..140)]));
    assert!(
        line.contains("34 tokens and the prompt 40, 74 together"),
        "{line}"
    );
    let line = error_of(&run(&["--kv-append", "--prompt-ids", &prompt, "-n", "3"]));
    assert!(line.contains("room for 0"), "{line}");
    assert_eq!(fs::read(&file).unwrap(), before);
    // The text alone fills it.
    json_of(&run(&["--kv-append", "-n", "30", "--json"]));
    let line = error_of(&run(&["--kv-append"]));
    assert!(
        line.contains("text.kv has 64 tokens, and") && !line.contains("prompt has"),
        "{line}"
    );
}

#[test]
fn a_message_that_never_fits_is_told_what_helps() {
    let chat = |args: &[&str], lines: &str| {
        let command = on_model("chat", &Saved::named("chat").dirs, args);
        let output = assert_cmd::Command::from_std(command)
            .write_stdin(lines.to_owned())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        stderr(&output)
    };
    let long = "~".repeat(50);
    let said = chat(&["--context", "40"], &format!("{long}\n"));
    assert!(
        said.contains("start with --context 1") && !said.contains("/reset"),
        "{said}"
    );
    // As the second message, too.
    let lines = format!("Hello\n{long}\n");
    let said = chat(&["--context", "40", "-n", "1"], &lines);
    assert!(
        said.contains("start with --context 1") && !said.contains("/reset"),
        "{said}"
    );
    let said = chat(&["--context", "40", "--system", &long], "Hello\n");
    assert!(said.contains("--context"), "{said}");
    let said = chat(&[], &format!("{}\n", "~".repeat(5000)));
    assert!(
        said.contains("shorten it, as the model allows 4096 tokens"),
        "{said}"
    );
    let said = chat(
        &["--context", "40", "-n", "1"],
        "Who are you?\nWho are you?\nWho are you?\n",
    );
    assert!(said.contains("/reset begins a new conversation"), "{said}");
}
