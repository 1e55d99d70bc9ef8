//! `chat`, from a script and at a terminal.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::Saved;
use crate::corrupt::Broken;
use crate::process::{error_of, finish, json_of, list, on_model, stderr};
use crate::pty::Terminal;

fn chat(args: &[&str]) -> Command {
    on_model("chat", &Saved::named("chat").dirs, args)
}

fn fed(command: Command, lines: &str) -> Output {
    assert_cmd::Command::from_std(command)
        .write_stdin(lines)
        .timeout(Duration::from_secs(20))
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// System message and first message of the conversation that the reference answered.
fn reference() -> (Value, String, String) {
    let expected = Saved::named("chat").expected;
    let messages = expected["chat"]["conversations"][1]["messages"].clone();
    let said = |at: usize| messages[at]["content"].as_str().unwrap().to_owned();
    (expected, said(0), said(1))
}

/// The answer before the stop token, which has a text too.
fn before_the_stop(system: &str, message: &str) -> String {
    let args = [
        "--chat", "--system", system, "--prompt", message, "-n", "12", "--json",
    ];
    let report = json_of(&finish(on_model(
        "decode",
        &Saved::named("chat").dirs,
        &args,
    )));
    report["text"].as_str().unwrap().to_owned()
}

/// How many tokens were fed for each answer, as the status lines say.
fn read(output: &Output) -> Vec<usize> {
    let text = stderr(output);
    let lines = text
        .lines()
        .filter_map(|line| line.split_once(" tok/s; ")?.1.split_once(" token"));
    lines.map(|(n, _)| n.parse().unwrap()).collect()
}

#[test]
fn a_script_gets_answers_and_nothing_else() {
    let (expected, system, message) = reference();
    let lines = format!("{message}\n\n/nonsense\nHello\n/help\n/stats\n");
    let output = fed(chat(&["--system", &system, "-n", "12"]), &lines);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let answers = text(&output);
    let first = before_the_stop(&system, &message);
    let second = answers.strip_prefix(&format!("{first}\n")).unwrap();
    let said = stderr(&output);
    for part in [
        "there is no command /nonsense",
        "/reset ",
        "prefetches",
        "context 55 of 4096",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains('\u{1b}') && !said.contains("> "), "{said}");
    // The second answer is to the whole conversation, of which only the new part was fed.
    let ids = |text: &str| -> Vec<u32> {
        let args = ["--prompt", text, "-n", "0", "--json"];
        let report = json_of(&finish(on_model(
            "decode",
            &Saved::named("chat").dirs,
            &args,
        )));
        serde_json::from_value(report["prompt_ids"].clone()).unwrap()
    };
    let all = |key: &str| -> Vec<u32> { serde_json::from_value(expected[key].clone()).unwrap() };
    let (prompt, answer) = (all("prompt_ids"), all("token_ids"));
    // Cut by -n before its stop token; the last of them was never fed.
    let new = ids("<|user|>\nHello<|assistant|>\n");
    let whole = [&prompt, &answer[..12], &new].concat();
    let args = ["--prompt-ids", &list(&whole), "-n", "12", "--json"];
    let report = json_of(&finish(on_model(
        "decode",
        &Saved::named("chat").dirs,
        &args,
    )));
    assert_eq!(second, format!("{}\n", report["text"].as_str().unwrap()));
    assert_eq!(read(&output), [prompt.len(), new.len() + 1]);
}

#[test]
fn a_stop_token_ends_an_answer_and_is_not_fed_again() {
    let (_, system, message) = reference();
    let output = fed(
        chat(&["--system", &system, "-n", "40"]),
        &format!("{message}\nHello\n"),
    );
    let first = format!("{}\n", before_the_stop(&system, &message));
    assert!(text(&output).starts_with(&first));
    // Everything was fed when the stop token came.
    let new = read(&output)[1];
    let cut = fed(
        chat(&["--system", &system, "-n", "12"]),
        &format!("{message}\nHello\n"),
    );
    assert_eq!(read(&cut)[1], new + 1);
}

#[test]
fn reset_forgets() {
    let lines = "Who are you?\nHello\n/reset\nWho are you?\n/quit\nnever read\n";
    let output = fed(chat(&["-n", "8"]), lines);
    assert_eq!(output.status.code(), Some(0));
    let read = read(&output);
    assert_eq!(
        (read.len(), read[2]),
        (3, 1),
        "the same again: all but the last token is there"
    );
    let once = text(&fed(chat(&["-n", "8"]), "Who are you?\n"));
    let answers = text(&output);
    assert!(answers.starts_with(&once) && answers.ends_with(&once));
}

#[test]
fn a_full_context_is_said() {
    let lines = "Who are you?\nWho are you?\n/reset\nWho are you?\n";
    let output = fed(chat(&["--context", "24"]), lines);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("the context is full") && said.contains("/reset"),
        "{said}"
    );
    assert_eq!(read(&output).len(), 2);
    for context in ["0", "1", "4097", "18446744073709551615"] {
        let line = error_of(&finish(chat(&["--context", context])));
        assert!(
            line.contains(context) && line.contains("2 to 4096"),
            "{line}"
        );
    }
}

/// An answer without a stop token is cut.
#[test]
fn an_answer_that_may_never_end_is_cut() {
    let model = Broken::copy("chat");
    let mut config = model.config();
    config.insert("eos_token_id".to_owned(), json!([]));
    model.set_config(&config);
    fs::remove_file(model.file("generation_config.json")).unwrap();
    let settings = model.file("tokenizer_config.json");
    let chat = |args: &[&str]| fed(model.run("chat", args), "Hello\n");
    for eos in [json!({}), json!({"eos_token": "<none>"})] {
        fs::write(&settings, eos.to_string()).unwrap();
        let said = stderr(&chat(&[]));
        assert!(
            said.contains("[128 tokens, ") && said.contains("cut after 128 tokens"),
            "{said}"
        );
        assert_eq!(
            said.contains("\"<none>\" is no token"),
            eos != json!({}),
            "{said}"
        );
        let said = stderr(&chat(&["-n", "3"]));
        assert!(
            said.contains("[3 tokens, ") && !said.contains("cut after"),
            "{said}"
        );
    }
    let raw = fed(
        on_model("chat", &Saved::named("tiny-text").dirs, &["--raw"]),
        "a\n",
    );
    assert!(
        stderr(&raw).contains("cut after 128 tokens"),
        "{}",
        stderr(&raw)
    );
    fs::write(&settings, json!({"eos_token": 7}).to_string()).unwrap();
    let line = error_of(&chat(&[]));
    assert!(
        line.contains("tokenizer_config.json: eos_token is 7"),
        "{line}"
    );
}

#[test]
fn lines_may_be_continued_and_must_be_text() {
    let two = fed(chat(&["-n", "8"]), "Who\\\nare you?\n");
    let one = fed(chat(&["-n", "8"]), "Who are you?\n");
    assert_eq!(read(&two).len(), 1);
    assert_ne!(text(&two), text(&one));
    let mut broken = assert_cmd::Command::from_std(chat(&[]));
    // Errors name the line of the input.
    let lines = &b"/help\n\n\\\ncaf\xe9\n"[..];
    let output = broken.write_stdin(lines).output().unwrap();
    let said = stderr(&output);
    let located = "line 4 is not UTF-8 text: byte 0xe9 at offset 3";
    assert!(
        output.status.code() == Some(1) && said.contains(located),
        "{said}"
    );
    assert_eq!(fed(chat(&[]), "").status.code(), Some(0));
}

/// The error does not blame the template.
#[test]
fn too_little_address_space_is_named() {
    let chat = chat(&[]);
    let mut limited = Command::new("sh");
    crate::child::default_signals(&mut limited);
    limited.args(["-c", "ulimit -v 1800000; exec \"$0\" \"$@\""]);
    limited.arg(chat.get_program()).args(chat.get_args());
    let line = error_of(&finish(limited));
    assert!(
        line.contains("ulimit -v") && line.contains("no thread can be made"),
        "{line}"
    );
}

#[test]
fn sampling_is_what_the_model_asks_for() {
    let model = Broken::copy("chat");
    let answer = |args: &[&str]| {
        text(&fed(
            model.run("chat", &[&["-n", "12"], args].concat()),
            "Hello\n",
        ))
    };
    let greedy = answer(&[]);
    let set = json!({"do_sample": true, "temperature": 5.0, "top_p": 0.95});
    fs::write(model.file("generation_config.json"), set.to_string()).unwrap();
    let drawn = answer(&[]);
    assert_ne!(drawn, greedy);
    assert_eq!(drawn, answer(&[]), "a seed repeats");
    assert_ne!(drawn, answer(&["--seed", "1"]));
    assert_eq!(greedy, answer(&["--temperature", "0"]));
    fs::write(model.file("generation_config.json"), "{\"top_p\": 7}").unwrap();
    let line = error_of(&fed(model.run("chat", &[]), "Hello\n"));
    assert!(
        line.contains("generation_config.json: top_p is 7"),
        "{line}"
    );
}

#[test]
fn without_a_template_only_raw() {
    let dirs = Saved::named("tiny-text").dirs;
    let line = error_of(&fed(on_model("chat", &dirs, &[]), "a\n"));
    for part in ["--raw", "chat_template.jinja", "tokenizer_config.json"] {
        assert!(line.contains(part), "{line}");
    }
    let raw = fed(
        on_model("chat", &dirs, &["--raw", "-n", "8"]),
        "The garden\nThe bird\n",
    );
    assert_eq!(raw.status.code(), Some(0), "{}", stderr(&raw));
    let decoded = finish(on_model(
        "decode",
        &dirs,
        &["--prompt", "The garden", "-n", "8"],
    ));
    assert!(text(&raw).starts_with(&text(&decoded)));
    let line = error_of(&fed(
        on_model("chat", &Saved::named("f32-smallest").dirs, &["--raw"]),
        "a\n",
    ));
    assert!(line.contains("no tokenizer.json"), "{line}");
}

/// A person's surroundings, in a directory of their own.
fn at_home(mut command: Command, home: &tempfile::TempDir, term: &str) -> Terminal {
    command
        .env("TERM", term)
        .env("HOME", home.path())
        .env_remove("XDG_STATE_HOME")
        .env_remove("NO_COLOR");
    Terminal::start(command)
}

#[test]
fn a_person_has_history_and_a_status_line() {
    let home = tempfile::tempdir().unwrap();
    let mut terminal = at_home(chat(&["-n", "4"]), &home, "xterm");
    terminal.expect("Ctrl-D leaves");
    terminal.expect("> ");
    terminal.write("Hello\\\r");
    terminal.write("there\r");
    terminal.expect("\u{1b}[2m[4 tokens, ");
    terminal.expect("> ");
    // Up, twice: what was typed.
    terminal.write("/stats\r");
    terminal.expect("messages     2");
    terminal.expect("> ");
    terminal.write("\u{1b}[A\r");
    terminal.expect("messages     2");
    terminal.expect("> ");
    terminal.write("\u{4}");
    assert_eq!(terminal.end().code(), Some(0));
    let history = home.path().join(".local/state/colibri-uring/history");
    let lines = fs::read_to_string(&history).unwrap();
    assert!(
        lines.contains("Hello") && lines.contains("/stats"),
        "{lines}"
    );
    assert_eq!(
        fs::metadata(&history).unwrap().permissions().mode() & 0o777,
        0o600
    );
    // Another conversation remembers.
    let mut terminal = at_home(chat(&["-n", "4"]), &home, "xterm");
    terminal.expect("> ");
    terminal.write("\u{1b}[A\r");
    terminal.expect("messages     0");
    terminal.expect_line("> ");
    terminal.write("\u{3}");
    terminal.expect("Ctrl-C once more leaves");
    terminal.expect_line("> ");
    terminal.write("\u{3}");
    assert_eq!(terminal.end().code(), Some(0));
}

/// What comes while the line before is answered, or in one burst with it, is not lost.
#[test]
fn lines_that_come_together_are_all_answered() {
    let home = tempfile::tempdir().unwrap();
    let mut terminal = at_home(chat(&["-n", "4"]), &home, "xterm");
    terminal.expect_line("> ");
    terminal.write("Hello\r/stats\rAnd you?\r/stats\r/quit\r");
    for messages in [2, 4] {
        terminal.expect("[4 tokens, ");
        terminal.expect(&format!("messages     {messages}"));
    }
    assert_eq!(terminal.end().code(), Some(0));
}

#[test]
fn ctrl_c_stops_an_answer_and_not_the_conversation() {
    let model = Broken::copy("chat");
    let mut config = model.config();
    config.insert("eos_token_id".to_owned(), json!([]));
    config.insert("max_position_embeddings".to_owned(), json!(1 << 20));
    model.set_config(&config);
    fs::remove_file(model.file("generation_config.json")).unwrap();
    fs::write(model.file("tokenizer_config.json"), "{}").unwrap();
    let home = tempfile::tempdir().unwrap();
    let mut terminal = at_home(
        model.run("chat", &["--context", "200000", "-n", "200000"]),
        &home,
        "xterm",
    );
    terminal.expect("> ");
    terminal.write("Hello\r");
    terminal.expect("Hello");
    // The answer has begun.
    terminal.expect("\n");
    terminal.expect("\u{fffd}");
    terminal.write("\u{3}");
    terminal.expect("stopped: what there is stays");
    terminal.expect("> ");
    terminal.write("/stats\r");
    terminal.expect("messages     2");
    terminal.expect("> ");
    terminal.write("/quit\r");
    assert_eq!(terminal.end().code(), Some(0));
}

#[test]
fn a_dumb_terminal_gets_no_control_characters() {
    let home = tempfile::tempdir().unwrap();
    let mut terminal = at_home(chat(&["-n", "4"]), &home, "dumb");
    terminal.expect("> ");
    terminal.write("Hello\n");
    terminal.expect("[4 tokens, ");
    terminal.expect("> ");
    terminal.write("/quit\n");
    assert_eq!(terminal.end().code(), Some(0));
    assert!(!terminal.seen.contains('\u{1b}'), "{:?}", terminal.seen);
}

#[test]
fn a_terminal_is_left_as_it_was() {
    let home = tempfile::tempdir().unwrap();
    for (signal, leaving) in [
        (libc::SIGTERM, false),
        (libc::SIGTERM, true),
        (libc::SIGHUP, false),
    ] {
        let mut terminal = at_home(chat(&[]), &home, "xterm");
        terminal.expect_line("> ");
        if leaving {
            terminal.write("\u{3}");
            terminal.expect("Ctrl-C once more leaves");
            terminal.expect_line("> ");
        }
        terminal.signal(signal);
        assert_eq!(terminal.end().signal(), Some(signal));
        assert!(terminal.is_cooked());
    }
}

#[test]
fn a_terminal_shows_how_far_a_prompt_is() {
    let home = tempfile::tempdir().unwrap();
    let model = Broken::copy("chat");
    let mut config = model.config();
    config.insert("max_position_embeddings".to_owned(), json!(1 << 20));
    model.set_config(&config);
    // Enough of them that there is something to wait for.
    let ids = list(&vec![7; 4000]);
    let args = ["--prompt-ids", &ids, "--threads", "1", "-n", "1"];
    let decode = || model.run("decode", &args);
    let mut terminal = at_home(decode(), &home, "xterm");
    terminal.expect("% of 4000 tokens, ");
    assert_eq!(terminal.end().code(), Some(0));
    // The bar is gone when the text comes.
    terminal.expect("[1 token, ");
    let mut terminal = at_home(decode(), &home, "dumb");
    assert_eq!(terminal.end().code(), Some(0));
    assert!(
        !terminal.seen.contains("of 4000 tokens"),
        "{}",
        terminal.seen
    );
    assert!(!terminal.seen.contains('\u{1b}'), "{:?}", terminal.seen);
    let piped = finish(decode());
    assert!(
        !stderr(&piped).contains("of 4000 tokens"),
        "{}",
        stderr(&piped)
    );
}

#[test]
fn a_terminal_shows_how_far_a_simulation_is() {
    let home = tempfile::tempdir().unwrap();
    let args = [
        "--device",
        "1GiB/s",
        "--compute-rate",
        "1GiB/s",
        "--tokens",
        "100000",
    ];
    let simulate = on_model("simulate", &Saved::named("tiny-text").dirs, &args);
    let mut terminal = at_home(simulate, &home, "xterm");
    terminal.expect(" of 100000 tokens, ");
    terminal.write("\u{3}");
    assert!(!terminal.end().success());
}
