//! The directory that a file was to be written to is gone when it is complete, or there is no room: what was measured is printed all the same.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::common::Saved;
use crate::process::{colibri, complaints, on_model};

fn spawned(mut command: Command) -> Child {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    piped.stderr(Stdio::piped()).spawn().unwrap()
}

/// Its JSON, whatever `said` has on stderr already. One error names the file, and not what it was called before.
#[track_caller]
fn ends_with_json(child: Child, said: &mut impl Read, file: &str) -> Value {
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{rest}");
    let rest = complaints(&rest);
    assert_eq!(rest.matches("error: ").count(), 1, "{rest}");
    assert!(rest.contains(file) && !rest.contains("gone/.tmp"), "{rest}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_profile_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("gone");
    fs::create_dir(&to).unwrap();
    let read = ["--engine", "pread", "--queue-depth", "1", "--json"];
    let args = [&read[..], &["--seconds", "0.5", "--block-size", "4KiB"]].concat();
    let mut command = on_model("profile", &Saved::named("bf16-shared").dirs, &args);
    command.arg("--report").arg(to.join("r.html"));
    command.arg("--hlog").arg(dir.path().join("r.hlog"));
    let mut child = spawned(command);
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("1 run of 0.50 s") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0);
    }
    fs::remove_dir_all(&to).unwrap();
    let report = ends_with_json(child, &mut said, "gone/r.html");
    assert_eq!(report["runs"].as_array().unwrap().len(), 1);
    // What can be written is.
    assert!(dir.path().join("r.hlog").exists());
}

#[test]
fn a_comparison_of_drives_is_printed() {
    let model = Saved::named("bf16-shared").dirs.remove(0);
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(&model).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    let mut command = colibri();
    command.args(["mirror", "bench", "--json", "--report", "/dev/full"]);
    command.args(["--direct", "off", "--seconds", "0.1", "--model"]);
    command.arg(&model).arg("--mirror").arg(copy.path());
    let mut child = spawned(command);
    let mut said = child.stderr.take().unwrap();
    let report = ends_with_json(child, &mut said, "/dev/full");
    assert_eq!(report["single"].as_array().unwrap().len(), 2);
}

#[test]
fn a_text_is_printed() {
    let count = |dir: &Path| fs::read_dir(dir).unwrap().count();
    for flag in ["--trace", "--report", "--save-routing"] {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("gone");
        fs::create_dir(&to).unwrap();
        let args = ["-n", "3", "--json", flag];
        let mut command = on_model("decode", &Saved::named("chat").dirs, &args);
        command.arg(to.join("file"));
        let mut child = spawned(command);
        // Begun before the prompt is read.
        let mut waits = 0..20_000;
        while count(&to) == 0 {
            assert!(waits.next().is_some() && child.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(1));
        }
        fs::remove_dir_all(&to).unwrap();
        let mut prompt = child.stdin.take().unwrap();
        prompt.write_all(b"Hello").unwrap();
        drop(prompt);
        let mut said = child.stderr.take().unwrap();
        let report = ends_with_json(child, &mut said, "gone/file");
        assert_eq!(report["token_ids"].as_array().unwrap().len(), 3, "{flag}");
    }
}
