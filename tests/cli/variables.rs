//! Variables stand for flags, and give way to them; what is meant for another command is left to it.

use std::process::{Output, Stdio};

use crate::common::Saved;
use crate::process::{colibri, finish, json_of, on_model, stderr};

/// `decode`, with these variables.
fn decode(model: &str, args: &[&str], variables: &[(&str, &str)]) -> Output {
    let args = [&["--prompt-ids", "3,4", "-n", "5", "--json"], args].concat();
    let mut command = on_model("decode", &Saved::named(model).dirs, &args);
    command.envs(variables.iter().copied()).stdin(Stdio::null());
    finish(command)
}

#[test]
fn a_value_for_another_command_counts_as_not_set() {
    let model = Saved::named("bf16-shared").dirs.remove(0);
    let out = tempfile::tempdir().unwrap();
    let convert = |args: &[&str], (name, value)| {
        let mut command = colibri();
        command
            .arg("convert")
            .arg(&model)
            .arg(out.path().join("new"));
        command
            .args(["--dry-run", "--json"])
            .args(args)
            .env(name, value);
        finish(command)
    };
    let profile = |value| {
        let read = ["--block-size", "4KiB", "--queue-depth", "1", "--json"];
        let args = [&read[..], &["--seconds", "0.05"]].concat();
        let mut command = on_model("profile", std::slice::from_ref(&model), &args);
        command.env("COLIBRI_ENGINE", value);
        finish(command)
    };
    let warned = |output: &Output, name: &str, command: &str| {
        json_of(output);
        let said = stderr(output);
        assert!(
            said.contains(&format!(
                "{name} has a value that `{command}` does not take"
            )),
            "{said}"
        );
    };
    warned(
        &convert(&[], ("COLIBRI_MTP", "2")),
        "COLIBRI_MTP",
        "convert",
    );
    warned(&profile("auto"), "COLIBRI_ENGINE", "profile");
    for (name, value) in [("COLIBRI_ENGINE", "all"), ("COLIBRI_MTP", "int4-g64")] {
        warned(
            &decode("bf16-shared", &[], &[(name, value)]),
            name,
            "decode",
        );
    }
    // Nobody is told of what does not matter.
    let output = convert(&["--mtp", "keep"], ("COLIBRI_MTP", "2"));
    json_of(&output);
    assert!(!stderr(&output).contains("COLIBRI_MTP"));
    // What no command takes is a mistake.
    for variable in [("COLIBRI_MTP", "twice"), ("COLIBRI_ENGINE", "steam")] {
        let output = decode("bf16-shared", &[], &[variable]);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    }
}

/// Also a flag with the very value that the variable has.
#[test]
fn what_is_given_is_not_taken_for_the_variable() {
    let same = [
        (
            "--mirror-weights",
            "COLIBRI_MIRROR_WEIGHTS",
            "1",
            "has 1 weight,",
        ),
        ("--system", "COLIBRI_SYSTEM", "s", "--system needs --chat"),
        (
            "--template-var",
            "COLIBRI_TEMPLATE_VAR",
            "a=b",
            "--template-var needs",
        ),
    ];
    for (flag, variable, value, why) in same {
        let mirror = ["--mirror", "/nowhere"];
        let output = decode("bf16-shared", &mirror, &[(variable, value)]);
        json_of(&output);
        let given = [&mirror[..], &[flag, value]].concat();
        let output = decode("bf16-shared", &given, &[(variable, value)]);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
}

#[test]
fn drafts_that_are_asked_for_come_before_a_recording_of_the_variable() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("routing");
    let path = file.to_str().unwrap();
    let drafted = |args: &[&str], variables: &[(&str, &str)]| {
        let output = decode("mtp-agrees", args, variables);
        let drafted = json_of(&output)["stats"]["mtp"]["drafted"]
            .as_u64()
            .unwrap();
        let said = stderr(&output).contains("--mtp is ignored");
        let recorded = std::fs::remove_file(&file).is_ok();
        (drafted > 0, recorded, said)
    };
    let (save, mtp) = (("COLIBRI_SAVE_ROUTING", path), ("COLIBRI_MTP", "2"));
    assert_eq!(drafted(&["--mtp", "2"], &[save]), (true, false, false));
    assert_eq!(drafted(&["--mtp", "off"], &[save]), (false, true, false));
    assert_eq!(drafted(&[], &[save, mtp]), (false, true, false));
    let given = ["--save-routing", path];
    assert_eq!(drafted(&given, &[mtp]), (false, true, false));
    let both = [&given[..], &["--mtp", "2"]].concat();
    assert_eq!(drafted(&both, &[]), (false, true, true));
}
