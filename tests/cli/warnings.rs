//! Warnings while an answer is printed.

use std::io::{Read, Seek};

use crate::common::Saved;
use crate::process::{finish, on_model};

/// The indexer's warning comes at a token beyond the prompt.
const ARGS: [&str; 6] = ["--dsa", "off", "--prompt-ids", "1,2,3", "-n", "80"];

#[test]
fn a_warning_begins_a_line_and_does_not_break_one() {
    let dirs = Saved::named("f16-long").dirs;
    let alone = finish(on_model("decode", &dirs, &ARGS));
    let answer = String::from_utf8(alone.stdout).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    let status = on_model("decode", &dirs, &ARGS)
        .stdout(file.try_clone().unwrap())
        .stderr(file.try_clone().unwrap())
        .status()
        .unwrap();
    assert!(status.success());
    let mut both = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut both).unwrap();
    let warning = both.lines().find(|line| line.contains("WARN"));
    assert!(warning.unwrap().trim_start().starts_with("WARN"), "{both}");
    assert!(both.contains(&answer), "{both}");
}
