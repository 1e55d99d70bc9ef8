//! Checks that every bench's help says what it needs and how to run it.

use std::process::Command;

#[test]
fn every_bench_says_what_it_needs_and_gives_an_example() {
    for bench in [
        env!("CARGO_BIN_EXE_faults"),
        env!("CARGO_BIN_EXE_fio"),
        env!("CARGO_BIN_EXE_lab"),
        env!("CARGO_BIN_EXE_load"),
        env!("CARGO_BIN_EXE_machines"),
        env!("CARGO_BIN_EXE_overlap"),
        env!("CARGO_BIN_EXE_policies"),
        env!("CARGO_BIN_EXE_scaling"),
    ] {
        let output = Command::new(bench).arg("--help").output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        for part in ["Needs ", "Example", "Usage:"] {
            assert!(help.contains(part), "{bench}: {help}");
        }
        // What it is for comes first.
        assert!(!help.starts_with("Usage"), "{bench}: {help}");
    }
}
