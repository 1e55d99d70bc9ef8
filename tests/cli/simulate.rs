//! `simulate`, from the user's side: no weight is read, and what it says follows from what it is told.

use serde_json::Value;

use crate::common::shipped;
use crate::process::{colibri, error_of, finish, json_of, on_model};

fn simulate(args: &[&str]) -> std::process::Output {
    finish(on_model("simulate", &[shipped().join("tiny-text")], args))
}

fn report(args: &[&str]) -> Value {
    json_of(&simulate(&[args, &["--json"]].concat()))
}

/// Drives so slow that the compute time does not matter.
const SLOW: [&str; 2] = ["--compute-rate", "100GB/s"];

#[test]
fn more_drives_and_more_memory_give_more_tokens() {
    let rate = |args: &[&str]| {
        let report = report(&[&SLOW, args].concat());
        report["tokens_per_second"].as_f64().unwrap()
    };
    let one = rate(&["--device", "1MiB/s@0us", "--cache-slots", "2"]);
    let two = rate(&["--device", "1MiB/s@0us,1MiB/s@0us", "--cache-slots", "2"]);
    let cached = rate(&["--device", "1MiB/s@0us", "--cache-slots", "12"]);
    // Experts are so small here that a read is hardly ever divided.
    assert!(two > 1.5 * one && two < 2.05 * one, "{one} {two}");
    assert!(cached > 1.5 * one, "{one} {cached}");
}

#[test]
fn the_bottleneck_is_named() {
    let of = |rate, device| {
        let report = report(&[
            "--compute-rate",
            rate,
            "--device",
            device,
            "--cache-slots",
            "0",
        ]);
        report["bottleneck"].as_str().unwrap().to_owned()
    };
    assert_eq!(of("100GB/s", "1MiB/s"), "drives");
    assert_eq!(of("1MB/s", "7GiB/s"), "compute");
    let printed = simulate(&[
        "--device",
        "1MiB/s",
        "--cache-slots",
        "0",
        "--compute-rate",
        "1GB/s",
    ]);
    let text = String::from_utf8(printed.stdout).unwrap();
    for says in ["tok/s", "drive 0", "limits", "bottleneck the drives"] {
        assert!(text.contains(says), "{text}");
    }
}

/// What was read ahead in time was read all the same.
#[test]
fn drives_are_limited_by_what_they_read() {
    let report = report(&[
        "--compute-rate",
        "1MB/s",
        "--device",
        "100MiB/s",
        "--cache-slots",
        "1",
        "--lookahead",
        "3",
    ]);
    let number = |value: &Value| value.as_f64().unwrap();
    // Many reads are prefetches that arrive in time.
    assert!(number(&report["expert_hits"]) > number(&report["expert_misses"]));
    let read = number(&report["expert_bytes_read"]) / number(&report["tokens"]);
    let by_bytes = 100.0 * f64::from(1 << 20) / read;
    let limit = number(&report["limits"]["drives_tokens_per_second"]);
    // The prompt was read, too.
    assert!((by_bytes..1.3 * by_bytes).contains(&limit), "{report}");
}

#[test]
fn recorded_routing_and_measured_arithmetic_are_used() {
    let dir = tempfile::tempdir().unwrap();
    let (ids, routing) = (dir.path().join("ids"), dir.path().join("routing"));
    std::fs::write(&ids, "1 2 3 4 5 6 7 8 9 10 11 12").unwrap();
    let (ids, routing) = (ids.to_str().unwrap(), routing.to_str().unwrap());
    let save = [
        "--replay",
        ids,
        "--save-routing",
        routing,
        "--cache-slots",
        "0",
    ];
    let model = [shipped().join("tiny-text")];
    assert!(finish(on_model("decode", &model, &save)).status.success());
    let run = || {
        report(&[
            "--routing",
            routing,
            "--device",
            "10MiB/s",
            "--cache-slots",
            "1",
        ])
    };
    let first = run();
    assert_eq!(
        (&first["routing"], &first["compute"]),
        (&"recorded".into(), &"measured".into())
    );
    assert_eq!(first["tokens"], 8);
    assert!(first.get("compute_bytes_per_second").is_none(), "{first}");
    assert_eq!(first, run(), "it depends on nothing else");
    // Routing of another model.
    let other = on_model(
        "simulate",
        &[shipped().join("f16-long")],
        &["--routing", routing, "--device", "1GB/s"],
    );
    let error = error_of(&finish(other));
    assert!(error.contains("of another model"), "{error}");
}

/// Numbers that mean nothing are no result.
#[test]
fn what_takes_no_time_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("routing.jsonl");
    let run = |lines: &[&str], more: &[&str]| {
        let header = r#"{"routing":1,"top_k":4,"experts":16,"layers":4}"#;
        std::fs::write(&path, [&[header], lines].concat().join("\n")).unwrap();
        let routing = ["--device", "1GiB/s", "--routing", path.to_str().unwrap()];
        let error = error_of(&simulate(&[&routing, more].concat()));
        assert!(error.contains("routing.jsonl"), "{error}");
        error
    };
    let token = r#"{"routed":{"layer":3,"experts":[0,1,2,3]}}"#;
    let instant = r#"{"measured":{"tokens":1,"seconds":{"experts":0}}}"#;
    assert!(run(&[], &[]).contains("of no token"));
    assert!(run(&[instant], &[]).contains("of no token"));
    assert!(run(&[token], &[]).contains("of a prompt, and of no token after it"));
    let error = run(&[token, token, instant], &[]);
    assert!(
        error.contains("no time") && error.contains("--compute-rate"),
        "{error}"
    );
    for args in [
        &["--compute-rate", "16000000000GB/s"][..],
        &["--ram", "0"],
        &["--ram", "1MiB"],
        &["--context", "0"],
    ] {
        let error = error_of(&simulate(&[&["--device", "1GiB/s"], args].concat()));
        assert!(!error.contains("null"), "{args:?}: {error}");
    }
    for device in ["0", "0GiB/s"] {
        assert_eq!(simulate(&["--device", device]).status.code(), Some(2));
    }
    for tokens in ["0", "1", "-3"] {
        let output = simulate(&["--device", "1GiB/s", "--tokens", tokens]);
        assert_eq!(output.status.code(), Some(2), "{tokens}");
    }
}

/// What is assumed of the arithmetic is said, and what was measured is not called an assumption.
#[test]
fn an_assumption_is_called_one() {
    let args = ["--device", "1GiB/s", "--cache-slots", "1"];
    let said = |more: &[&str]| {
        let output = simulate(&[&args, more].concat());
        String::from_utf8(output.stdout).unwrap()
    };
    for (rate, of) in [
        (&[][..], "as this machine, measured just now"),
        (&["--compute-rate", "2GiB/s"], "given"),
    ] {
        let text = said(rate);
        let line = text
            .lines()
            .find(|line| line.starts_with("assumed"))
            .unwrap();
        assert!(
            line.contains(of) && line.contains("--save-routing"),
            "{text}"
        );
    }
    let given = report(&[&args[..], &["--compute-rate", "2GiB/s"]].concat());
    assert_eq!(given["compute_bytes_per_second"], 2u64 << 30);
    let finite = |value: &Value| !value.is_null();
    assert!(given.as_object().unwrap().values().all(finite), "{given}");
}

#[test]
fn wrong_devices_are_refused() {
    for device in ["7", "0MiB/s", "fast", "7GiB/s@", "7GiB/s@-1us", "7GiB/s@5"] {
        let output = simulate(&["--device", device]);
        assert_eq!(output.status.code(), Some(2), "{device}");
    }
    let mut none = colibri();
    none.args(["simulate", "--model", "x"]);
    assert_eq!(finish(none).status.code(), Some(2));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slow.jsonl");
    let text = r#"{"routing":1,"top_k":4,"experts":16,"layers":4}
{"routed":{"layer":3,"experts":[0,1,2,3]}}
{"measured":{"tokens":1,"seconds":{"attention":999999999,"experts":999999999}}}
"#;
    std::fs::write(&path, text).unwrap();
    let error = error_of(&simulate(&[
        "--device",
        "1GiB/s",
        "--routing",
        path.to_str().unwrap(),
    ]));
    assert!(error.contains("line 3"), "{error}");
    let error = error_of(&simulate(&["--device", "1GiB/s", "--routing", "/nowhere"]));
    assert!(error.contains("/nowhere"), "{error}");
}
