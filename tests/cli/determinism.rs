//! Settings and the machine's permissions decide how experts are read, and never a number: the logits have the
//! same digits, and tokens drawn from them are the same, whatever is set, denied or limited.

use std::process::Command;

use serde_json::Value;

use crate::common::Saved;
use crate::process::{error_of, finish, json_of, list, on_model, stderr};
use crate::sandbox::{deny, io_uring, limit_files, limit_memlock};

/// All element types, both layouts of experts, split directories, experts across shards, sparse attention over hundreds
/// of tokens.
const MODELS: [&str; 7] = [
    "bf16-split",
    "f16-fused-pattern",
    "f16-long",
    "f16-crossing",
    "f32-fused-freq-tied",
    "mixed-mtp",
    "mtp-agrees",
];

/// `score` of the ids that the reference scored.
fn score(model: &Saved, settings: &[&str]) -> Command {
    let ids = list(&model.ids("/score/ids"));
    let args = [&["--ids", &ids, "--json"], settings].concat();
    on_model("score", &model.dirs, &args)
}

/// `decode` of its prompt, drawing tokens so that every logit matters.
fn decode(model: &Saved, settings: &[&str]) -> Command {
    let ids = list(&model.ids("/prompt_ids"));
    let draw = ["-n", "12", "--temperature", "2", "--seed", "5", "--json"];
    let args = [&["--prompt-ids", &ids], &draw[..], settings].concat();
    on_model("decode", &model.dirs, &args)
}

/// The text of the last logits: the digits of a number are as many as tell it from its neighbours.
fn logits(stdout: &[u8]) -> String {
    let text = std::str::from_utf8(stdout).unwrap();
    let (_, rest) = text.split_once("\"last_logits\":[").unwrap();
    rest.split_once(']').unwrap().0.to_owned()
}

/// Logits, tokens and stats under `settings`, in a process that `change` has changed.
fn numbers(
    model: &Saved,
    settings: &[&str],
    change: impl Fn(&mut Command),
) -> (String, Value, Value) {
    let run = |mut command: Command| {
        change(&mut command);
        let output = finish(command);
        assert_eq!(stderr(&output), "", "{}", model.name);
        output
    };
    let scored = run(score(model, settings));
    let report = json_of(&run(decode(model, settings)));
    (
        logits(&scored.stdout),
        report["token_ids"].clone(),
        report["stats"].clone(),
    )
}

#[test]
fn settings() {
    let ring = io_uring();
    for model in MODELS.map(Saved::named) {
        let expected = numbers(&model, &[], |_| {});
        let direct = model.dirs.iter().all(|dir| {
            let report = colibri_ring::probe::direct::direct(dir);
            report.is_ok_and(|report| report.direct.is_ok())
        });
        if !direct {
            println!("skipped --direct on: no O_DIRECT on {:?}", model.dirs);
        }
        let settings: &[&[&str]] = &[
            &["--engine", "uring"],
            &["--engine", "pread"],
            &["--direct", "on"],
            &["--direct", "off"],
            &["--direct", "off", "--engine", "pread"],
            &["--lookahead", "off"],
            &["--lookahead", "1"],
            &["--lookahead", "5", "--cache-slots", "0"],
            &["--threads", "1"],
            &["--threads", "2"],
            &["--threads", "3", "--engine", "pread", "--lookahead", "off"],
            &["--cache-slots", "0"],
            &["--cache-slots", "1"],
            &["--cache-slots", "18446744073709551615"],
            &["--ram", "64MiB"],
        ];
        for &settings in settings {
            if !direct && settings.contains(&"on") || !ring && settings.contains(&"uring") {
                continue;
            }
            let found = numbers(&model, settings, |_| {});
            assert!(found.0 == expected.0, "{} {settings:?}", model.name);
            assert_eq!(found.1, expected.1, "{} {settings:?}", model.name);
            if let ["--engine", engine] = settings {
                assert_eq!(found.2["engine"], *engine);
            }
            if let ["--direct", direct] = settings {
                assert_eq!(found.2["direct"], *direct == "on");
            }
        }
    }
}

/// The usage history decides which experts are pinned.
#[test]
fn history_and_pins() {
    for name in ["bf16-shared", "f16-long", "container-mixed"] {
        let shipped = Saved::named(name);
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for entry in std::fs::read_dir(&shipped.dirs[0]).unwrap() {
            let path = entry.unwrap().path();
            // Another run on the fixture may have left a history.
            if path.extension().is_some() {
                std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        let model = Saved {
            dirs: vec![dir.path().to_path_buf()],
            ..Saved::named(name)
        };
        let expected = numbers(&shipped, &[], |_| {});
        let with_history = |command: &mut Command| {
            command.env_remove("COLIBRI_NO_USAGE");
        };
        let settings: [&[&str]; 5] = [
            &["--cache-slots", "6"],
            &["--cache-slots", "6", "--pin-share", "100%"],
            &[
                "--cache-slots",
                "2",
                "--pin-share",
                "0.5",
                "--lookahead",
                "3",
            ],
            &["--cache-slots", "0", "--pin-share", "100%"],
            &["--pin-share", "100%", "--engine", "pread", "--threads", "1"],
        ];
        for (run, settings) in settings.into_iter().enumerate() {
            let (logits, tokens, stats) = numbers(&model, settings, with_history);
            assert!(logits == expected.0, "{name} {settings:?}");
            assert_eq!(tokens, expected.1, "{name} {settings:?}");
            // The first run scored with the same settings.
            assert_eq!(stats["usage_runs"], 2 * run + 1);
            let pinned = stats["pinned"].as_u64().unwrap();
            assert_eq!(pinned > 0, !settings.contains(&"0"), "{name} {settings:?}");
        }
    }
}

#[test]
fn io_uring_denied() {
    for model in MODELS.map(Saved::named) {
        let expected = numbers(&model, &[], |_| {});
        for (call, errno) in [
            (libc::SYS_io_uring_setup, libc::EPERM),
            (libc::SYS_io_uring_setup, libc::ENOSYS),
            (libc::SYS_io_uring_enter, libc::EPERM),
        ] {
            let denied = |command: &mut Command| deny(command, call, errno);
            let (logits, tokens, stats) = numbers(&model, &[], denied);
            assert!(logits == expected.0, "{}", model.name);
            assert_eq!(tokens, expected.1);
            assert_eq!(stats["engine"], "pread");
            // auto warns, pread does not, and uring fails.
            let said = |settings| {
                let mut command = decode(&model, settings);
                denied(&mut command);
                String::from_utf8(finish(command).stderr).unwrap()
            };
            assert_eq!(said(&["--engine", "pread"]), "");
            let warning = said(&[]);
            assert_eq!(warning.lines().count(), 1, "{warning}");
            assert!(
                warning.contains("io_uring") && warning.contains("pread"),
                "{warning}"
            );
            assert!(!warning.contains("EngineKind"), "{warning}");
            let mut insisting = decode(&model, &["--engine", "uring"]);
            denied(&mut insisting);
            let error = error_of(&finish(insisting));
            assert!(error.contains("io_uring is not available"), "{error}");
        }
    }
}

#[test]
fn little_or_no_locked_memory() {
    let ring = io_uring();
    for model in MODELS.map(Saved::named) {
        let expected = numbers(&model, &[], |_| {});
        for bytes in [8 << 20, 1 << 20, 0] {
            let limited = |command: &mut Command| limit_memlock(command, bytes);
            let (logits, tokens, _) = numbers(&model, &[], limited);
            assert!(logits == expected.0, "{} at {bytes}", model.name);
            assert_eq!(tokens, expected.1);
            if !ring {
                continue;
            }
            let mut command = decode(&model, &[]);
            limited(&mut command);
            let output = finish(command);
            let warning = String::from_utf8(output.stderr).unwrap();
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            let engine = &report["stats"]["engine"];
            println!("{bytes} bytes: {engine}: {warning}");
            // 8 MiB are enough for a fixture if no other process of this user holds a part of them.
            assert!(warning.lines().count() <= 1, "{warning}");
            assert!(
                warning.is_empty() || warning.contains("ulimit -l"),
                "{warning}"
            );
            assert!(engine == "uring" || !warning.is_empty());
            assert!(bytes > 0 || !warning.is_empty());
        }
    }
}

#[test]
fn few_descriptors() {
    let model = Saved::named("bf16-split");
    let expected = numbers(&model, &[], |_| {});
    let mut succeeded = 0;
    // Fewer do not even load the program's libraries.
    for files in (4..24).chain([32, 64]) {
        let mut command = score(&model, &[]);
        limit_files(&mut command, files);
        let output = finish(command);
        if output.status.success() {
            assert!(logits(&output.stdout) == expected.0);
            assert_eq!(stderr(&output), "");
            succeeded += 1;
            continue;
        }
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{files}: {text}");
        assert!(output.stdout.is_empty());
        let errors = text.lines().filter(|line| line.starts_with("error: "));
        assert_eq!(errors.count(), 1, "{files}: {text}");
        assert!(!text.contains("panicked"), "{files}: {text}");
    }
    assert!(succeeded > 0, "64 descriptors are enough");
}
