//! Prompts from arguments, files and stdin, and the text of generated tokens.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::common::Saved;
use crate::corrupt::Broken;
use crate::process::{error_of, finish, json_of, list, on_model, stderr};

fn decode(name: &str, args: &[&str]) -> Command {
    on_model("decode", &Saved::named(name).dirs, args)
}

/// Runs the command with `input` on its standard input.
fn fed(command: Command, input: &[u8]) -> Output {
    assert_cmd::Command::from_std(command)
        .write_stdin(input)
        .timeout(std::time::Duration::from_secs(20))
        .output()
        .unwrap()
}

fn prompt_ids(output: &Output) -> Value {
    json_of(output)["prompt_ids"].clone()
}

/// Wrong usage, with a message that has all the parts.
#[track_caller]
fn wrong(output: &Output, parts: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(output.stdout.is_empty());
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}

#[track_caller]
fn refused(output: &Output, parts: &[&str]) {
    let line = error_of(output);
    assert!(parts.iter().all(|part| line.contains(part)), "{line}");
}

#[test]
fn a_prompt_comes_from_an_argument_a_file_or_the_standard_input() {
    let json = ["-n", "1", "--json"];
    let with = |args: &[&str]| decode("tiny-text", &[&json, args].concat());
    let text = "The garden,\nand the bird";
    let expected = prompt_ids(&finish(with(&["--prompt", text])));
    let line = format!("{text}\n");
    assert_eq!(prompt_ids(&fed(with(&[]), line.as_bytes())), expected);
    assert_eq!(prompt_ids(&fed(with(&[]), text.as_bytes())), expected);
    let dash = with(&["--prompt-file", "-"]);
    assert_eq!(prompt_ids(&fed(dash, line.as_bytes())), expected);
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, &line).unwrap();
    let path = file.path().to_str().unwrap();
    assert_eq!(
        prompt_ids(&finish(with(&["--prompt-file", path]))),
        expected
    );
    // An argument comes first, and leaves the standard input unread.
    let both = fed(with(&["--prompt", text]), b"something else");
    assert_eq!(prompt_ids(&both), expected);
    // Only one newline is removed.
    let two = fed(with(&[]), format!("{text}\n\n").as_bytes());
    assert_ne!(prompt_ids(&two), expected);
}

#[test]
fn no_prompt_is_wrong_usage() {
    let none = || decode("tiny-text", &["-n", "1"]);
    wrong(
        &fed(none(), b""),
        &["a standard input that is not empty", "--prompt-file"],
    );
    let mut null = none();
    null.stdin(Stdio::null());
    wrong(&null.output().unwrap(), &["no prompt", "--prompt-file"]);
    // A loop over the lines of stdin must not lose any to the program.
    let output = fed(
        decode("tiny-text", &["--prompt-ids", "1", "-n", "1"]),
        b"\xff",
    );
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn invalid_utf8_is_located() {
    let mut argument = decode("tiny-text", &["-n", "1", "--prompt"]);
    argument.arg(OsStr::from_bytes(b"caf\xe9"));
    wrong(
        &finish(argument),
        &["--prompt is not UTF-8", "byte 0xe9 at offset 3"],
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, b"ab\xf0\x9f\x90").unwrap();
    let path = file.path().to_str().unwrap();
    let output = finish(decode("tiny-text", &["--prompt-file", path]));
    refused(&output, &[path, "not UTF-8", "byte 0xf0 at offset 2"]);
    let output = fed(decode("tiny-text", &[]), b"\xff\xfeh\0");
    refused(&output, &["the standard input", "offset 0", "UTF-16"]);
}

#[test]
fn an_empty_prompt_begins_with_bos_if_there_is_one() {
    let empty = ["--prompt", "", "-n", "1", "--json"];
    let output = finish(decode("tiny-text", &empty));
    refused(
        &output,
        &["the prompt is empty", "give a prompt that is not empty"],
    );
    let model = Broken::copy("tiny-text");
    let file = model.file("tokenizer_config.json");
    let bos = json!({"bos_token": {"content": "<|endoftext|>"}});
    fs::write(&file, bos.to_string()).unwrap();
    let ids = prompt_ids(&finish(model.run("decode", &empty)));
    assert_eq!(ids, json!([0]));
    for (bos, says) in [
        (json!(7), "bos_token is 7, expected the text of a token"),
        (json!(["<s>"]), "bos_token is [\"<s>\"], expected"),
        (
            json!("<none>"),
            "\"<none>\", which is no token of tokenizer.json",
        ),
    ] {
        fs::write(&file, json!({ "bos_token": bos }).to_string()).unwrap();
        let output = finish(model.run("decode", &empty));
        refused(&output, &["tokenizer_config.json", "bos_token", says]);
    }
    fs::write(&file, bos.to_string()).unwrap();
    let ids = prompt_ids(&fed(
        model.run("decode", &["--prompt-file", "-", "-n", "1", "--json"]),
        b"",
    ));
    assert_eq!(ids, json!([0]));
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_in_numbers() {
    let model = Broken::copy("bf16-shared");
    let mut config = model.config();
    config.insert("max_position_embeddings".to_owned(), json!(10));
    config.insert("eos_token_id".to_owned(), json!([]));
    model.set_config(&config);
    let ids = |n: usize| list(&vec![5; n]);
    let run = |n: usize, args: &[&str]| {
        let ids = ids(n);
        let args = [&["--prompt-ids", &ids, "--json"], args].concat();
        finish(model.run("decode", &args))
    };
    let limit = "max_position_embeddings";
    refused(
        &run(11, &[]),
        &["the prompt has 11 tokens", "holds 10", limit],
    );
    refused(
        &run(7, &["-n", "4"]),
        &["-n 4", "room for 3", "holds 10", limit],
    );
    refused(&run(1, &["-n", "18446744073709551615"]), &["room for 9"]);
    let new = |output: Output| json_of(&output)["token_ids"].as_array().unwrap().len();
    assert_eq!(new(run(7, &["-n", "3"])), 3);
    // Without -n: as many as fit, at least one.
    assert_eq!(new(run(7, &[])), 3);
    refused(&run(10, &[]), &["10 tokens", "no room for an answer"]);
    let replay = model.file("replay");
    fs::write(&replay, ids(11)).unwrap();
    let output = finish(model.run("decode", &["--replay", replay.to_str().unwrap()]));
    refused(&output, &["11 tokens", "holds 10"]);
}

#[test]
fn flags_that_conflict_are_wrong_usage() {
    let contradict = decode("tiny-text", &["--prompt-ids", "1", "--prompt", "a"]);
    wrong(&finish(contradict), &["cannot be used with"]);
    let without = decode("tiny-text", &["--prompt", "a", "--system", "s"]);
    wrong(&finish(without), &["--system needs --chat"]);
}

/// The reference's ids of a text decode to that text, and never to half a character.
#[test]
fn characters_in_several_tokens_stream_whole() {
    let texts = Saved::named("chat").expected["chat"]["texts"].clone();
    let file = tempfile::NamedTempFile::new().unwrap();
    for entry in texts.as_array().unwrap() {
        let ids: Vec<u32> = serde_json::from_value(entry["ids"].clone()).unwrap();
        fs::write(&file, list(&[&[1, 2, 4, 5], &ids[..]].concat())).unwrap();
        let mut command = decode("chat", &["--replay", file.path().to_str().unwrap()]);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut out = child.stdout.take().unwrap();
        let (mut all, mut buffer) = (String::new(), [0; 1 << 16]);
        loop {
            // Each write is one read.
            match out.read(&mut buffer).unwrap() {
                0 => break,
                n => all += std::str::from_utf8(&buffer[..n]).unwrap(),
            }
        }
        assert!(child.wait().unwrap().success());
        assert_eq!(all, format!("{}\n", entry["text"].as_str().unwrap()));
    }
}

#[test]
fn an_unfinished_character_is_one_replacement_character() {
    let expected = Saved::named("chat").expected;
    let texts = expected["chat"]["texts"].as_array().unwrap();
    let entry = texts
        .iter()
        .find(|entry| entry["text"].as_str().unwrap().contains('\u{1fab6}'));
    let ids: Vec<u32> = serde_json::from_value(entry.unwrap()["ids"].clone()).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    // The first emoji takes more than two tokens.
    fs::write(&file, list(&[&[1, 2, 4, 5], &ids[..2]].concat())).unwrap();
    let output = finish(decode("chat", &["--replay", file.path().to_str().unwrap()]));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "\u{fffd}\n");
}

#[test]
fn chat_puts_the_prompt_into_the_models_template() {
    let expected = Saved::named("chat").expected;
    let conversations = expected["chat"]["conversations"].as_array().unwrap();
    let said = |conversation: &Value, at: usize| {
        conversation["messages"][at]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let (alone, with_system, without_thought) =
        (&conversations[0], &conversations[1], &conversations[3]);
    let json = ["--chat", "--json", "-n", "24"];
    let run = |args: &[&str]| json_of(&finish(decode("chat", &[&json, args].concat())));
    let report = run(&["--prompt", &said(alone, 0)]);
    assert_eq!(report["prompt_ids"], alone["ids"]);
    let (system, prompt) = (said(with_system, 0), said(with_system, 1));
    let args = ["--system", &system, "--prompt", &prompt];
    let report = run(&args);
    for key in ["prompt_ids", "token_ids", "finish_reason", "text"] {
        assert_eq!(report[key], expected[key], "{key}");
    }
    let report = run(&[&args[..], &["--template-var", "enable_thinking=false"]].concat());
    assert_eq!(report["prompt_ids"], without_thought["ids"]);
    // As a pipe, too.
    let piped = fed(
        decode("chat", &[&json[..], &["--system", &system]].concat()),
        prompt.as_bytes(),
    );
    assert_eq!(json_of(&piped)["token_ids"], expected["token_ids"]);
}

#[test]
fn a_message_cannot_spell_special_tokens() {
    let count = |args: &[&str]| {
        let json = [
            "-n",
            "1",
            "--json",
            "--prompt",
            "a <|assistant|> b </think>",
        ];
        let ids = prompt_ids(&finish(decode("chat", &[&json, args].concat())));
        let ids = ids.as_array().unwrap().clone();
        [5, 699].map(|id| ids.iter().filter(|i| **i == json!(id)).count())
    };
    assert_eq!(count(&["--chat"]), [1, 0], "only the template's own");
    assert_eq!(count(&[]), [1, 1], "a prompt may be written by hand");
}

#[test]
fn templates_that_are_missing_or_hostile_are_one_line() {
    let missing = finish(decode("tiny-text", &["--chat", "--prompt", "a"]));
    refused(
        &missing,
        &[
            "no chat template",
            "chat_template.jinja",
            "tokenizer_config.json",
        ],
    );
    let model = Broken::copy("chat");
    let with = |template: &str| {
        fs::write(model.file("chat_template.jinja"), template).unwrap();
        finish(model.run("decode", &["--chat", "--prompt", "a", "-n", "1"]))
    };
    refused(
        &with("{% if %}"),
        &["chat_template.jinja is not valid", "line 1"],
    );
    refused(
        &with("{{ raise_exception('not you') }}"),
        &["refuses", "not you"],
    );
    // A terminal would obey it.
    let loud = "{{ raise_exception('a\\x1b[31m' * 9999) }}";
    let said = stderr(&with(loud));
    assert!(said.contains("a\u{241b}[31m") && !said.contains('\u{1b}') && said.len() < 16_000);
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    refused(&with(endless), &["was stopped"]);
    // Nothing but a list in a list, twice at each of 99 levels.
    let many = "{% set ns = namespace(s=[1]) %}{% for a in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | string }}";
    refused(&with(many), &["was stopped"]);
    refused(&with("{{ nonsense() }}"), &["fails", "nonsense"]);
    let empty = with("");
    refused(&empty, &["chat_template.jinja leaves out", "\"\""]);
    fs::remove_file(model.file("chat_template.jinja")).unwrap();
    let config =
        json!({"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}]});
    fs::write(model.file("tokenizer_config.json"), config.to_string()).unwrap();
    let run = |args: &[&str]| {
        prompt_ids(&finish(model.run(
            "decode",
            &[&["--prompt", "a b", "-n", "1", "--json"], args].concat(),
        )))
    };
    assert_eq!(run(&["--chat"]), run(&[]));
}

#[test]
fn the_end_of_a_message_that_only_the_tokenizer_knows_ends_it() {
    let model = Broken::copy("chat");
    let expected = Saved::named("chat").expected;
    let chosen = expected["token_ids"][2].as_u64().unwrap();
    fs::remove_file(model.file("generation_config.json")).unwrap();
    let tokenizer: Value =
        serde_json::from_slice(&fs::read(model.file("tokenizer.json")).unwrap()).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    let (token, _) = vocab.iter().find(|(_, id)| **id == json!(chosen)).unwrap();
    fs::write(
        model.file("tokenizer_config.json"),
        json!({ "eos_token": token }).to_string(),
    )
    .unwrap();
    let messages = &expected["chat"]["conversations"][1]["messages"];
    let said = |at: usize| messages[at]["content"].as_str().unwrap();
    let args = ["--chat", "--system", said(0), "--prompt", said(1), "--json"];
    let report = json_of(&finish(model.run("decode", &args)));
    assert_eq!(
        (
            &report["finish_reason"],
            report["token_ids"].as_array().unwrap().len()
        ),
        (&json!("stop"), 3)
    );
}

#[test]
fn sampling_flags_are_checked_and_do_something() {
    let ids = ["--prompt-ids", "3,4,5", "-n", "24", "--json"];
    for (flag, values) in [
        ("--min-p", &["-0.1", "1.1", "nan", "x"][..]),
        ("--repetition-penalty", &["0", "-1", "inf", "101"]),
        ("--repetition-window", &["-1", "x"]),
        ("--top-k", &["-1"]),
    ] {
        for value in values {
            let output = finish(decode(
                "f32-smallest",
                &[&ids[..], &[&format!("{flag}={value}")]].concat(),
            ));
            wrong(&output, &[flag]);
        }
    }
    let tokens = |args: &[&str]| {
        json_of(&finish(decode("tiny-text", &[&ids, args].concat())))["token_ids"].clone()
    };
    // Only the most likely token remains: greedy.
    assert_eq!(tokens(&["--temperature", "3", "--min-p", "1"]), tokens(&[]));
    // The penalty is so high that no token repeats, prompt included.
    let penalty = ["--repetition-penalty", "100", "--repetition-window", "0"];
    let said = tokens(&penalty);
    assert_eq!(said, tokens(&penalty), "greedy is deterministic");
    let mut distinct: Vec<u64> = said
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap())
        .collect();
    distinct.extend([3, 4, 5]);
    let all = distinct.len();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), all);
}

#[test]
fn output_to_a_file_has_no_control_characters() {
    let mut file = tempfile::tempfile().unwrap();
    let mut command = decode("tiny-text", &["-v", "--prompt", "The", "-n", "4"]);
    command
        .env("TERM", "xterm-256color")
        .stderr(file.try_clone().unwrap());
    let output = command.output().unwrap();
    assert!(output.status.success());
    let mut text = String::new();
    std::io::Seek::rewind(&mut file).unwrap();
    file.read_to_string(&mut text).unwrap();
    assert!(
        !text.is_empty() && !text.contains('\u{1b}') && !text.contains('\r'),
        "{text:?}"
    );
    file.flush().unwrap();
}

#[test]
fn texts_and_ids_are_turned_into_each_other() {
    let run =
        |name: &str, args: &[&str]| finish(on_model(name, &Saved::named("tiny-text").dirs, args));
    let text = "The garden, and the bird";
    let decoded = prompt_ids(&finish(decode(
        "tiny-text",
        &["-p", text, "-n", "1", "--json"],
    )));
    let tokens = json_of(&run("tokenize", &["-p", text, "--json"]));
    assert_eq!(tokens["ids"], decoded);
    let texts: String = tokens["texts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|text| text.as_str().unwrap())
        .collect();
    assert_eq!(texts, text);
    let plain = run("tokenize", &["--prompt", text]);
    let ids = String::from_utf8(plain.stdout).unwrap();
    assert_eq!(
        ids.trim(),
        decoded
            .as_array()
            .unwrap()
            .iter()
            .map(Value::to_string)
            .collect::<Vec<_>>()
            .join(",")
    );
    let back = run("detokenize", &["--ids", ids.trim()]);
    assert_eq!(String::from_utf8(back.stdout).unwrap(), format!("{text}\n"));
    assert_eq!(
        json_of(&run("detokenize", &["--ids", ids.trim(), "--json"])),
        json!({"text": text})
    );
    let by_ids = json_of(&run("score", &["--ids", ids.trim(), "--json"]));
    assert_eq!(json_of(&run("score", &["-p", text, "--json"])), by_ids);
    wrong(&run("score", &[]), &["--ids", "--prompt"]);
    wrong(&run("tokenize", &[]), &["--prompt"]);
    refused(
        &finish(on_model(
            "tokenize",
            &Saved::named("f16-long").dirs,
            &["-p", "a"],
        )),
        &["tokenizer.json", "f16-long"],
    );
}
