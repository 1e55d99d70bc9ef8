//! `man` and `completions`.

use std::fs;

use crate::process::{colibri, error_of, finish};

#[test]
fn a_page_for_every_command_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = colibri();
    command.arg("man").arg("--dir").arg(dir.path());
    assert!(finish(command).status.success());
    for name in ["", "-decode", "-chat", "-mirror-verify", "-completions"] {
        let path = dir.path().join(format!("colibri-uring{name}.1"));
        let page = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert!(page.contains(".TH "), "{name}");
    }
    let mut command = colibri();
    command.args(["man", "--dir", "/dev/null/pages"]);
    let error = error_of(&finish(command));
    assert!(error.contains("/dev/null/pages"), "{error}");
}

#[test]
fn the_main_page_and_completions_are_printed() {
    for args in [
        &["man"][..],
        &["completions", "bash"],
        &["completions", "fish"],
    ] {
        let mut command = colibri();
        command.args(args);
        let output = finish(command);
        assert!(output.status.success(), "{args:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(
            text.contains("decode") && text.contains("mirror"),
            "{args:?}"
        );
    }
}
