//! The usage history: a small file in the model's directory that makes later runs read less. Its failures are warnings.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

use crate::common::shipped;
use crate::process::{finish, json_of, on_model, stderr};
use crate::sandbox::{deny, obey_permissions};

const FILE: &str = ".coli_usage";

/// A writable copy of a fixture.
fn copied(fixture: &str) -> TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for entry in fs::read_dir(shipped().join(fixture)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// `decode` with the history. The text is repetitive, so that some experts are used more.
fn command(model: &Path, args: &[&str]) -> Command {
    let settings = ["--cache-slots", "4", "--lookahead", "off", "--json"];
    let mut command = on_model(
        "decode",
        &[model.to_path_buf()],
        &[&settings, args].concat(),
    );
    command.env_remove("COLIBRI_NO_USAGE");
    command
}

/// The same ids in every run.
fn replay(dir: &Path) -> [String; 2] {
    let path = dir.join("ids");
    let ids: Vec<String> = (0..60u32).map(|i| (i * i % 23 % 7).to_string()).collect();
    fs::write(&path, ids.join(" ")).unwrap();
    ["--replay".to_owned(), path.to_str().unwrap().to_owned()]
}

fn run(model: &Path, args: &[&str]) -> Output {
    let ids = tempfile::tempdir().unwrap();
    let [flag, path] = replay(ids.path());
    finish(command(
        model,
        &[&[flag.as_str(), path.as_str()], args].concat(),
    ))
}

fn stats(output: &Output) -> Value {
    assert_eq!(stderr(output), "");
    json_of(output)["stats"].clone()
}

/// The names of all files.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = (fs::read_dir(dir).unwrap())
        .map(|e| e.unwrap().path())
        .collect();
    files.sort();
    files
}

#[test]
fn a_second_run_keeps_what_the_first_one_used_most() {
    let model = copied("f16-long");
    let first = stats(&run(model.path(), &[]));
    assert_eq!(
        (first["usage_runs"].as_u64(), first["pinned"].as_u64()),
        (Some(0), Some(0))
    );
    let second = stats(&run(model.path(), &["--pin-share", "100%"]));
    assert_eq!(second["usage_runs"], 1);
    let pinned = second["pinned"].as_u64().unwrap();
    assert!(pinned > 0);
    let hits = |stats: &Value| stats["expert_hits"].as_u64().unwrap();
    let demanded = |stats: &Value| hits(stats) + stats["expert_misses"].as_u64().unwrap();
    assert_eq!(demanded(&first), demanded(&second));
    assert!(hits(&second) > hits(&first), "{first} {second}");
    let third = stats(&run(model.path(), &["--pin-share", "0.5"]));
    assert_eq!(third["usage_runs"], 2);
    assert!((1..=pinned).contains(&third["pinned"].as_u64().unwrap()));
    assert_eq!(
        stats(&run(model.path(), &["--pin-share", "0"]))["pinned"],
        0
    );
    assert!(fs::metadata(model.path().join(FILE)).unwrap().len() < 1024);
}

#[test]
fn score_counts_too_and_mirrors_are_not_written() {
    let (model, mirror) = (copied("f16-long"), copied("f16-long"));
    let before = files(mirror.path());
    let mut score = on_model(
        "score",
        &[model.path().to_path_buf()],
        &[
            "--ids",
            "1,2,3,4,5",
            "--mirror",
            mirror.path().to_str().unwrap(),
        ],
    );
    score.env_remove("COLIBRI_NO_USAGE");
    assert_eq!(finish(score).status.code(), Some(0));
    assert!(model.path().join(FILE).is_file());
    assert_eq!(files(mirror.path()), before);
}

#[test]
fn without_usage_nothing_is_read_or_written() {
    let model = copied("f16-long");
    let before = files(model.path());
    assert_eq!(stats(&run(model.path(), &["--no-usage"]))["usage_runs"], 0);
    assert_eq!(files(model.path()), before);
    stats(&run(model.path(), &[]));
    let before = fs::read(model.path().join(FILE)).unwrap();
    let stats = stats(&run(model.path(), &["--no-usage"]));
    assert_eq!(
        (&stats["usage_runs"], &stats["pinned"]),
        (&0.into(), &0.into())
    );
    assert_eq!(fs::read(model.path().join(FILE)).unwrap(), before);
    fs::write(model.path().join(FILE), "x").unwrap();
    assert_eq!(stderr(&run(model.path(), &["--no-usage"])), "");
}

/// Succeeds with one warning about the file.
#[track_caller]
fn warned(output: &Output) -> String {
    let warning = stderr(output);
    json_of(output);
    assert_eq!(warning.lines().count(), 1, "{warning}");
    assert!(
        warning.contains("WARN") && warning.contains(FILE),
        "{warning}"
    );
    warning
}

#[test]
fn a_directory_that_cannot_be_written_is_one_warning() {
    let model = copied("f16-long");
    let ids = tempfile::tempdir().unwrap();
    let [flag, path] = replay(ids.path());
    fs::set_permissions(model.path(), Permissions::from_mode(0o555)).unwrap();
    let mut read_only = command(model.path(), &[&flag, &path]);
    obey_permissions(&mut read_only);
    let output = finish(read_only);
    fs::set_permissions(model.path(), Permissions::from_mode(0o755)).unwrap();
    assert!(warned(&output).contains("cannot write"));
    // A full drive reports the error here at the latest.
    let before = files(model.path());
    let mut full = command(model.path(), &[&flag, &path]);
    deny(&mut full, libc::SYS_fsync, libc::ENOSPC);
    assert!(warned(&finish(full)).contains("No space left"));
    assert_eq!(files(model.path()), before, "no temporary file is left");
}

#[test]
fn a_file_that_says_nothing_about_the_model_is_one_warning() {
    let (model, other) = (copied("f16-long"), copied("f32-smallest"));
    stats(&run(model.path(), &[]));
    finish(command(other.path(), &["--prompt-ids", "1,2,3", "-n", "2"]));
    let file = model.path().join(FILE);
    let whole = fs::read(&file).unwrap();
    let mut flipped = whole.clone();
    flipped[60] ^= 1;
    let mut newer = whole.clone();
    newer[8] = 9;
    let cases = [
        (whole[..whole.len() - 1].to_vec(), "damaged", true),
        (Vec::new(), "damaged", true),
        (flipped, "damaged", true),
        (vec![0xFF; 1 << 20], "no history", false),
        (newer, "version 9", false),
        (
            fs::read(other.path().join(FILE)).unwrap(),
            "another model",
            false,
        ),
    ];
    for (content, says, replaced) in cases {
        fs::write(&file, &content).unwrap();
        let output = run(model.path(), &[]);
        let warning = warned(&output);
        assert!(warning.contains(says), "{warning}");
        assert_eq!(json_of(&output)["stats"]["usage_runs"], 0);
        assert_eq!(fs::read(&file).unwrap() != content, replaced, "{says}");
    }
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    warned(&run(model.path(), &[]));
}
