//! `mirror stage`: copies, refusals and interruptions.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

#[path = "common/child.rs"]
mod child;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/bf16-shared")
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn command(args: &[&str]) -> std::process::Command {
    let mut colibri = child::colibri();
    colibri.args(["mirror"]).args(args);
    colibri
}

fn stage(model: &Path, to: &Path, more: &[&str]) -> Output {
    let mut args = vec!["stage", "--model", model.to_str().unwrap()];
    args.extend(["--to", to.to_str().unwrap()]);
    args.extend(more);
    command(&args).output().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(output)))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Names of the files of a directory.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = (fs::read_dir(dir).unwrap())
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn assert_same(model: &Path, to: &Path) {
    assert_eq!(names(model), names(to));
    for name in names(model) {
        assert!(
            fs::read(model.join(&name)).unwrap() == fs::read(to.join(&name)).unwrap(),
            "{name}"
        );
    }
}

/// A model of one large shard, to have time to be interrupted. Its bytes differ everywhere.
fn large(dir: &Path, bytes: usize) {
    let header =
        format!("{{\"a\":{{\"dtype\":\"U8\",\"shape\":[{bytes}],\"data_offsets\":[0,{bytes}]}}}}");
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    let mut x = 1u32;
    file.extend((0..bytes).map(|_| {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 24) as u8
    }));
    fs::write(dir.join("model.safetensors"), file).unwrap();
    fs::write(dir.join("config.json"), "{}").unwrap();
}

#[test]
fn a_staged_directory_is_a_mirror_and_the_next_run_has_nothing_to_do() {
    let dir = scratch();
    let to = dir.path().join("new/mirror");
    let report = json(&stage(&fixture(), &to, &["--force", "--json"]));
    assert_eq!(report["complete"], true);
    assert_eq!(report["copied"].as_array().unwrap().len(), 3);
    assert_same(&fixture(), &to);
    let (model, mirror) = (fixture(), to.to_str().unwrap());
    let args = [
        "verify",
        "--model",
        model.to_str().unwrap(),
        "--mirror",
        mirror,
    ];
    assert!(command(&args).output().unwrap().status.success());
    let inode = |name: &str| fs::metadata(to.join(name)).unwrap().ino();
    let before = inode("model-00001-of-00003.safetensors");
    let report = json(&stage(&fixture(), &to, &["--force", "--json"]));
    assert_eq!(report["bytes"], 0);
    assert_eq!(report["already_there"].as_array().unwrap().len(), 3);
    assert_eq!(inode("model-00001-of-00003.safetensors"), before);
}

#[test]
fn a_budget_leaves_shards_out_and_a_dry_run_writes_nothing() {
    let dir = scratch();
    let to = dir.path().join("mirror");
    let first = fixture().join("model-00001-of-00003.safetensors");
    let budget = fs::metadata(first).unwrap().len().to_string();
    let args = ["--force", "--budget", &budget, "--json"];
    let report = json(&stage(
        &fixture(),
        &to,
        &["--budget", &budget, "--json", "--dry-run"],
    ));
    assert_eq!(report["copied"][0], "model-00001-of-00003.safetensors");
    assert!(!to.exists());
    let report = json(&stage(&fixture(), &to, &args));
    assert_eq!(report["copied"].as_array().unwrap().len(), 1);
    assert_eq!(report["left_out"].as_array().unwrap().len(), 2);
    let shards = names(&to)
        .into_iter()
        .filter(|name| name.ends_with(".safetensors"));
    assert_eq!(shards.count(), 1);
    // Existing copies count.
    assert_eq!(json(&stage(&fixture(), &to, &args))["bytes"], 0);
}

#[test]
fn what_differs_is_refused_by_name_and_left_alone() {
    for (name, bytes) in [
        ("model-00002-of-00003.safetensors", "else"),
        ("config.json", "{}"),
    ] {
        let dir = scratch();
        fs::write(dir.path().join(name), bytes).unwrap();
        let output = stage(&fixture(), dir.path(), &["--force"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(name), "{}", stderr(&output));
        assert_eq!(names(dir.path()), [name], "nothing was copied");
        assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), bytes);
    }
}

#[test]
fn places_that_make_no_sense_are_refused() {
    let model = scratch();
    large(model.path(), 1000);
    let inside = model.path().join("inside");
    let file = model.path().join("config.json");
    let same_drive = scratch();
    let refused = [
        (model.path(), "own directory"),
        (&inside, "inside it"),
        (&file, "no directory"),
        (same_drive.path(), "--force"),
    ];
    for (to, why) in refused {
        let output = stage(model.path(), to, &[]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
    assert_eq!(names(model.path()), ["config.json", "model.safetensors"]);
    assert!(names(same_drive.path()).is_empty());
}

/// Waits until a copy has begun. Returns the length of its unfinished file.
fn wait_for_part(child: &mut Child, to: &Path) -> u64 {
    let part = to.join(".model.safetensors.colibri-part");
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end && child.try_wait().unwrap().is_none() {
        match fs::metadata(&part) {
            Ok(meta) if meta.len() > 0 => return meta.len(),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    0
}

#[test]
fn a_run_that_is_killed_or_interrupted_is_continued() {
    let model = scratch();
    large(model.path(), 96 << 20);
    for signal in ["KILL", "INT"] {
        let dir = scratch();
        let to = dir.path().join("mirror");
        let args = [
            "stage",
            "--model",
            model.path().to_str().unwrap(),
            "--force",
        ];
        let mut child = command(&args)
            .args(["--to", to.to_str().unwrap()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let begun = wait_for_part(&mut child, &to);
        let pid = child.id().to_string();
        let _ = std::process::Command::new("kill")
            .args(["-s", signal, &pid])
            .status();
        let status = child.wait().unwrap();
        if status.success() || begun == 0 {
            println!("skipped: it was done before it was ended");
            continue;
        }
        assert!(!to.join("model.safetensors").exists());
        if signal == "INT" {
            assert_eq!(status.code(), Some(130));
        }
        let report = json(&stage(model.path(), &to, &["--force", "--json"]));
        assert!(
            report["bytes"].as_u64().unwrap() < 96 << 20,
            "it began anew: {report}"
        );
        assert_same(model.path(), &to);
    }
}

#[test]
fn an_unfinished_file_of_something_else_is_written_anew() {
    let (model, to) = (scratch(), scratch());
    large(model.path(), 9 << 20);
    let part = to.path().join(".model.safetensors.colibri-part");
    for len in [1, 5 << 20, 9 << 20, 20 << 20] {
        fs::write(&part, vec![7; len]).unwrap();
        let output = stage(model.path(), to.path(), &["--force"]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_same(model.path(), to.path());
        fs::remove_file(to.path().join("model.safetensors")).unwrap();
    }
    // The target of a link is not written.
    let victim = model.path().join("victim");
    fs::write(&victim, "mine").unwrap();
    std::os::unix::fs::symlink(&victim, &part).unwrap();
    fs::remove_file(to.path().join("config.json")).unwrap();
    let output = stage(model.path(), to.path(), &["--force"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
}

/// A small file system in memory, unmounted on drop.
struct Small(tempfile::TempDir);

impl Small {
    fn new(bytes: usize) -> Option<Small> {
        let dir = scratch();
        let options = format!("size={bytes}");
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "colibri-test"])
            .arg(dir.path())
            .stderr(Stdio::null())
            .status();
        mounted.is_ok_and(|s| s.success()).then(|| Small(dir))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("--lazy")
            .arg(self.0.path())
            .status();
    }
}

#[test]
fn a_full_drive_is_one_error_and_a_budget_helps() {
    let Some(small) = Small::new(12 << 20) else {
        println!("skipped: no tmpfs can be mounted here");
        return;
    };
    let model = scratch();
    large(model.path(), 20 << 20);
    let to = small.0.path();
    let output = stage(model.path(), to, &[]);
    assert_eq!(output.status.code(), Some(1));
    let error = stderr(&output);
    let lines = error.lines().filter(|line| line.starts_with("error:"));
    assert!(
        lines.count() == 1 && error.contains("free") && error.contains("--budget"),
        "{error}"
    );
    assert!(names(to).is_empty());
    let output = stage(model.path(), to, &["--budget", "10MiB"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(names(to), ["config.json"]);
    // A shard that fits is copied, without the warning about one drive.
    large(model.path(), 8 << 20);
    let output = stage(model.path(), to, &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_same(model.path(), to);
}

#[test]
fn another_model_of_the_same_shape_is_no_copy() {
    let (model, to) = (scratch(), scratch());
    large(model.path(), 5 << 20);
    assert!(
        stage(model.path(), to.path(), &["--force"])
            .status
            .success()
    );
    let path = to.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let start = bytes.len() - (5 << 20);
    bytes[start..].iter_mut().for_each(|byte| *byte ^= 1);
    fs::write(&path, &bytes).unwrap();
    let output = stage(model.path(), to.path(), &["--force"]);
    assert_eq!(output.status.code(), Some(1));
    let error = stderr(&output);
    assert!(
        error.contains("differs from") && error.contains("model.safetensors"),
        "{error}"
    );
    assert!(fs::read(&path).unwrap() == bytes);
}
