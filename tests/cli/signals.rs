//! Runs that end early: signals, closed pipes, full disks.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::child::default_signals;
use crate::corrupt::Broken;
use crate::process::{colibri, complaints, finish, json_of};

/// A model that never stops by itself.
pub fn endless() -> Broken {
    let model = Broken::copy("bf16-shared");
    let mut config = model.config();
    config.insert("eos_token_id".to_owned(), json!([]));
    config.insert("max_position_embeddings".to_owned(), json!(1 << 20));
    model.set_config(&config);
    model
}

/// The tokens that it generates.
fn tokens(model: &Broken, n: usize) -> Vec<Value> {
    let n = n.to_string();
    let run = model.run("decode", &["--prompt-ids", "3,4,5", "-n", &n, "--json"]);
    json_of(&finish(run))["token_ids"]
        .as_array()
        .unwrap()
        .clone()
}

fn endless_decode(model: &Broken, prompt: &str) -> Command {
    let mut command = model.run(
        "decode",
        &["--prompt-ids", prompt, "-n", "100000", "--threads", "2"],
    );
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub fn interrupt(child: &Child) {
    send(child, libc::SIGINT);
}

fn send(child: &Child, signal: i32) {
    // SAFETY: a system call on integers; the child has not been waited for, so its id is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

/// Waits until the child, which has two compute threads, has loaded the model and can be asked to stop.
pub fn wait_until_it_can_be_stopped(child: &mut Child) {
    wait_until(child, computes);
}

/// Waits until `reached` is true of the child.
pub fn wait_until(child: &mut Child, reached: impl Fn(&Child) -> bool) {
    while child.try_wait().unwrap().is_none() {
        if reached(child) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("it ended before it was interrupted");
}

/// Whether the child handles SIGTERM, which it installs last.
fn catches_signals(child: &Child) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let caught = status.lines().find_map(|l| l.strip_prefix("SigCgt:"));
    let caught = u64::from_str_radix(caught.unwrap().trim(), 16).unwrap();
    caught & 1 << (libc::SIGTERM - 1) != 0
}

/// Whether the second compute thread runs. It starts once signals can stop the child.
fn computes(child: &Child) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{}/task", child.id())) else {
        return false;
    };
    let mut names = threads.flatten().map(|thread| thread.path().join("comm"));
    names.any(|name| fs::read_to_string(name).is_ok_and(|name| name.trim() == "compute-1"))
}

/// Returns the exit code, stdout and stderr. Kills a child that does not exit.
pub fn end(mut child: Child) -> (Option<i32>, String, String) {
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take().unwrap());
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        if let Some(out) = &mut out {
            out.read_to_string(&mut text).unwrap();
        }
        text
    });
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(20) {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut text = String::new();
    err.read_to_string(&mut text).unwrap();
    let code = child.wait().unwrap().code();
    (code, reader.join().unwrap(), complaints(&text))
}

#[test]
fn ctrl_c_keeps_what_was_printed() {
    let model = endless();
    let mut decode = endless_decode(&model, "3,4,5");
    decode.env_remove("COLIBRI_NO_USAGE");
    let mut child = decode.spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut first = [0; 64];
    out.read_exact(&mut first).unwrap();
    interrupt(&child);
    let reader = std::thread::spawn(move || {
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        rest
    });
    let (code, _, stderr) = end(child);
    assert_eq!(code, Some(130));
    assert!(
        stderr.starts_with('[') && stderr.lines().count() == 1,
        "{stderr}"
    );
    let printed = String::from_utf8(first.to_vec()).unwrap() + &reader.join().unwrap();
    let printed = printed.strip_suffix('\n').unwrap();
    let ids: Vec<Value> = printed.split(' ').map(|id| id.parse().unwrap()).collect();
    let known = ids.len().min(200);
    assert_eq!(ids[..known], tokens(&model, known));
    assert!(
        model.file(".coli_usage").is_file(),
        "the usage counts are saved"
    );
}

#[test]
fn ctrl_c_keeps_the_json() {
    let model = endless();
    // Interrupted while it continues a prompt, and most likely while it still reads one.
    let long = vec!["7"; 20_000].join(",");
    for prompt in ["3,4,5", &long] {
        let mut command = endless_decode(&model, prompt);
        command.arg("--json");
        let mut child = command.spawn().unwrap();
        wait_until_it_can_be_stopped(&mut child);
        interrupt(&child);
        let (code, stdout, stderr) = end(child);
        assert_eq!((code, stderr.as_str()), (Some(130), ""));
        let report: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(report["finish_reason"], "interrupted");
        let ids = report["token_ids"].as_array().unwrap();
        if prompt == "3,4,5" && !ids.is_empty() {
            let known = ids.len().min(200);
            assert_eq!(ids[..known], tokens(&model, known));
        }
    }
}

/// No unfinished file remains, however the run ends.
#[test]
fn a_signal_leaves_no_unfinished_file() {
    let model = endless();
    for (signal, times) in [(libc::SIGHUP, 1), (libc::SIGINT, 2), (libc::SIGTERM, 2)] {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let made = model.run(
            "decode",
            &[
                "--prompt-ids",
                "3,4",
                "-n",
                "2",
                "--json",
                "--kv",
                &path("kv"),
            ],
        );
        json_of(&finish(made));
        let mut decode = endless_decode(&model, "3,4,5");
        for flag in ["trace", "report", "save-routing", "kv"] {
            decode.arg(format!("--{flag}")).arg(path(flag));
        }
        let mut child = decode.arg("--kv-reset").spawn().unwrap();
        wait_until_it_can_be_stopped(&mut child);
        let begun = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(begun, 4, "the file that is there, and three that are begun");
        for _ in 0..times {
            send(&child, signal);
        }
        let (code, ..) = end(child);
        assert_ne!(code, Some(0));
        for entry in fs::read_dir(dir.path()).unwrap() {
            let name = entry.unwrap().file_name();
            assert!(!name.as_encoded_bytes().starts_with(b"."), "{name:?}");
        }
    }
}

/// It waits for its prompt before it loads.
#[test]
fn ctrl_c_before_the_model_is_loaded() {
    let model = endless();
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let mut child = model
            .run("decode", &["-n", "3"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        wait_until(&mut child, catches_signals);
        send(&child, signal);
        let (code, stdout, stderr) = end(child);
        assert_eq!((code, stdout.as_str()), (Some(130), ""));
        assert_eq!(stderr, "interrupted: the model was not loaded yet\n");
    }
}

#[test]
fn a_reader_that_has_seen_enough_ends_it_quietly() {
    let model = endless();
    let child = &mut endless_decode(&model, "3,4,5").spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_until(b' ', &mut Vec::new()).unwrap();
    drop(out);
    let mut stderr = String::new();
    // Ends when the child does.
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut stderr)
        .unwrap();
    assert_eq!(complaints(&stderr), "");
    assert!(child.wait().unwrap().success());
}

/// Commands that print, each without and with --json where it has that.
fn printing(model: &Broken) -> Vec<Command> {
    let on_model: [&[&str]; 6] = [
        &["decode", "--prompt-ids", "3,4", "-n", "100"],
        &["score", "--ids", "3,4"],
        &["inspect"],
        &["plan"],
        &["simulate", "--device", "1GiB/s", "--compute-rate", "1GiB/s"],
        &["doctor"],
    ];
    let alone: [&[&str]; 5] = [
        &["--help"],
        &["decode", "--help"],
        &["--version"],
        &["man"],
        &["completions", "bash"],
    ];
    let mut all = Vec::new();
    for args in on_model {
        for json in [None, Some("--json")] {
            let mut command = colibri();
            command.args(args).arg("--model").arg(model.path());
            command.args(json);
            all.push(command);
        }
    }
    for args in alone {
        let mut command = colibri();
        command.args(args);
        all.push(command);
    }
    all
}

#[test]
fn a_pipe_that_is_closed_from_the_start() {
    let model = endless();
    for mut command in printing(&model) {
        let what = format!("{command:?}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = command.stdout(writer).stderr(Stdio::piped()).spawn();
        let (code, _, stderr) = end(child.unwrap());
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{what}");
    }
    // A conversation ends with the first answer.
    let chat = Broken::copy("chat");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = chat.run("chat", &[]);
    let (lines, mut typed) = std::io::pipe().unwrap();
    command.stdin(lines).stdout(writer).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    typed.write_all(b"Hello\nHello\n").unwrap();
    drop(command);
    let (code, _, stderr) = end(child);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
}

/// `>&-` and `2>&-`: the output is lost, and everything else is done.
#[test]
fn closed_outputs() {
    let model = endless();
    for closed in [">&-", "2>&-", ">&- 2>&-", "<&-"] {
        for command in printing(&model) {
            let mut shell = Command::new("sh");
            default_signals(&mut shell);
            shell.args(["-c", &format!("exec \"$0\" \"$@\" {closed}")]);
            shell.arg(command.get_program()).args(command.get_args());
            for (name, value) in command.get_envs() {
                match value {
                    Some(value) => shell.env(name, value),
                    None => shell.env_remove(name),
                };
            }
            let output = finish(shell);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(
                output.status.code(),
                Some(0),
                "{closed} {command:?}: {said}"
            );
            assert_eq!(output.stdout.is_empty(), closed.starts_with(">&-"));
        }
    }
}

/// A full disk.
pub fn full() -> Stdio {
    Stdio::from(fs::File::options().write(true).open("/dev/full").unwrap())
}

#[test]
fn a_full_disk_is_an_error() {
    let model = endless();
    for mut command in printing(&model) {
        let what = format!("{command:?}");
        let child = command.stdout(full()).stderr(Stdio::piped()).spawn();
        let (code, _, stderr) = end(child.unwrap());
        assert_eq!(code, Some(1), "{what}: {stderr}");
        // `decode` prints its summary anyway.
        let errors: Vec<&str> = stderr.lines().filter(|l| l.contains("error: ")).collect();
        assert_eq!(
            errors,
            ["error: cannot write to the standard output: No space left on device (os error 28)"],
            "{what}"
        );
    }
}

/// The exit code still tells.
#[test]
fn an_error_without_a_stderr() {
    let model = endless();
    let mut command = model.run("decode", &["--prompt-ids", "999999", "-n", "1"]);
    command.stderr(full());
    assert_eq!(command.status().unwrap().code(), Some(1));
    // Log lines are lost, the result is not.
    let mut command = model.decode();
    command.arg("-vvv").stderr(full()).stdout(Stdio::piped());
    let output = command.spawn().unwrap().wait_with_output().unwrap();
    assert_eq!(json_of(&output)["token_ids"].as_array().unwrap().len(), 3);
}
