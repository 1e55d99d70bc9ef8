//! Environment variables stand for a few flags. Flags override variables; a conflicting variable is ignored.

use std::process::{Output, Stdio};

use crate::common::Saved;
use crate::corrupt::Broken;
use crate::process::{colibri, finish, json_of, on_model, stderr};

/// `decode` with these variables.
fn decode(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let args = [args, &["--json"]].concat();
    let mut command = on_model("decode", &Saved::named("bf16-shared").dirs, &args);
    command.envs(variables.iter().copied()).stdin(Stdio::null());
    finish(command)
}

fn is_wrong_usage(output: &Output) {
    assert_eq!(output.status.code(), Some(2), "{}", stderr(output));
}

const THREE: [&str; 4] = ["--prompt-ids", "3,4", "-n", "3"];

#[test]
fn a_variable_stands_for_its_flag() {
    let dir = &Saved::named("bf16-shared").dirs[0];
    let mut doctor = colibri();
    doctor.args(["doctor", "--json"]).env("COLIBRI_MODEL", dir);
    let report = json_of(&finish(doctor));
    let copy = Broken::copy("bf16-shared");
    assert_eq!(report["checks"][5]["details"]["dir"], dir.to_str().unwrap());
    let report = json_of(&decode(
        &THREE,
        &[("COLIBRI_MIRROR", copy.path().to_str().unwrap())],
    ));
    assert_eq!(report["stats"]["replicas"].as_array().unwrap().len(), 2);
    for variable in ["COLIBRI_RAM", "COLIBRI_THREADS", "COLIBRI_VERBOSE"] {
        is_wrong_usage(&decode(&THREE, &[(variable, "much")]));
    }
}

#[test]
fn flags_override_variables() {
    let variables = [("COLIBRI_RAM", "1KiB"), ("COLIBRI_THREADS", "0")];
    let flags = [&THREE[..], &["--ram", "1GiB", "--threads", "1"]].concat();
    json_of(&decode(&flags, &variables));
}

#[test]
fn a_conflicting_variable_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (ids, kv) = (file("ids"), file("kv"));
    std::fs::write(&ids, "3 4 5 6 7 8").unwrap();
    let replay = ["--replay", &ids];
    let report = json_of(&decode(&replay, &[("COLIBRI_KV", &kv)]));
    assert_eq!(report["token_ids"].as_array().unwrap().len(), 2);
    assert!(!std::path::Path::new(&kv).exists());
    // Two flags that conflict are wrong usage.
    is_wrong_usage(&decode(&[&replay[..], &["--kv", &kv]].concat(), &[]));
    // COLIBRI_NO_KV, which every test sets, conflicts with `chat --kv`.
    let mut chat = on_model("chat", &Saved::named("chat").dirs, &["--kv", &kv]);
    chat.stdin(Stdio::null());
    assert!(finish(chat).status.success());
    assert!(std::path::Path::new(&kv).exists());
    // Of two variables, the one that forbids counts.
    std::fs::remove_file(&kv).unwrap();
    let mut chat = on_model("chat", &Saved::named("chat").dirs, &[]);
    chat.stdin(Stdio::null()).env("COLIBRI_KV", &kv);
    assert!(finish(chat).status.success());
    assert!(!std::path::Path::new(&kv).exists());
    let mut profile = colibri();
    profile.args([
        "profile",
        "--file",
        &ids,
        "--seconds",
        "0.05",
        "--direct",
        "off",
    ]);
    profile.args([
        "--engine",
        "pread",
        "--block-size",
        "4",
        "--queue-depth",
        "1",
    ]);
    profile.env("COLIBRI_MODEL", "/nowhere");
    let said = stderr(&finish(profile));
    assert!(
        !said.contains("/nowhere") && !said.contains("cannot be used"),
        "{said}"
    );
}
