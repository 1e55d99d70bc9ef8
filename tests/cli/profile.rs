//! `profile`: progress, interruption and output files.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use serde_json::Value;

use crate::common::Saved;
use crate::process::{colibri, error_of, finish, json_of, on_model};
use crate::pty::Terminal;
use crate::signals::interrupt;

#[test]
fn what_is_to_be_done_is_said_before_it_is() {
    let args = ["--engine", "pread", "--queue-depth", "1", "2"];
    let args = [&args[..], &["--seconds", "0.06"]].concat();
    let dirs = Saved::named("bf16-shared").dirs;
    let mut terminal = Terminal::start(on_model("profile", &dirs, &args));
    terminal.expect("runs of 0.06 s");
    // During the first run.
    terminal.expect("0 of ");
    terminal.expect("pread of ");
    terminal.expect("MiB/s");
    assert!(terminal.end().success(), "{}", terminal.seen);
}

#[test]
fn without_a_time_all_runs_together_take_half_a_minute() {
    let dirs = Saved::named("bf16-shared").dirs;
    // 2 sizes, 16 depths, pread alone. The warm-up takes another quarter of each.
    let depths: Vec<String> = (1..=16).map(|depth| depth.to_string()).collect();
    let depths: Vec<&str> = depths.iter().map(String::as_str).collect();
    let args = ["--engine", "pread", "--block-size", "4KiB", "8KiB"];
    let args = [&args[..], &["--queue-depth"], &depths].concat();
    let mut terminal = Terminal::start(on_model("profile", &dirs, &args));
    terminal.expect("32 runs of 0.75 s, some 30 s in all");
    // Ctrl-C.
    terminal.write("\x03");
    assert_eq!(terminal.end().code(), Some(130));
}

/// A file that begins like a comment is not an interval log.
#[test]
fn a_log_replaces_a_log_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (notes, log) = (dir.path().join("notes.md"), dir.path().join("r.hlog"));
    fs::write(&notes, "# Notes").unwrap();
    let to = |path: &Path| {
        let mut command = on_model("profile", &Saved::named("bf16-shared").dirs, &[]);
        command.args([
            "--engine",
            "pread",
            "--block-size",
            "4KiB",
            "--queue-depth",
            "1",
        ]);
        command.args(["--seconds", "0.05", "--hlog"]).arg(path);
        finish(command)
    };
    let error = error_of(&to(&notes));
    assert!(error.contains("notes.md: the file exists"), "{error}");
    assert_eq!(fs::read(&notes).unwrap(), b"# Notes");
    for _ in 0..2 {
        assert!(to(&log).status.success());
    }
}

/// Reads of holes say nothing about the drive.
#[test]
fn holes_say_nothing_of_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("holes");
    let mut synth = colibri();
    synth.arg("synth").arg(&model).arg("--sparse");
    synth.args([
        "--layers",
        "2",
        "--dense-layers",
        "1",
        "--routed-experts",
        "8",
    ]);
    assert!(finish(synth).status.success());
    let read = [
        "--engine",
        "pread",
        "--queue-depth",
        "1",
        "--seconds",
        "0.05",
    ];
    let profile = |dirs: &[PathBuf], args: &[&str]| {
        finish(on_model("profile", dirs, &[&read[..], args].concat()))
    };
    let holes = [model];
    let report = json_of(&profile(&holes, &["--json"]));
    assert_eq!(report["tokens_per_second"], Value::Null);
    assert!(!report["runs"].as_array().unwrap().is_empty());
    let table = String::from_utf8(profile(&holes, &[]).stdout).unwrap();
    assert!(table.contains("Holes were read"), "{table}");
    assert!(!table.contains("tokens a second"), "{table}");
    let whole = Saved::named("bf16-shared").dirs;
    let report = json_of(&profile(&whole, &["--json"]));
    assert!(report["tokens_per_second"]["cold"].as_f64().unwrap() > 0.0);
}

/// Starts it without a terminal, with two files to write.
fn started(dir: &Path, args: &[&str]) -> Child {
    let mut command = on_model("profile", &Saved::named("bf16-shared").dirs, args);
    command.args(["--engine", "pread", "--block-size", "4KiB", "--json", "-v"]);
    command.arg("--report").arg(dir.join("r.html"));
    command.arg("--hlog").arg(dir.join("r.hlog"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Finished runs are reported, and no temporary file remains.
#[test]
fn ctrl_c_keeps_the_runs_that_are_finished() {
    let dir = tempfile::tempdir().unwrap();
    let depths = vec!["1"; 200];
    let args = [&["--seconds", "0.05", "--queue-depth"][..], &depths].concat();
    let mut child = started(dir.path(), &args);
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut before = said.by_ref().map(Result::unwrap);
    // The duration is printed without a terminal too.
    assert!(before.any(|line| line.contains("200 runs of 0.05 s")));
    assert!(before.any(|line| line.contains("1 at once: ") && line.ends_with(" MiB/s")));
    interrupt(&child);
    let mut json = String::new();
    let out = child.stdout.as_mut().unwrap();
    out.read_to_string(&mut json).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let report: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(report["interrupted"], true);
    let runs = report["runs"].as_array().unwrap().len();
    assert!((1..200).contains(&runs), "{runs}");
    let html = fs::read_to_string(dir.path().join("r.html")).unwrap();
    assert!(html.contains(&format!("Interrupted: {runs} of 200 runs")));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn ctrl_c_before_the_first_run_is_finished() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--seconds", "1000", "--queue-depth", "1"];
    let mut child = started(dir.path(), &args);
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut said = said.by_ref().map(Result::unwrap);
    assert!(said.any(|line| line.contains("1 run of 1000")));
    interrupt(&child);
    assert!(said.any(|line| line == "interrupted: nothing was measured yet"));
    let mut json = String::new();
    let out = child.stdout.as_mut().unwrap();
    out.read_to_string(&mut json).unwrap();
    assert_eq!(
        (child.wait().unwrap().code(), json.as_str()),
        (Some(130), "")
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
