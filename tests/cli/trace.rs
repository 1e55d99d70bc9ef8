//! `decode --trace` and `--report`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use crate::common::{Saved, shipped};
use crate::process::{error_of, finish, json_of, on_model, stderr};

/// Feeds 100 ids through a model of three sparse layers, none of whose experts stays in memory.
fn decode(args: &[&str]) -> std::process::Output {
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids");
    let text: Vec<String> = (0..100).map(|i| (i * 7 % 60).to_string()).collect();
    std::fs::write(&ids, text.join(" ")).unwrap();
    let replay = ["--replay", ids.to_str().unwrap()];
    let sparing = ["--cache-slots", "0", "--lookahead", "4", "--json"];
    let model = shipped().join("f16-long");
    finish(on_model(
        "decode",
        &[model],
        &[&replay[..], &sparing, args].concat(),
    ))
}

/// A complete event, in whole nanoseconds.
struct Slice {
    event: Value,
    begin: u64,
    end: u64,
}

impl Slice {
    fn layer(&self) -> Option<u64> {
        self.event["args"]["layer"].as_u64()
    }

    fn track(&self) -> (u64, u64) {
        let id = |name: &str| self.event[name].as_u64().unwrap();
        (id("pid"), id("tid"))
    }
}

fn nanos(value: &Value) -> u64 {
    let micros = value.as_f64().unwrap();
    assert!(micros.is_finite() && micros >= 0.0, "{micros}");
    (micros * 1000.0).round() as u64
}

fn events(file: &Path) -> Vec<Value> {
    let trace: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(trace["otherData"]["full"], false);
    trace["traceEvents"].as_array().unwrap().clone()
}

fn slices(events: &[Value]) -> Vec<Slice> {
    let complete = events.iter().filter(|event| event["ph"] == "X");
    complete
        .map(|event| {
            assert!(!event["name"].as_str().unwrap().is_empty());
            assert!(event["cat"].is_string() && event["args"].is_object());
            let begin = nanos(&event["ts"]);
            Slice {
                event: event.clone(),
                begin,
                end: begin + nanos(&event["dur"]),
            }
        })
        .collect()
}

#[test]
fn a_trace_has_every_byte_and_shows_reads_under_arithmetic() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.json");
    let report = json_of(&decode(&["--trace", file.to_str().unwrap()]));
    let without = json_of(&decode(&[]));
    assert_eq!(report["token_ids"], without["token_ids"]);
    let events = events(&file);
    let kinds: BTreeSet<&str> = events.iter().map(|e| e["ph"].as_str().unwrap()).collect();
    assert_eq!(kinds, BTreeSet::from(["C", "M", "X"]));

    let named = |kind: &str| -> BTreeMap<(u64, u64), String> {
        let of_kind = events
            .iter()
            .filter(|e| e["ph"] == "M" && e["name"] == kind);
        of_kind
            .map(|e| {
                let at = (e["pid"].as_u64().unwrap(), e["tid"].as_u64().unwrap());
                (at, e["args"]["name"].as_str().unwrap().to_owned())
            })
            .collect()
    };
    let (processes, threads) = (named("process_name"), named("thread_name"));
    let slices = slices(&events);
    for slice in &slices {
        assert!(threads.contains_key(&slice.track()), "{}", slice.event);
        let process = (slice.track().0, 0);
        assert!(processes.contains_key(&process), "{}", slice.event);
    }
    let is_drive = |slice: &&Slice| slice.event["args"]["bytes"].is_u64();
    let (chunks, computed): (Vec<&Slice>, Vec<&Slice>) = slices.iter().partition(is_drive);

    let stats = &report["stats"];
    let bytes: u64 = (chunks.iter())
        .map(|chunk| chunk.event["args"]["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(Some(bytes), stats["expert_bytes_read"].as_u64());
    let dir = stats["replicas"][0]["dir"].as_str().unwrap();
    for chunk in &chunks {
        let args = &chunk.event["args"];
        assert!(args["layer"].is_u64() && args["expert"].is_u64(), "{args}");
        assert!(["gate_up", "down", "gate_up+down"].contains(&args["part"].as_str().unwrap()));
        assert_eq!(args["replica"], dir);
    }
    for priority in ["demand", "speculative"] {
        let of = |c: &&&Slice| c.event["args"]["priority"] == priority;
        assert!(chunks.iter().any(|c| of(&c)), "{priority}");
    }
    for name in [
        "attention",
        "router",
        "shared",
        "waiting",
        "head",
        "layer 1",
        "token 99",
    ] {
        let found = computed.iter().any(|slice| slice.event["name"] == name);
        assert!(found, "{name}");
    }

    // Reads overlap compute.
    let under = |chunk: &&&Slice| {
        computed.iter().any(|slice| {
            slice.event["cat"] == "experts"
                && slice.layer().map(|layer| layer + 1) == chunk.layer()
                && chunk.begin < slice.end
                && slice.begin < chunk.end
        })
    };
    assert!(chunks.iter().filter(under).count() > 0);

    let last = events
        .iter()
        .rfind(|e| e["name"] == "experts" && e["ph"] == "C");
    let counted = &last.unwrap()["args"];
    assert_eq!(counted["hits"], stats["expert_hits"]);
    assert_eq!(counted["misses"], stats["expert_misses"]);
    let flying = (events.iter()).filter(|e| e["name"].as_str().unwrap().starts_with("in flight"));
    let bytes: Vec<u64> = flying
        .map(|e| e["args"]["bytes"].as_u64().unwrap())
        .collect();
    assert!(bytes.iter().any(|bytes| *bytes > 0));
    assert_eq!(bytes.last(), Some(&0), "everything has ended");
}

/// Viewers sort what is on a track by its begin, leave what begins at once in the order of the file, and drop what crosses what is
/// open. Some round microseconds to nanoseconds, others cut them off.
#[test]
fn slices_of_one_track_are_nested_or_apart() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.json");
    json_of(&decode(&["--trace", file.to_str().unwrap()]));
    let events = events(&file);
    for (how, nanos) in [
        ("rounded", nanos as fn(&Value) -> u64),
        ("cut off", |micros| {
            (micros.as_f64().unwrap() * 1000.0) as u64
        }),
    ] {
        let mut tracks: BTreeMap<(u64, u64), Vec<(u64, u64)>> = BTreeMap::new();
        for slice in slices(&events) {
            let track = tracks.entry(slice.track()).or_default();
            let begin = nanos(&slice.event["ts"]);
            track.push((begin, begin + nanos(&slice.event["dur"])));
        }
        assert!(tracks.len() > 1);
        for (track, slices) in &mut tracks {
            slices.sort_by_key(|(begin, _)| *begin);
            check_nesting(slices, &format!("{track:?}, {how}"));
        }
    }
}

/// Slices in the order in which a viewer takes them: each ends before what is open around it.
fn check_nesting(slices: &[(u64, u64)], what: &str) {
    let mut open: Vec<u64> = Vec::new();
    for (begin, end) in slices {
        while open.last().is_some_and(|outer| *outer <= *begin) {
            open.pop();
        }
        assert!(open.last().is_none_or(|outer| *outer >= *end), "{what}");
        open.push(*end);
    }
}

/// A viewer takes an event by these, and needs no other.
#[test]
fn events_have_what_viewers_need() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.json");
    json_of(&decode(&["--trace", file.to_str().unwrap()]));
    let mut counters: BTreeMap<(u64, String), u64> = BTreeMap::new();
    for event in events(&file) {
        let (pid, tid) = (event["pid"].as_u64(), event["tid"].as_u64());
        assert!(pid.is_some() && tid.is_some(), "{event}");
        let name = event["name"].as_str().unwrap().to_owned();
        match event["ph"].as_str().unwrap() {
            "X" => assert!(
                event["ts"].is_number() && event["dur"].is_number(),
                "{event}"
            ),
            "M" => assert!(event["args"].is_object(), "{event}"),
            "C" => {
                let values = event["args"].as_object().unwrap().values();
                assert!(values.clone().count() > 0 && values.clone().all(Value::is_number));
                // Of each counter, one point after the other.
                let at = nanos(&event["ts"]);
                let before = counters.insert((pid.unwrap(), name), at);
                assert!(before.is_none_or(|before| before <= at), "{event}");
            }
            other => panic!("{other} is no kind that is written: {event}"),
        }
    }
    assert!(counters.len() > 1, "{counters:?}");
}

#[test]
fn a_trace_that_cannot_be_written_is_one_error() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none/trace.json");
    let text = error_of(&decode(&["--trace", missing.to_str().unwrap()]));
    assert!(
        text.contains("cannot write") && text.contains("none"),
        "{text}"
    );
    let other = dir.path().join("notes.txt");
    std::fs::write(&other, "dear diary").unwrap();
    let text = error_of(&decode(&["--trace", other.to_str().unwrap()]));
    assert!(text.contains("is not overwritten"), "{text}");
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "dear diary");
    // The tokens are printed anyway.
    let full = decode(&["--trace", "/dev/full"]);
    assert_eq!(full.status.code(), Some(1));
    let text = stderr(&full);
    assert!(text.contains("cannot write /dev/full"), "{text}");
    assert!(!full.stdout.is_empty());
}

#[test]
fn a_report_has_all_its_plots_and_is_self_contained() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.html");
    json_of(&decode(&["--report", file.to_str().unwrap()]));
    let html = std::fs::read_to_string(&file).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"));
    assert!(html.len() < 2 << 20, "{}", html.len());
    for outside in [
        "http:", "https:", "src=", "href=", "url(", "@import", "<script", "NaN",
    ] {
        assert!(!html.contains(outside), "{outside}");
    }
    let figures: Vec<&str> = html.split("<figure").skip(1).collect();
    assert_eq!(figures.len(), 5);
    for (title, mark) in [
        ("The last layers", "class=\"p-experts\""),
        ("Time of a pass", "class=\"bar\" d=\"M"),
        ("Experts that were not in memory", "class=\"cell\""),
        ("Bandwidth of each source", "class=\"curve\" d=\"M"),
        ("Uses of each expert", "class=\"cell\""),
    ] {
        let found = figures
            .iter()
            .find(|figure| figure.contains(title))
            .unwrap();
        assert!(found.contains(mark), "{title}");
    }
    // The plot has both kinds of reads, and the headline numbers.
    for part in [
        "<rect class=\"c\"",
        "<rect class=\"c ahead\"",
        "tokens a second",
        "Processor",
    ] {
        assert!(html.contains(part), "{part}");
    }
    for (one, other) in [("x", "x"), ("x", "./x")] {
        let same = error_of(&decode(&["--report", one, "--trace", other]));
        assert!(
            same.contains("--trace and --report name the same file"),
            "{same}"
        );
    }
    // The check comes before the KV file is created.
    for flag in ["--report", "--trace", "--save-routing"] {
        let saved = dir.path().join("saved");
        let path = saved.to_str().unwrap();
        let args = ["--prompt-ids", "1,2,3", "--kv", path, flag, path];
        let dirs = Saved::named("bf16-shared").dirs;
        let same = error_of(&finish(on_model("decode", &dirs, &args)));
        let why = format!("--kv and {flag} name the same file");
        assert!(same.contains(&why) && !saved.exists(), "{same}");
    }
}

#[test]
fn a_report_names_every_directory_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.html");
    let dirs = Saved::named("bf16-split").dirs;
    let args = ["--prompt-ids", "1,2,3", "-n", "4", "--json", "--report"];
    let args = [&args[..], &[file.to_str().unwrap()]].concat();
    json_of(&finish(on_model("decode", &dirs, &args)));
    let html = std::fs::read_to_string(&file).unwrap();
    let [a, b] = [0, 1].map(|i: usize| dirs[i].display().to_string());
    assert!(html.contains(&format!("Decode of {a} and {b}")));
    assert!(html.contains(&format!("Drive of {a} and {b}")));
}

#[test]
fn a_link_stays_and_its_target_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let (link, named) = (dir.path().join("link"), dir.path().join("named"));
    std::os::unix::fs::symlink(&named, &link).unwrap();
    json_of(&decode(&["--trace", link.to_str().unwrap()]));
    assert!(link.is_symlink());
    let text = std::fs::read_to_string(&named).unwrap();
    assert!(serde_json::from_str::<Value>(&text).is_ok());
}

#[test]
fn two_outputs_cannot_be_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let path = path.to_str().unwrap();
    for flags in [
        ["--trace", "--report"],
        ["--trace", "--save-routing"],
        ["--report", "--save-routing"],
    ] {
        let line = error_of(&decode(&[flags[0], path, flags[1], path]));
        for flag in flags {
            assert!(line.contains(flag), "{line}");
        }
    }
    let line = error_of(&decode(&["--trace", dir.path().to_str().unwrap()]));
    assert!(line.contains("is a directory"), "{line}");
}
