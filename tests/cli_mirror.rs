//! `mirror bench`, `mirror verify` and `profile`.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use base64::Engine as _;
use colibri_uring::shards::Shards;
use hdrhistogram::serialization::Deserializer;
use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};
use serde_json::Value;

#[path = "common/child.rs"]
mod child;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/bf16-shared")
}

/// A copy of the fixture.
fn copied() -> tempfile::TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for entry in fs::read_dir(fixture()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

fn run(args: &[&str]) -> Output {
    child::colibri().args(args).output().unwrap()
}

fn mirror(command: &str, mirrors: &[&Path], more: &[&str]) -> Output {
    let model = fixture();
    let mut args = vec!["mirror", command, "--model", model.to_str().unwrap()];
    for mirror in mirrors {
        args.extend(["--mirror", mirror.to_str().unwrap()]);
    }
    args.extend(more);
    run(&args)
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)))
}

fn keys(value: &Value) -> Vec<&str> {
    let keys = value.as_object().unwrap().keys();
    let mut keys: Vec<&str> = keys.map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn bench_compares_each_alone_with_all_together() {
    let copy = copied();
    // Both copies are on one drive, which may serve all reads from the first without weights.
    let args = ["--seconds", "0.1", "--mirror-weights", "1,1", "--json"];
    let output = mirror("bench", &[copy.path()], &args);
    assert!(output.status.success());
    let report = json(&output);
    assert_eq!(keys(&report), ["combined", "single"]);
    assert_eq!(
        keys(&report["combined"]),
        ["mib_per_s", "scaling", "shares"]
    );
    let single = report["single"].as_array().unwrap();
    for (single, dir) in single.iter().zip([fixture(), copy.path().to_owned()]) {
        assert_eq!(keys(single), ["dir", "mib_per_s"]);
        assert_eq!(single["dir"], dir.to_str().unwrap());
        assert!(single["mib_per_s"].as_f64().unwrap() > 0.0);
    }
    let shares = report["combined"]["shares"].as_array().unwrap();
    let sum: f64 = shares.iter().map(|share| share.as_f64().unwrap()).sum();
    assert!(shares.len() == 2 && (sum - 1.0).abs() < 1e-9, "{shares:?}");
    assert!(report["combined"]["scaling"].as_f64().unwrap() > 0.0);
    let output = mirror("bench", &[copy.path()], &args[..4]);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("of the sum"), "{table}");
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// An unusable mirror is an error: the speed of one drive must not pass for that of two.
#[test]
fn what_cannot_be_a_mirror_is_not_measured() {
    let (copy, empty) = (copied(), tempfile::tempdir().unwrap());
    let absent = copy.path().join("absent");
    let shard = copy.path().join("model-00002-of-00003.safetensors");
    fs::write(&shard, "something else").unwrap();
    let file = copy.path().join("config.json");
    let good = copied();
    for (mirror, why) in [
        (absent.as_path(), "No such file"),
        (file.as_path(), "Not a directory"),
        (empty.path(), "3 of 3 files are not used as mirrors"),
        (copy.path(), "has 14 bytes, the primary has"),
    ] {
        for mirrors in [&[mirror][..], &[good.path(), mirror]] {
            let output = mirror_bench(mirrors);
            let error = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{error}");
            assert!(output.stdout.is_empty());
            let lines: Vec<_> = error.lines().filter(|l| l.contains("error: ")).collect();
            let name = mirror.to_str().unwrap();
            assert!(
                lines.len() == 1 && lines[0].contains(name) && lines[0].contains(why),
                "{error}"
            );
        }
    }
    // `verify` reports wrong files, but a missing directory is an error.
    for mirror in [absent, file] {
        let output = self::mirror("verify", &[mirror.as_path()], &["--json"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty());
        assert!(stderr(&output).contains(mirror.to_str().unwrap()));
    }
}

fn mirror_bench(mirrors: &[&Path]) -> Output {
    mirror("bench", mirrors, &["--seconds", "0.1", "--json"])
}

#[test]
fn a_partial_mirror_is_measured_and_what_gives_nothing_is_said() {
    let copy = copied();
    fs::remove_file(copy.path().join("model-00002-of-00003.safetensors")).unwrap();
    let output = mirror_bench(&[copy.path()]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("it is missing"));

    let copy = copied();
    let report = copy.path().join("report.html");
    let args = ["--seconds", "0.1", "--mirror-weights", "1,0", "--report"];
    let args = [&args[..], &[report.to_str().unwrap()]].concat();
    let output = mirror("bench", &[copy.path()], &args);
    assert!(output.status.success(), "{}", stderr(&output));
    let nothing = format!("nothing came from {}", copy.path().display());
    assert!(stderr(&output).contains(&nothing), "{}", stderr(&output));
    let html = fs::read_to_string(&report).unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    // No scaling without reads from every drive.
    for text in [html, table] {
        assert!(
            text.contains(&nothing) && !text.contains(" of the sum"),
            "{text}"
        );
    }
    let output = mirror("bench", &[copy.path()], &[&args[..4], &["--json"]].concat());
    assert_eq!(json(&output)["combined"]["scaling"], Value::Null);

    // One shard, and no expert lies wholly in it.
    let part = tempfile::tempdir().unwrap();
    let shard = "model-00001-of-00003.safetensors";
    fs::copy(fixture().join(shard), part.path().join(shard)).unwrap();
    let output = mirror_bench(&[part.path()]);
    let report = json(&output);
    let alone = &report["single"][1]["mib_per_s"];
    assert_eq!(report["combined"]["scaling"].is_null(), alone.is_null());
}

#[test]
fn verify_says_its_speed_only_when_it_compared_something() {
    let (copy, empty) = (copied(), tempfile::tempdir().unwrap());
    let said = |mirror: &Path| {
        let output = self::mirror("verify", &[mirror], &[]);
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(
        said(copy.path()).contains("iB/s for"),
        "{}",
        said(copy.path())
    );
    let none = said(empty.path());
    assert!(none.contains("there is no copy of any file"), "{none}");
    assert!(!none.contains("B/s"), "{none}");
    fs::write(copy.path().join("model-00002-of-00003.safetensors"), "x").unwrap();
    let why = said(copy.path());
    assert!(
        why.contains("is no copy: it has 1 bytes, the primary has"),
        "{why}"
    );
}

/// A self-contained report, and a log whose tags and counts can be read back.
fn check_outputs(report: &Path, hlog: &Path, wanted: &[&str], runs: usize) {
    let html = fs::read_to_string(report).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.len() < 2 << 20);
    for outside in ["http:", "https:", "<link", "src=", "@import"] {
        assert!(!html.contains(outside), "{outside}");
    }
    for text in wanted {
        assert!(html.contains(text), "{text}");
    }
    assert_eq!(html.matches("<svg").count(), html.matches("</svg>").count());
    let log = fs::read(hlog).unwrap();
    let mut tags = std::collections::BTreeSet::new();
    for entry in IntervalLogIterator::new(&log) {
        let LogEntry::Interval(interval) = entry.unwrap() else {
            continue;
        };
        tags.insert(interval.tag().unwrap().as_str().to_owned());
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(interval.encoded_histogram())
            .unwrap();
        let histogram: hdrhistogram::Histogram<u64> =
            Deserializer::new().deserialize(&mut &bytes[..]).unwrap();
        assert!(
            !histogram.is_empty() && histogram.max() >= 1000,
            "nanoseconds"
        );
        assert!((interval.max() - histogram.max() as f64 / 1e6).abs() < 0.01);
    }
    assert_eq!(tags.len(), runs, "{tags:?}");
}

#[test]
fn bench_writes_a_report_and_the_histograms() {
    let copy = copied();
    let (report, hlog) = (copy.path().join("r.html"), copy.path().join("r.hlog"));
    let files = [report.to_str().unwrap(), hlog.to_str().unwrap()];
    let args = ["--seconds", "0.1", "--report", files[0], "--hlog", files[1]];
    let args = [&args[..], &["--mirror-weights", "1,1"]].concat();
    let output = mirror("bench", &[copy.path()], &args);
    assert!(output.status.success());
    // Both copies are on one drive.
    let drive = format!(
        "Drive of {} and {}",
        fixture().display(),
        copy.path().display()
    );
    let wanted = ["all together", "of the sum", "Kernel", &drive];
    check_outputs(&report, &hlog, &wanted, 3);
    let args = ["--seconds", "0.1", "--report", "/no/such/directory"];
    let output = mirror("bench", &[copy.path()], &args);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn pinned_weights_are_the_shares() {
    let copy = copied();
    let args = ["--seconds", "0.3", "--json", "--mirror-weights", "3,1"];
    let output = mirror("bench", &[copy.path()], &args);
    let shares = &json(&output)["combined"]["shares"];
    // The model is so small that an imbalance between drives matters.
    assert!(
        shares[0].as_f64().unwrap() > shares[1].as_f64().unwrap(),
        "{shares}"
    );
    let args = ["--seconds", "0.1", "--json", "--mirror-weights", "1,0"];
    let output = mirror("bench", &[copy.path()], &args);
    assert_eq!(json(&output)["combined"]["shares"][1], 0.0);
    for wrong in ["1", "1,1,1", "0,0", "1,x"] {
        let output = mirror("bench", &[copy.path()], &["--mirror-weights", wrong]);
        assert_eq!(output.status.code(), Some(2), "{wrong}");
    }
}

#[test]
fn verify_of_a_copy_is_exit_code_0() {
    let (a, b) = (copied(), copied());
    for engine in ["auto", "pread"] {
        let output = mirror(
            "verify",
            &[a.path(), b.path()],
            &["--engine", engine, "--json"],
        );
        assert!(output.status.success());
        let report = json(&output);
        assert_eq!(report["identical"], true);
        for mirror in report["mirrors"].as_array().unwrap() {
            assert_eq!(mirror["files"], 3);
            assert_eq!(mirror["first_difference"], Value::Null);
        }
    }
}

#[test]
fn verify_names_the_first_tensor_that_differs() {
    let (good, bad) = (copied(), copied());
    let shards = Shards::open(&[fixture()]).unwrap();
    // The last byte of one tensor, and something after it.
    let tensors: Vec<_> = shards.iter().filter(|t| t.bytes > 0).collect();
    let (first, later) = (&tensors[tensors.len() / 2], tensors.last().unwrap());
    for tensor in [first, later] {
        let name = shards.files()[tensor.file].path().file_name().unwrap();
        let file = fs::File::options()
            .read(true)
            .write(true)
            .open(bad.path().join(name));
        let (file, at) = (file.unwrap(), tensor.offset + tensor.bytes - 1);
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[!byte[0]], at).unwrap();
    }
    let mirrors = [good.path(), bad.path()];
    let output = mirror("verify", &mirrors, &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report = json(&output);
    assert_eq!(report["identical"], false);
    assert_eq!(report["mirrors"][0]["first_difference"], Value::Null);
    let difference = &report["mirrors"][1]["first_difference"];
    assert_eq!(difference["tensor"], first.name);
    assert_eq!(difference["offset"], first.offset + first.bytes - 1);
    let output = mirror("verify", &mirrors, &[]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(first.name), "{text}");
}

#[test]
fn a_partial_mirror_is_a_copy_and_a_different_header_is_none() {
    let copy = copied();
    let shard = copy.path().join("model-00002-of-00003.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::remove_file(&shard).unwrap();
    let output = mirror("verify", &[copy.path()], &["--json"]);
    assert!(output.status.success());
    assert_eq!(json(&output)["mirrors"][0]["missing"], 1);
    fs::write(&shard, &bytes[1..]).unwrap();
    let output = mirror("verify", &[copy.path()], &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let refused = &json(&output)["mirrors"][0]["refused"];
    assert_eq!(refused[0], shard.to_str().unwrap());
}

#[test]
fn profile_measures_every_engine() {
    // A private copy: other tests would bring the files back into the page cache.
    let model = copied();
    let (html, hlog) = (model.path().join("r.html"), model.path().join("r.hlog"));
    let args = [
        "profile",
        "--model",
        model.path().to_str().unwrap(),
        "--seconds",
        "0.05",
        "--queue-depth",
        "3",
        "1",
        "--report",
        html.to_str().unwrap(),
        "--hlog",
        hlog.to_str().unwrap(),
        "--json",
    ];
    let output = run(&args);
    let report = json(&output);
    let runs = report["runs"].as_array().unwrap();
    let engines: Vec<_> = runs
        .iter()
        .map(|run| run["engine"].as_str().unwrap())
        .collect();
    assert!(engines.contains(&"pread"), "{engines:?}");
    for run in runs {
        for key in [
            "direct",
            "block_size",
            "queue_depth",
            "bytes",
            "seconds",
            "mib_per_s",
            "cpu_seconds",
        ] {
            assert!(!run[key].is_null(), "{key}");
        }
        assert!(run["queue_depth"] == 3 || run["queue_depth"] == 1);
        assert!(run["bytes"].as_u64().unwrap() > 0);
        let latency = &run["latency_us"];
        assert_eq!(keys(latency), ["max", "p50", "p90", "p99", "p999"]);
        assert!(latency["max"].as_u64() >= latency["p50"].as_u64());
    }
    let tokens = &report["tokens_per_second"];
    assert!(tokens["cold"].as_f64().unwrap() > 0.0);
    // The whole model fits in memory.
    assert_eq!(tokens["cached_experts"], tokens["experts"]);
    assert_eq!(tokens["cached"], Value::Null);
    let wanted = [
        "tokens a second",
        "Kernel",
        "percentile",
        "3 at once",
        "page cache",
    ];
    // The number of runs varies: a file that stays in the page cache skips some.
    check_outputs(&html, &hlog, &wanted, runs.len());
    let text = String::from_utf8(run(&args[..8]).stdout).unwrap();
    assert!(
        text.contains("tokens a second") && text.contains("page cache"),
        "{text}"
    );
}

#[test]
fn profile_names_every_directory_of_a_split_model() {
    let (a, b) = (
        copied(),
        tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
    );
    let shard = "model-00002-of-00003.safetensors";
    fs::rename(a.path().join(shard), b.path().join(shard)).unwrap();
    let html = b.path().join("report.html");
    let dirs = [a.path().to_str().unwrap(), b.path().to_str().unwrap()];
    let output = run(&[
        "profile",
        "--model",
        dirs[0],
        "--model",
        dirs[1],
        "--engine",
        "pread",
        "--queue-depth",
        "2",
        "--seconds",
        "0.05",
        "--report",
        html.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    let html = fs::read_to_string(html).unwrap();
    let both = format!("{} and {}", dirs[0], dirs[1]);
    assert!(html.contains(&format!("Reads of {both}")));
    assert!(html.contains(&format!("Drive of {both}")));
}

#[test]
fn profile_of_a_file_refuses_memory_and_short_files() {
    let model = copied();
    let shard = model.path().join("model-00001-of-00003.safetensors");
    let args = |file: &Path, block: &str| {
        let file = file.to_str().unwrap();
        run(&[
            "profile",
            "--file",
            file,
            "--block-size",
            block,
            "--engine",
            "pread",
            "--seconds",
            "0.05",
        ])
    };
    assert!(args(&shard, "16KiB").status.success());
    let output = args(&shard, "1MiB");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("no file holds a block")
    );
    if let Ok(memory) = tempfile::tempdir_in("/dev/shm") {
        let path = memory.path().join("file");
        fs::copy(&shard, &path).unwrap();
        let output = args(&path, "16KiB");
        assert_eq!(output.status.code(), Some(1));
        assert!(
            String::from_utf8(output.stderr)
                .unwrap()
                .contains("page cache")
        );
    }
}

#[test]
fn wrong_flags_are_exit_code_2() {
    let wrong: &[&[&str]] = &[
        &["mirror"],
        &["mirror", "bench"],
        &["mirror", "bench", "--model", "a"],
        &["mirror", "verify", "--model", "a"],
        &[
            "mirror",
            "bench",
            "--model",
            "a",
            "--mirror",
            "b",
            "--seconds",
            "0",
        ],
        &["profile", "--model", "a", "--file", "b"],
        &["profile", "--file", "a", "--queue-depth", "0"],
        &["profile", "--file", "a", "--engine", "steam"],
        &["profile", "--file", "a", "--seconds", "nan"],
    ];
    for args in wrong {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty());
    }
}
