//! Interrupted conversions, full disks and wrong directories.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::Saved;
use crate::convert::{convert, shards};
use crate::corrupt::Broken;
use crate::process::{error_of, finish, json_of, stderr};

/// Many shards, so that the kill comes at many points.
const SMALL: [&str; 2] = ["--shard-size", "6KiB"];

fn content(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let read = |path: PathBuf| {
        let name = path.file_name().unwrap().into();
        (name, fs::read(&path).unwrap())
    };
    shards(dir).into_iter().map(read).collect()
}

/// The files of an undisturbed conversion.
fn undisturbed(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = tempfile::tempdir().unwrap();
    let output = finish(convert(&Saved::named(name).dirs, dir.path(), &SMALL));
    assert!(output.status.success(), "{}", stderr(&output));
    content(dir.path())
}

/// Runs a conversion and kills it after `finished` shards.
fn kill_at(mut command: Command, out: &Path, finished: usize) {
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        let enough = out.exists() && shards(out).len() >= finished;
        if enough || start.elapsed() > Duration::from_secs(20) {
            // SIGKILL.
            child.kill().unwrap();
        }
        std::thread::yield_now();
    }
}

#[test]
fn what_was_killed_goes_on() {
    for delete in [false, true] {
        for name in ["bf16-shared", "fp8-block"] {
            let whole = undisturbed(name);
            let source = Broken::copy(name);
            let dirs = [source.path().to_path_buf()];
            let before = content(source.path());
            let out = tempfile::tempdir().unwrap();
            let mut args = SMALL.to_vec();
            args.extend(delete.then_some("--delete-source"));
            for finished in [0, 1, whole.len() / 3, whole.len() / 2, whole.len() - 1] {
                kill_at(convert(&dirs, out.path(), &args), out.path(), finished);
                // Every file under a final name is whole, and the remaining source is unchanged.
                for file in content(out.path()) {
                    assert!(whole.contains(&file), "{name}: {:?}", file.0);
                }
                let left = content(source.path());
                assert!(left.iter().all(|file| before.contains(file)));
                assert!(delete || left == before);
            }
            let said = json_of(&finish(convert(
                &dirs,
                out.path(),
                &[&args[..], &["--json"]].concat(),
            )));
            assert_eq!(said["shards"], whole.len());
            assert_eq!(content(out.path()), whole, "{name}");
            assert_eq!(shards(source.path()).is_empty(), delete);
            let parts = fs::read_dir(out.path()).unwrap();
            let hidden = parts.filter(|e| {
                let name = e.as_ref().unwrap().file_name();
                name.to_str().unwrap().ends_with(".part")
            });
            assert_eq!(hidden.count(), 0);
            // Without any source file there is nothing to do, which is no error.
            let again = finish(convert(&dirs, out.path(), &args));
            assert!(again.status.success(), "{}", stderr(&again));
        }
    }
}

/// The manifest is written first, under its temporary name.
#[test]
fn what_was_killed_before_the_manifest_was_complete_begins_again() {
    let out = tempfile::tempdir().unwrap();
    fs::write(out.path().join("..convert.json.part"), "{\"ver").unwrap();
    let dirs = Saved::named("bf16-shared").dirs;
    let output = finish(convert(&dirs, out.path(), &SMALL));
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(content(out.path()) == undisturbed("bf16-shared"));
}

#[test]
fn an_interrupted_container_is_not_mistaken_for_a_model() {
    let model = Saved::named("bf16-shared");
    let out = tempfile::tempdir().unwrap();
    assert!(
        finish(convert(&model.dirs, out.path(), &SMALL))
            .status
            .success()
    );
    fs::remove_file(&shards(out.path())[3]).unwrap();
    let run = crate::process::on_model("decode", &[out.path().into()], &["--prompt-ids", "3"]);
    let error = error_of(&finish(run));
    assert!(error.contains("incomplete"), "{error}");
}

#[test]
fn other_options_or_another_source_are_refused() {
    let source = Broken::copy("bf16-shared");
    let dirs = [source.path().to_path_buf()];
    let out = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| finish(convert(&dirs, out.path(), args));
    assert!(run(&SMALL).status.success());
    let removed = &shards(out.path())[1];
    fs::remove_file(removed).unwrap();
    for (args, named) in [
        (&["--shard-size", "2"][..], "--shard-size"),
        (&["--shard-size", "0"], "--shard-size must be more than 0"),
        (&["--shard-size", "6KiB", "--experts", "int8"], "--experts"),
        (&["--shard-size", "6KiB", "--mtp", "keep"], "--mtp"),
    ] {
        let error = error_of(&run(args));
        assert!(error.contains(named), "{error}");
    }
    assert!(!removed.exists());
    // One more tensor in a source file.
    let path = &shards(source.path())[0];
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.iter().position(|b| *b == b'"').unwrap();
    bytes[at + 1] = b'X';
    fs::write(path, bytes).unwrap();
    let error = error_of(&run(&SMALL));
    assert!(error.contains("changed"), "{error}");
}

#[test]
fn foreign_files_are_left_alone() {
    let model = Saved::named("bf16-shared");
    let out = tempfile::tempdir().unwrap();
    let run = |out: &Path| error_of(&finish(convert(&model.dirs, out, &SMALL)));
    fs::write(out.path().join("thesis.txt"), "precious").unwrap();
    assert!(run(out.path()).contains("not empty"));
    fs::remove_file(out.path().join("thesis.txt")).unwrap();
    assert!(
        finish(convert(&model.dirs, out.path(), &SMALL))
            .status
            .success()
    );
    let shard = &shards(out.path())[2];
    fs::write(shard, "precious").unwrap();
    assert!(run(out.path()).contains("is not what this conversion writes"));
    assert_eq!(fs::read(shard).unwrap(), b"precious");
    // The source itself, under another spelling.
    let source = Broken::copy("bf16-shared");
    let spelt = source.path().join(".");
    let dirs = [source.path().to_path_buf()];
    let error = error_of(&finish(convert(&dirs, &spelt, &["--delete-source"])));
    assert!(error.contains("directory of the checkpoint"), "{error}");
    // An edited state file.
    fs::remove_file(shard).unwrap();
    let notes = out.path().join(".convert.json");
    let text = fs::read_to_string(&notes).unwrap();
    for (from, to) in [
        ("\"name\":\"model-0", "\"name\":\"../model-0"),
        ("\"rows\":", "\"rows\":9"),
        ("\"offset\":", "\"offset\":99999999999"),
        ("\"file\":", "\"file\":7"),
        ("\"shape\":[", "\"shape\":[7,"),
        ("{", ""),
    ] {
        assert!(text.contains(from), "{from}");
        fs::write(&notes, text.replacen(from, to, 1)).unwrap();
        let error = run(out.path());
        assert!(error.contains("notes of a conversion"), "{from}: {error}");
    }
}

#[test]
fn links_are_not_removed() {
    let source = Broken::copy("bf16-shared");
    let linked = tempfile::tempdir().unwrap();
    fs::copy(
        source.file("config.json"),
        linked.path().join("config.json"),
    )
    .unwrap();
    for path in source.shards() {
        let to = linked.path().join(path.file_name().unwrap());
        std::os::unix::fs::symlink(&path, to).unwrap();
    }
    let out = linked.path().join("out");
    let dirs = [linked.path().to_path_buf()];
    let error = error_of(&finish(convert(&dirs, &out, &["--delete-source"])));
    assert!(error.contains("is a link"), "{error}");
    assert_eq!(source.shards().len(), 3);
    // Without --delete-source links are accepted.
    assert!(finish(convert(&dirs, &out, &[])).status.success());
}

/// A small file system in memory; `None` if the tests may not mount one.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(options: &str) -> Option<Mounted> {
        let dir = tempfile::tempdir().unwrap();
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(dir.path())
            .stderr(Stdio::null())
            .status();
        let mounted = status.is_ok_and(|status| status.success());
        if !mounted {
            println!("skipped: no right to mount a file system");
        }
        mounted.then(|| Mounted(dir))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_disk_that_is_too_small_is_refused_with_numbers() {
    let Some(disk) = Mounted::new("size=100k") else {
        return;
    };
    let out = disk.0.path().join("out");
    let model = Saved::named("bf16-shared");
    let error = error_of(&finish(convert(&model.dirs, &out, &[])));
    for part in ["100.0 KiB free", "207.8 KiB are needed", "--delete-source"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!out.exists());
}

#[test]
fn a_disk_that_is_full_in_the_middle_leaves_nothing_half_done() {
    // Few inodes, many bytes: full as well.
    let Some(disk) = Mounted::new("size=50m,nr_inodes=16") else {
        return;
    };
    let out = disk.0.path().join("out");
    let model = Saved::named("bf16-shared");
    let error = error_of(&finish(convert(&model.dirs, &out, &SMALL)));
    assert!(error.contains("No space left"), "{error}");
    let whole = undisturbed("bf16-shared");
    let done = content(&out);
    assert!(!done.is_empty() && done.iter().all(|file| whole.contains(file)));
    let names = fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name());
    assert!(
        names
            .into_iter()
            .all(|name| !name.to_str().unwrap().ends_with(".part"))
    );
    // With space it resumes.
    let remount = Command::new("mount")
        .args(["-o", "remount,nr_inodes=1000"])
        .arg(disk.0.path())
        .status();
    if remount.is_ok_and(|status| status.success()) {
        assert!(finish(convert(&model.dirs, &out, &SMALL)).status.success());
        assert_eq!(content(&out), whole);
    }
}

/// Other weights under the same header, names and times.
fn other_weights(path: &Path) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    let mut bytes = fs::read(path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(path, bytes).unwrap();
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(modified).unwrap();
}

#[test]
fn a_source_that_was_never_converted_is_not_removed() {
    for touch_only in [false, true] {
        let source = Broken::copy("bf16-shared");
        let dirs = [source.path().to_path_buf()];
        let out = tempfile::tempdir().unwrap();
        assert!(finish(convert(&dirs, out.path(), &SMALL)).status.success());
        let path = &shards(source.path())[1];
        if touch_only {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_modified(std::time::SystemTime::UNIX_EPOCH)
                .unwrap();
        } else {
            other_weights(path);
        }
        let before = content(source.path());
        for finished in [true, false] {
            if !finished {
                fs::remove_file(&shards(out.path())[2]).unwrap();
            }
            let args = [&SMALL[..], &["--delete-source"]].concat();
            let error = error_of(&finish(convert(&dirs, out.path(), &args)));
            for part in [
                path.to_str().unwrap(),
                "changed",
                ".convert.json",
                "another output",
            ] {
                assert!(error.contains(part), "{error}");
            }
            assert_eq!(content(source.path()), before);
        }
    }
}

#[test]
fn a_damaged_shard_is_made_again_before_its_source_is_removed() {
    let whole = undisturbed("bf16-shared");
    for lost in [false, true] {
        let source = Broken::copy("bf16-shared");
        let dirs = [source.path().to_path_buf()];
        let out = tempfile::tempdir().unwrap();
        assert!(finish(convert(&dirs, out.path(), &SMALL)).status.success());
        if lost {
            fs::remove_file(out.path().join(".convert.sums.json")).unwrap();
        }
        let shard = &shards(out.path())[3];
        let mut bytes = fs::read(shard).unwrap();
        let at = bytes.len() - 100;
        bytes[at] ^= 0x10;
        fs::write(shard, bytes).unwrap();
        let args = [&SMALL[..], &["--delete-source"]].concat();
        let output = finish(convert(&dirs, out.path(), &args));
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(stderr(&output).contains("damaged"), "{}", stderr(&output));
        assert_eq!(content(out.path()), whole);
        assert!(shards(source.path()).is_empty());
    }
}

#[test]
fn a_damaged_shard_without_its_source_is_an_error() {
    let source = Broken::copy("bf16-shared");
    let dirs = [source.path().to_path_buf()];
    let out = tempfile::tempdir().unwrap();
    // One shard, which needs every file.
    assert!(finish(convert(&dirs, out.path(), &[])).status.success());
    let gone = &shards(source.path())[0];
    fs::remove_file(gone).unwrap();
    let shard = &shards(out.path())[0];
    let mut bytes = fs::read(shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(shard, bytes).unwrap();
    let before = content(source.path());
    let error = error_of(&finish(convert(&dirs, out.path(), &["--delete-source"])));
    for path in [shard, gone] {
        assert!(error.contains(path.to_str().unwrap()), "{error}");
    }
    assert_eq!(content(source.path()), before);
}

#[test]
fn what_lies_under_a_temporary_name_is_not_written_through() {
    let source = Broken::copy("bf16-shared");
    let dirs = [source.path().to_path_buf()];
    let victim = &shards(source.path())[0];
    let before = content(source.path());
    let out = tempfile::tempdir().unwrap();
    assert!(finish(convert(&dirs, out.path(), &[])).status.success());
    fs::remove_file(&shards(out.path())[0]).unwrap();
    let part = out.path().join(".model.safetensors.part");
    type Put = fn(&Path, &Path);
    let things: [Put; 3] = [
        |victim, part| std::os::unix::fs::symlink(victim, part).unwrap(),
        |victim, part| fs::hard_link(victim, part).unwrap(),
        |_, part| crate::corrupt::mkfifo(part),
    ];
    for put in things {
        put(victim, &part);
        let error = error_of(&finish(convert(&dirs, out.path(), &[])));
        assert!(
            error.contains(part.to_str().unwrap()) && error.contains("remove it"),
            "{error}"
        );
        assert_eq!(content(source.path()), before);
        fs::remove_file(&part).unwrap();
    }
}

#[test]
fn notes_with_absurd_numbers_are_refused() {
    let model = Saved::named("bf16-shared");
    let out = tempfile::tempdir().unwrap();
    assert!(
        finish(convert(&model.dirs, out.path(), &SMALL))
            .status
            .success()
    );
    let path = out.path().join(".convert.json");
    let notes: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    fs::remove_file(&shards(out.path())[0]).unwrap();
    type Change = fn(&mut serde_json::Value);
    let changes: [Change; 5] = [
        |notes| notes["shards"] = serde_json::json!([]),
        |notes| notes["shards"][0]["items"] = serde_json::json!([]),
        |notes| notes["shards"][1] = notes["shards"][0].clone(),
        |notes| notes["sources"][1] = notes["sources"][0].clone(),
        // No columns: no bytes, however many rows.
        |notes| {
            let item = &mut notes["shards"][0]["items"][0];
            item["work"]["Convert"]["rows"] = (1u64 << 60).into();
            item["work"]["Convert"]["cols"] = 0.into();
            item["weights"]["shape"] = serde_json::json!([0]);
            item["scales"]["shape"] = serde_json::json!([1u64 << 60]);
            item["from"]["bytes"] = 0.into();
        },
    ];
    for change in changes {
        let mut changed = notes.clone();
        change(&mut changed);
        assert_ne!(changed, notes);
        fs::write(&path, changed.to_string()).unwrap();
        let error = error_of(&finish(convert(&model.dirs, out.path(), &SMALL)));
        assert!(error.contains("no notes of a conversion"), "{error}");
    }
}

#[test]
fn one_process_at_a_time_writes_a_container() {
    let model = Saved::named("bf16-shared");
    let out = tempfile::tempdir().unwrap();
    let other = fs::File::open(out.path()).unwrap();
    other.lock().unwrap();
    let error = error_of(&finish(convert(&model.dirs, out.path(), &SMALL)));
    assert!(error.contains("another process is writing"), "{error}");
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
    drop(other);
    assert!(
        finish(convert(&model.dirs, out.path(), &SMALL))
            .status
            .success()
    );
}
