//! `chat --kv`: a conversation continued in another process equals the conversation of one process.

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::common::Saved;
use crate::kv::Talk;
use crate::process::{error_of, finish, on_model, stderr};
use crate::pty::Terminal;
use crate::signals;

/// A deterministic chat of 5 tokens per answer.
fn chat(talk: &Talk, args: &[&str]) -> Command {
    let path = talk.path();
    let flags = ["--raw", "-n", "5", "--kv", path.to_str().unwrap()];
    on_model(
        "chat",
        &Saved::named("tiny-text").dirs,
        &[&flags, args].concat(),
    )
}

fn fed(command: Command, lines: &str) -> Output {
    let output = assert_cmd::Command::from_std(command)
        .write_stdin(lines)
        .timeout(Duration::from_secs(20))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    output
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// How many tokens were fed for each answer, as the status lines say.
fn read(output: &Output) -> Vec<usize> {
    let text = stderr(output);
    let lines = text
        .lines()
        .filter_map(|line| line.split_once(" tok/s; ")?.1.split_once(" token"));
    lines.map(|(n, _)| n.parse().unwrap()).collect()
}

const MESSAGES: [&str; 3] = ["The hummingbird\n", "flies\n", "and so on\n"];

#[test]
fn a_conversation_goes_on_in_another_process() {
    let whole = Talk::new();
    let at_once = fed(chat(&whole, &[]), &MESSAGES.concat());
    let talk = Talk::new();
    let (mut answers, mut tokens) = (String::new(), Vec::new());
    for (i, message) in MESSAGES.into_iter().enumerate() {
        let output = fed(chat(&talk, &[]), message);
        let going_on = format!("going on with a conversation of {} messages", 2 * i);
        assert_eq!(
            stderr(&output).contains(&going_on),
            i > 0,
            "{}",
            stderr(&output)
        );
        answers += &text(&output);
        tokens.extend(read(&output));
    }
    assert_eq!(answers, text(&at_once));
    // No more is computed than within one process.
    assert_eq!(tokens, read(&at_once));
    assert_eq!(tokens.len(), 3);
}

#[test]
fn a_reset_forgets_what_is_kept() {
    let talk = Talk::new();
    let first = fed(chat(&talk, &[]), MESSAGES[0]);
    fed(chat(&talk, &[]), "/reset\n");
    let again = fed(chat(&talk, &[]), MESSAGES[0]);
    assert!(!stderr(&again).contains("going on"));
    assert_eq!((text(&again), read(&again)), (text(&first), read(&first)));
    // --kv-reset does too, and leaves the file until the first answer.
    let before = talk.bytes();
    fed(chat(&talk, &["--kv-reset"]), "");
    assert!(talk.bytes() == before);
    let reset = fed(chat(&talk, &["--kv-reset"]), MESSAGES[0]);
    assert_eq!((text(&reset), read(&reset)), (text(&first), read(&first)));
}

/// An answer is saved even if printing it failed.
#[test]
fn an_answer_that_cannot_be_printed_is_kept() {
    let talk = Talk::new();
    let mut command = chat(&talk, &[]);
    let child = command
        .stdin(Stdio::piped())
        .stdout(signals::full())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(MESSAGES[0].as_bytes()).unwrap();
    drop(input);
    let (code, _, said) = signals::end(child);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("standard output: No space left"), "{said}");
    let next = fed(chat(&talk, &[]), "");
    let said = stderr(&next);
    assert!(said.contains("a conversation of 2 messages"), "{said}");
}

#[test]
fn another_system_message_is_another_conversation() {
    let talk = Talk::new();
    fed(chat(&talk, &["--system", "One"]), MESSAGES[0]);
    let same = fed(chat(&talk, &["--system", "One"]), "");
    assert!(stderr(&same).contains("going on"), "{}", stderr(&same));
    let unsaid = fed(chat(&talk, &[]), "");
    assert!(stderr(&unsaid).contains("going on"), "{}", stderr(&unsaid));
    let before = talk.bytes();
    let other = error_of(&finish(chat(&talk, &["--system", "Two"])));
    assert!(other.contains("another system message"), "{other}");
    assert!(other.contains(".kv"), "the error names the file: {other}");
    assert_eq!(talk.bytes(), before);
    let anew = ["--system", "Two", "--kv-reset"];
    let other = fed(chat(&talk, &anew), MESSAGES[1]);
    let expected = fed(chat(&Talk::new(), &["--system", "Two"]), MESSAGES[1]);
    assert_eq!(text(&other), text(&expected));
}

#[test]
fn a_text_of_decode_is_no_conversation() {
    let (talk, model) = (Talk::new(), Saved::named("tiny-text"));
    talk.report(&model, &["--prompt", "The", "-n", "3"]);
    let before = talk.bytes();
    let error = error_of(&finish(chat(&talk, &[])));
    assert!(error.contains("--kv-reset"), "{error}");
    assert_eq!(talk.bytes(), before);
}

#[test]
fn sampled_answers_depend_on_the_conversation_alone() {
    let sampled = ["--temperature", "1", "--seed", "5"];
    let at_once = fed(chat(&Talk::new(), &sampled), &MESSAGES.concat());
    let talk = Talk::new();
    let answers: String = MESSAGES
        .into_iter()
        .map(|message| text(&fed(chat(&talk, &sampled), message)))
        .collect();
    assert_eq!(answers, text(&at_once));
}

#[test]
fn a_context_that_is_too_small_for_what_is_kept() {
    let talk = Talk::new();
    fed(chat(&talk, &[]), &MESSAGES.concat());
    let before = talk.bytes();
    let line = error_of(&finish(chat(&talk, &["--context", "10"])));
    assert!(
        line.contains("--context 10") && line.contains("--no-kv"),
        "{line}"
    );
    let other = on_model(
        "chat",
        &Saved::named("tiny-text").dirs,
        &["--raw", "--dsa", "off"],
    );
    let mut other = other;
    other.args(["--kv", talk.path().to_str().unwrap()]);
    let line = error_of(&finish(other));
    assert!(
        line.contains("--dsa") && line.contains("--kv-reset"),
        "{line}"
    );
    assert!(talk.bytes() == before);
}

/// A script without --kv gets the same answers each time, and writes nothing.
#[test]
fn scripts_keep_nothing_unasked() {
    let state = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let model = Saved::named("tiny-text");
        let mut command = on_model("chat", &model.dirs, &["--raw", "-n", "3"]);
        command.env_remove("COLIBRI_NO_KV");
        command.env("XDG_STATE_HOME", state.path());
        let output = fed(command, MESSAGES[0]);
        assert!(!stderr(&output).contains("going on"));
    }
    assert_eq!(std::fs::read_dir(state.path()).unwrap().count(), 0);
}

/// At a terminal the conversation is saved in the state directory by default.
#[test]
fn at_a_terminal_it_is_kept_unasked() {
    let state = tempfile::tempdir().unwrap();
    let start = || {
        let model = Saved::named("tiny-text");
        let mut command = on_model("chat", &model.dirs, &["--raw", "-n", "3"]);
        command.env_remove("COLIBRI_NO_KV");
        command.env("XDG_STATE_HOME", state.path());
        command.env("TERM", "xterm").env("HOME", state.path());
        Terminal::start(command)
    };
    let mut terminal = start();
    terminal.expect("> ");
    terminal.write("The hummingbird\r");
    terminal.expect("[3 tokens, ");
    terminal.expect("> ");
    // A second chat at the same time saves nothing.
    let mut second = start();
    second.expect("the conversation is not kept");
    second.expect("> ");
    second.write("\u{4}");
    assert_eq!(second.end().code(), Some(0));
    terminal.write("\u{4}");
    assert_eq!(terminal.end().code(), Some(0));
    let files = || {
        let names = std::fs::read_dir(state.path().join("colibri-uring")).unwrap();
        let paths = names.map(|entry| entry.unwrap().path());
        paths
            .filter(|path| path.extension().is_some_and(|e| e == "kv"))
            .count()
    };
    assert_eq!(files(), 1);
    let mut terminal = start();
    terminal.expect("going on with a conversation of 2 messages");
    terminal.expect("> ");
    terminal.write("\u{4}");
    assert_eq!(terminal.end().code(), Some(0));
    assert_eq!(files(), 1);
}

#[test]
fn decode_does_not_end_a_conversation() {
    let talk = Talk::new();
    fed(chat(&talk, &[]), MESSAGES[0]);
    let path = talk.path();
    let before = std::fs::read(&path).unwrap();
    for args in [&["--kv-append"][..], &[]] {
        let kv = ["--kv", path.to_str().unwrap(), "--prompt", "The", "-n", "2"];
        let decode = on_model(
            "decode",
            &Saved::named("tiny-text").dirs,
            &[&kv, args].concat(),
        );
        let line = error_of(&finish(decode));
        assert!(
            line.contains("conversation") && line.contains("--kv-reset"),
            "{line}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }
}
