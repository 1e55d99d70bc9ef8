//! The demo model, which runs without any argument.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::process::{colibri, finish, json_of, stderr};
use crate::pty::Terminal;

const PROMPT: &str = "It is a truth universally acknowledged, that";

/// Without a home directory, with a cache in `cache`.
fn with_cache(cache: &Path, args: &[&str]) -> Command {
    let mut command = colibri();
    command.env("XDG_CACHE_HOME", cache).env("HOME", "/nowhere");
    command.args(args).stdin(Stdio::null());
    command
}

fn run(cache: &Path, args: &[&str]) -> Output {
    finish(with_cache(cache, args))
}

/// The unpacked directory.
fn unpacked(cache: &Path) -> PathBuf {
    let mut dirs = fs::read_dir(cache.join("colibri-uring")).unwrap();
    let dir = dirs.next().unwrap().unwrap().path();
    assert!(dirs.next().is_none());
    dir
}

/// Name, inode, size and change time of each entry in a directory.
fn state(dir: &Path) -> Vec<(PathBuf, u64, u64, i64)> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let found = fs::symlink_metadata(&path).unwrap();
            (path, found.ino(), found.len(), found.mtime_nsec())
        })
        .collect();
    files.sort();
    files
}

#[track_caller]
fn shows_text(output: &Output) {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    let written = text.strip_prefix(PROMPT).expect(&text);
    assert!(written.split_whitespace().count() > 10, "{text}");
    assert!(!text.contains('\u{fffd}'), "{text}");
    assert!(stderr(output).contains(" tok/s; "), "{}", stderr(output));
}

#[test]
fn no_argument_at_all_prints_text_and_a_second_run_unpacks_nothing() {
    let cache = TempDir::new().unwrap();
    let first = run(cache.path(), &[]);
    shows_text(&first);
    assert!(stderr(&first).contains("colibri-uring --help"));
    let before = state(&unpacked(cache.path()));
    let mut elsewhere = with_cache(cache.path(), &["decode"]);
    elsewhere.current_dir(cache.path());
    let second = finish(elsewhere);
    shows_text(&second);
    assert_eq!(state(&unpacked(cache.path())), before);
    assert_eq!(second.stdout, first.stdout);
}

/// The progress bar clears its line.
#[test]
fn the_prompt_is_shown_when_the_bar_is_gone() {
    let cache = tempfile::tempdir().unwrap();
    let mut command = with_cache(cache.path(), &["decode", "-n", "3"]);
    command.env("TERM", "xterm");
    let mut terminal = Terminal::start(command);
    terminal.expect(PROMPT);
    let after = terminal.expect(" tok/s; ");
    assert!(!after.contains("\u{1b}[2K"), "{after:?}");
    assert!(terminal.end().success());
}

#[test]
fn a_damaged_file_is_replaced_and_the_history_stays() {
    let cache = TempDir::new().unwrap();
    let mut counting = with_cache(cache.path(), &[]);
    counting.env_remove("COLIBRI_NO_USAGE");
    let first = finish(counting);
    shows_text(&first);
    let dir = unpacked(cache.path());
    let before = state(&dir);
    assert!(dir.join(".coli_usage").exists());
    let weights = dir.join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    let mut broken = whole.clone();
    broken[whole.len() / 2] ^= 0x10;
    for damage in [&broken, &whole[..whole.len() / 2]] {
        fs::write(&weights, damage).unwrap();
        let again = run(cache.path(), &[]);
        shows_text(&again);
        assert_eq!(again.stdout, first.stdout);
        assert!(fs::read(&weights).unwrap() == whole);
    }
    let others = |files: &[(PathBuf, u64, u64, i64)]| -> Vec<_> {
        files.iter().filter(|f| f.0 != weights).cloned().collect()
    };
    assert_eq!(others(&state(&dir)), others(&before));
}

#[test]
fn a_home_that_is_missing_or_cannot_be_written_does_not_matter() {
    let temp = TempDir::new().unwrap();
    let file = temp.path().join("file");
    fs::write(&file, "").unwrap();
    let sealed = temp.path().join("sealed");
    fs::create_dir(&sealed).unwrap();
    for (home, cache) in [
        (Path::new("/nowhere"), None),
        (&*file, None),
        (Path::new("/proc"), None),
        (&*sealed, Some(&*file)),
        (&*sealed, Some(Path::new("/proc/self"))),
    ] {
        let temporary = TempDir::new().unwrap();
        let mut command = colibri();
        command.env_remove("XDG_CACHE_HOME").env("HOME", home);
        command.env("TMPDIR", temporary.path()).stdin(Stdio::null());
        command.envs(cache.map(|cache| ("XDG_CACHE_HOME", cache)));
        let output = finish(command);
        shows_text(&output);
        let said = stderr(&output);
        assert_eq!(said.matches("temporary directory").count(), 1, "{said}");
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
    }
    assert!(!Path::new("/nowhere").exists());
    assert_eq!(fs::read_dir(&sealed).unwrap().count(), 0);
}

#[test]
fn a_home_without_a_cache_gets_one() {
    let home = TempDir::new().unwrap();
    let mut command = colibri();
    command
        .env_remove("XDG_CACHE_HOME")
        .env("HOME", home.path());
    shows_text(&finish(command));
    assert!(
        unpacked(&home.path().join(".cache"))
            .join("config.json")
            .exists()
    );
}

#[test]
fn first_runs_at_the_same_time_all_succeed() {
    let cache = TempDir::new().unwrap();
    let children: Vec<_> = (0..3)
        .map(|_| {
            let mut command = with_cache(cache.path(), &[]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        })
        .collect();
    for child in children {
        shows_text(&child.wait_with_output().unwrap());
    }
    assert!(unpacked(cache.path()).join("model.safetensors").exists());
}

#[test]
fn other_commands_use_it_too_and_json_stays_alone_on_stdout() {
    let cache = TempDir::new().unwrap();
    let inspected = json_of(&run(cache.path(), &["inspect", "--json"]));
    assert_eq!(inspected["layers"]["mtp"], 1);
    let plan = json_of(&run(cache.path(), &["plan", "--context", "1024", "--json"]));
    assert_eq!(plan["fits"], true);
    let scored = run(cache.path(), &["score", "--ids", "10,20,30", "--json"]);
    assert_eq!(json_of(&scored)["argmax"].as_array().unwrap().len(), 3);
    assert!(stderr(&scored).contains("the demo model"));
    let decoded = json_of(&run(cache.path(), &["decode", "-n", "5", "--json"]));
    assert_eq!(decoded["token_ids"].as_array().unwrap().len(), 5);
}

#[test]
fn an_empty_prompt_is_refused_without_a_file_that_the_user_has_not() {
    let cache = TempDir::new().unwrap();
    let output = run(cache.path(), &["decode", "--prompt", ""]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    assert!(said.contains("give a prompt that is not empty"), "{said}");
    assert!(!said.contains("tokenizer_config"), "{said}");
}

#[test]
fn a_model_from_the_environment_comes_first_and_needs_a_prompt() {
    let cache = TempDir::new().unwrap();
    let mut command = with_cache(cache.path(), &["decode"]);
    command.env("COLIBRI_MODEL", crate::common::shipped().join("tiny-text"));
    let output = finish(command);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("no prompt"), "{}", stderr(&output));
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
}

/// A temporary model is removed, however the program ends.
#[test]
fn a_signal_leaves_no_temporary_directory() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        for answered in [false, true] {
            let temporary = TempDir::new().unwrap();
            let mut command = colibri();
            command.arg("chat").env_remove("XDG_CACHE_HOME");
            command
                .env("HOME", "/nowhere")
                .env("TMPDIR", temporary.path());
            command.stdin(Stdio::piped()).stdout(Stdio::null());
            let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
            let mut said = BufReader::new(child.stderr.take().unwrap()).lines();
            let mut typed = child.stdin.take().unwrap();
            typed.write_all(b"Hello\n").unwrap();
            let awaited = match answered {
                true => " tokens read in ",
                // Unpacked, and about to load.
                false => "this is the demo model",
            };
            assert!(said.any(|line| line.unwrap().contains(awaited)));
            assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1);
            // SAFETY: a system call on integers; the child has not been waited for, so its id is its own.
            let kill = |id: u32| unsafe { libc::kill(id as i32, signal) };
            assert_eq!(kill(child.id()), 0);
            // The first signal may come just before or after the answer.
            while child.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(50));
                kill(child.id());
            }
            assert!(!child.wait().unwrap().success());
            assert_eq!(
                fs::read_dir(temporary.path()).unwrap().count(),
                0,
                "{signal} {answered}"
            );
        }
    }
    // Nor does an exit from within the signal thread.
    let temporary = TempDir::new().unwrap();
    let mut command = colibri();
    command
        .arg("decode")
        .arg("--prompt")
        .arg(OsStr::from_bytes(b"\xff"));
    command.env_remove("XDG_CACHE_HOME").env("HOME", "/nowhere");
    command.env("TMPDIR", temporary.path());
    assert_eq!(finish(command).status.code(), Some(2));
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
}
