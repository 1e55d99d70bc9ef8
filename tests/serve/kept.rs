//! Beginnings of prompts over restarts: `--kv-dir`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::server::Server;

fn start(dir: &Path) -> Server {
    Server::start(&["--kv-dir", dir.to_str().unwrap()])
}

/// A prompt of some 300 tokens that ends with `end`.
fn request(end: &str) -> Value {
    let text = "It is a truth universally acknowledged, that a single man in possession of a good fortune. ".repeat(12);
    json!({"prompt": text + end, "max_tokens": 24, "temperature": 1, "seed": 4})
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    files.sort();
    files
}

fn end(server: Server) {
    server.signal(15);
    assert!(server.wait().success());
}

#[test]
fn a_beginning_is_known_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let plain = Server::start(&[]);
    let path = "/v1/completions";
    let server = start(dir.path());
    let first = server.json(path, &request("Once"));
    assert_eq!(cached(&first), 0);
    end(server);
    assert_eq!(files(dir.path()).len(), 1);
    for (round, word) in ["Twice", "Thrice"].into_iter().enumerate() {
        let server = start(dir.path());
        let again = server.json(path, &request(word));
        let prompt = again["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(cached(&again) + 8 >= prompt, "{again}");
        assert_eq!(text(&again), text(&plain.json(path, &request(word))));
        end(server);
        // A file for each text.
        assert_eq!(files(dir.path()).len(), 2 + round);
    }
    // The text that the first answer goes on with is in the file of the first text.
    let server = start(dir.path());
    let mut longer = request("Once");
    longer["prompt"] = json!(longer["prompt"].as_str().unwrap().to_owned() + text(&first));
    let longer = server.json(path, &longer);
    assert!(cached(&longer) + 32 >= longer["usage"]["prompt_tokens"].as_u64().unwrap());
    end(server);
    assert!(files(dir.path()).len() <= 4);
}

#[test]
fn beginnings_are_saved_while_nothing_is_to_be_done() {
    let dir = tempfile::tempdir().unwrap();
    let path = "/v1/completions";
    let mut server = start(dir.path());
    server.json(path, &request("Once"));
    // An empty file is there before its first text is complete.
    let saved = |file: &PathBuf| fs::metadata(file).unwrap().len() > 100_000;
    while !files(dir.path()).iter().any(saved) {
        thread::sleep(Duration::from_millis(100));
    }
    server.json(path, &request("Twice"));
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let server = start(dir.path());
    let again = server.json(path, &request("Thrice"));
    assert!(cached(&again) > 200, "{again}");
}

#[test]
fn damaged_and_foreign_files_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = "/v1/completions";
    let server = start(dir.path());
    server.json(path, &request("Once"));
    end(server);
    let file = files(dir.path()).remove(0);
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, &bytes).unwrap();
    let other = dir.path().join("0123456789abcdef0123456789abcdef-0.kv");
    fs::write(&other, "another model's").unwrap();
    let server = start(dir.path());
    let again = server.json(path, &request("Once"));
    assert_eq!(cached(&again), 0);
    assert_eq!(
        text(&again),
        text(&Server::start(&[]).json(path, &request("Once")))
    );
    end(server);
    assert_eq!(fs::read(&file).unwrap(), bytes);
    assert_eq!(fs::read(&other).unwrap(), b"another model's");
    assert_eq!(files(dir.path()).len(), 3);
}

#[test]
fn a_full_disk_is_a_warning_and_a_useless_directory_an_error() {
    let dir = tempfile::tempdir().unwrap();
    // The demo model is on the disk already: only what is kept meets the limit.
    drop(Server::start(&[]));
    let script = format!(
        "ulimit -f 16; exec {} serve --port 0 --no-usage --kv-dir {}",
        env!("CARGO_BIN_EXE_colibri-uring"),
        dir.path().display()
    );
    let server = Server::run(Command::new("sh").args(["-c", &script]));
    let answer = server.json("/v1/completions", &request("Once"));
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    end(server);
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for bad in [file.clone(), file.join("below"), PathBuf::from("/proc/kv")] {
        let run = Command::new(env!("CARGO_BIN_EXE_colibri-uring"))
            .args(["serve", "--port", "0", "--kv-dir"])
            .arg(&bad)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8(run.stderr).unwrap();
        assert!(!run.status.success() && said.contains("--kv-dir"), "{said}");
        assert!(said.contains(bad.to_str().unwrap()), "{said}");
    }
}
