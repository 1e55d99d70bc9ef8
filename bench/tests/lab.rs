//! Decoding while drives fail. Skipped where there is no root or there are no loop devices.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use colibri_bench::lab::Lab;
use serde_json::Value;

use common::{colibri, fixture, lab};

mod common;

const MIB: u64 = 1 << 20;

/// A drive with the fixture on it.
fn drive(lab: &mut Lab, rate: Option<u64>) -> usize {
    let drive = lab.add(48 * MIB, rate).unwrap();
    lab.copy_to(drive, &fixture()).unwrap();
    drive
}

/// Decodes many tokens without a cache, so that reads go on and on.
fn decode(lab: &Lab, program: &Path, n: &str, model: &Path, mirrors: &[&Path]) -> Child {
    let mut command = lab.command(program);
    // It would be looked for on the drive that breaks.
    command.env("COLIBRI_NO_USAGE", "1");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("COLIBRI_")) {
        command.env_remove(name);
    }
    command
        .env_remove("RUST_LOG")
        .arg("decode")
        .arg("--model")
        .arg(model);
    for mirror in mirrors {
        command.arg("--mirror").arg(mirror);
    }
    command.args([
        "--prompt-ids",
        "1,2,3",
        "-n",
        n,
        "--cache-slots",
        "0",
        "--json",
    ]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Waits until the process has read experts for a moment: the device counts the bytes.
fn wait_until_read(child: &Child, bytes: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while Instant::now() < deadline {
        let io = fs::read_to_string(format!("/proc/{}/io", child.id())).unwrap_or_default();
        let line = io.lines().find_map(|l| l.strip_prefix("read_bytes: "));
        if line.is_some_and(|n| n.trim().parse::<u64>().unwrap_or(0) > bytes) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("nothing is read");
}

/// The end of a process, which must come.
fn finish(mut child: Child) -> Output {
    let deadline = Instant::now() + Duration::from_secs(120);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("it hangs");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

fn json(output: &Output) -> Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn lines(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines().map(str::to_owned).collect()
}

/// Tokens that the fixture's window of positions allows, at a rate that makes this take a second or so.
const TOKENS: &str = "40";

/// Decodes with a mirror and breaks one of the two while it reads, which changes no token. The directory that broke, the report and what was
/// said; `None` where there can be no lab.
fn broken_in_the_middle(which: usize) -> Option<(PathBuf, Value, Vec<String>)> {
    let (mut lab, program) = (lab()?, colibri()?);
    let drives = [(); 2].map(|()| drive(&mut lab, Some(2 * MIB)));
    let quiet = json(&finish(decode(&lab, &program, TOKENS, &fixture(), &[])));
    let [primary, mirror] = drives.map(|drive| lab.path(drive));
    let child = decode(&lab, &program, TOKENS, primary, &[mirror]);
    wait_until_read(&child, MIB);
    lab.break_drive(drives[which]).unwrap();
    let output = finish(child);
    let report = json(&output);
    assert_eq!(report["token_ids"], quiet["token_ids"]);
    Some((lab.path(drives[which]).to_owned(), report, lines(&output)))
}

#[test]
fn a_mirror_that_breaks_in_the_middle_changes_nothing() {
    let Some((mirror, report, lines)) = broken_in_the_middle(1) else {
        return;
    };
    let replicas = &report["stats"]["replicas"];
    assert!(replicas[1]["errors"].as_u64().unwrap() > 0, "{replicas}");
    assert_eq!(replicas[0]["errors"], 0);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains(mirror.to_str().unwrap()), "{lines:?}");
}

#[test]
fn a_primary_that_breaks_in_the_middle_leaves_the_mirror() {
    let Some((_, _, lines)) = broken_in_the_middle(0) else {
        return;
    };
    assert_eq!(lines.len(), 1, "{lines:?}");
}

#[test]
fn the_only_copy_that_breaks_is_one_error_and_an_end() {
    let (Some(mut lab), Some(program)) = (lab(), colibri()) else {
        return;
    };
    let primary = drive(&mut lab, Some(2 * MIB));
    let child = decode(&lab, &program, TOKENS, lab.path(primary), &[]);
    wait_until_read(&child, MIB);
    lab.break_drive(primary).unwrap();
    let output = finish(child);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let lines = lines(&output);
    assert_eq!(lines.len(), 1, "{lines:?}");
    for part in [
        "error: ",
        "model.layers.",
        "experts",
        ".safetensors",
        "at offset",
    ] {
        assert!(lines[0].contains(part), "{lines:?}");
    }
}

#[test]
fn nothing_is_left_after_a_panic() {
    let Some(mut made) = lab() else { return };
    made.add(16 * MIB, None).unwrap();
    let place = made.path(0).to_owned();
    let thrown = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _lab = made;
        panic!("on purpose");
    }));
    assert!(thrown.is_err());
    assert!(!place.exists());
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    assert!(!mounts.contains(place.to_str().unwrap()));
    let devices = Command::new("losetup").arg("-a").output().unwrap();
    let devices = String::from_utf8_lossy(&devices.stdout).into_owned();
    assert!(!devices.contains(place.to_str().unwrap()), "{devices}");
}
