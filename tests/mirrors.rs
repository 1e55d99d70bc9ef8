//! Mirrors change where bytes come from, never the output. A broken mirror is a warning.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use colibri_uring::shards::{Cache, ShardError, Shards};
use serde_json::Value;

#[path = "common/child.rs"]
mod child;

/// A model in two shards, and directories for mirrors.
struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    /// Copies the fixture into a model directory and `mirrors` mirrors.
    fn new(mirrors: usize) -> Bench {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let bench = Bench { dir };
        copy(&fixture(), &bench.model());
        for i in 0..mirrors {
            copy(&bench.model(), &bench.mirror(i));
        }
        bench
    }

    fn model(&self) -> PathBuf {
        self.dir.path().join("model")
    }

    fn mirror(&self, i: usize) -> PathBuf {
        self.dir.path().join(format!("mirror-{i}"))
    }

    fn run(&self, mirrors: &[&Path]) -> Output {
        let mut colibri = child::colibri();
        colibri.env("COLIBRI_NO_USAGE", "1");
        colibri.arg("decode");
        colibri.arg("--model").arg(self.model());
        for mirror in mirrors {
            colibri.arg("--mirror").arg(mirror);
        }
        colibri.args(["--prompt-ids", "1,2,3", "-n", "8", "--cache-slots", "0"]);
        colibri.arg("--json").output().unwrap()
    }
}

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/bf16-shared")
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

fn shards(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = (fs::read_dir(dir).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    found.sort();
    found
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The warnings, without those that the mirror is on the model's drive, which is always true here.
fn warnings(output: &Output) -> Vec<String> {
    let lines = stderr(output);
    let lines = lines
        .lines()
        .filter(|line| !line.contains("the same drive"));
    lines.map(str::to_owned).collect()
}

#[test]
fn a_mirror_on_the_same_drive_is_used_with_a_warning() {
    let bench = Bench::new(2);
    let alone = json(&bench.run(&[]));
    let output = bench.run(&[&bench.mirror(0), &bench.mirror(1)]);
    let mirrored = json(&output);
    assert_eq!(mirrored["token_ids"], alone["token_ids"]);
    let lines = stderr(&output);
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(
        lines.lines().all(|l| l.contains("brings no bandwidth")),
        "{lines}"
    );
    let replicas = mirrored["stats"]["replicas"].as_array().unwrap();
    assert_eq!(replicas.len(), 3);
    let files = shards(&bench.model()).len();
    for (replica, dir) in replicas
        .iter()
        .zip([bench.model(), bench.mirror(0), bench.mirror(1)])
    {
        assert_eq!(replica["dir"], dir.to_str().unwrap());
        assert_eq!(replica["files"], files);
        assert_eq!(replica["errors"], 0);
    }
    let sum = |report: &Value| -> u64 {
        let replicas = report["stats"]["replicas"].as_array().unwrap();
        replicas.iter().map(|r| r["bytes"].as_u64().unwrap()).sum()
    };
    assert_eq!(mirrored["stats"]["expert_bytes_read"], sum(&mirrored));
    assert!(sum(&alone) > 0);
}

#[test]
fn missing_and_different_files_stay_on_the_primary_with_a_warning_each() {
    let bench = Bench::new(1);
    let alone = json(&bench.run(&[]));
    let mirror = bench.mirror(0);
    let names = shards(&mirror);
    let name = names[0].file_name().unwrap().to_str().unwrap();
    type Damage = Box<dyn Fn(&Path)>;
    let damages: [(&str, Damage); 5] = [
        (
            "it is missing",
            Box::new(|path| fs::remove_file(path).unwrap()),
        ),
        (
            "its header differs",
            // A byte of a tensor's name: same lengths, another tensor.
            Box::new(|path| {
                let mut bytes = fs::read(path).unwrap();
                let at = bytes.windows(6).position(|w| w == b"weight").unwrap();
                bytes[at] = b'W';
                fs::write(path, bytes).unwrap();
            }),
        ),
        (
            "its header differs",
            Box::new(|path| {
                let mut bytes = fs::read(path).unwrap();
                bytes[0] ^= 1;
                fs::write(path, bytes).unwrap();
            }),
        ),
        (
            "bytes, the primary has",
            Box::new(|path| {
                let bytes = fs::read(path).unwrap();
                fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
            }),
        ),
        (
            "not a regular file",
            Box::new(|path| {
                fs::remove_file(path).unwrap();
                fs::create_dir(path).unwrap();
            }),
        ),
    ];
    for (reason, damage) in damages {
        damage(&mirror.join(name));
        let output = bench.run(&[&mirror]);
        let report = json(&output);
        assert_eq!(report["token_ids"], alone["token_ids"], "{reason}");
        let warnings = warnings(&output);
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(
            warnings[0].contains(name) && warnings[0].contains(reason),
            "{warnings:?}"
        );
        assert_eq!(report["stats"]["replicas"][1]["files"], names.len() - 1);
        fs::remove_dir_all(&mirror).unwrap();
        copy(&bench.model(), &mirror);
    }
}

#[test]
fn the_directory_of_another_model_is_one_warning() {
    let bench = Bench::new(1);
    let mirror = bench.mirror(0);
    for shard in shards(&mirror) {
        fs::write(shard, "something else").unwrap();
    }
    let warnings = warnings(&bench.run(&[&mirror]));
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let count = shards(&mirror).len();
    let wanted = format!("{count} of {count} files are not used as mirrors, like ");
    assert!(warnings[0].contains(&wanted), "{warnings:?}");
    assert!(
        warnings[0].contains("14 bytes, the primary has"),
        "{warnings:?}"
    );
}

#[test]
fn a_mirror_that_cannot_be_used_at_all_is_one_warning() {
    let bench = Bench::new(0);
    let alone = json(&bench.run(&[]));
    let absent = bench.dir.path().join("absent");
    let file = bench.dir.path().join("file");
    fs::write(&file, "no directory").unwrap();
    for mirror in [absent, file] {
        let output = bench.run(&[&mirror]);
        let report = json(&output);
        assert_eq!(report["token_ids"], alone["token_ids"]);
        let lines = stderr(&output);
        assert_eq!(lines.lines().count(), 1, "{lines}");
        assert!(lines.contains(mirror.to_str().unwrap()), "{lines}");
        assert_eq!(report["stats"]["replicas"][1]["files"], 0);
    }
}

#[test]
fn one_directory_twice_is_an_error() {
    let bench = Bench::new(1);
    let mirror = bench.mirror(0);
    let link = bench.dir.path().join("link");
    std::os::unix::fs::symlink(bench.model(), &link).unwrap();
    let spelt = bench.model().join("..").join("model");
    for mirrors in [
        vec![bench.model()],
        vec![spelt],
        vec![link],
        vec![mirror.clone(), mirror],
    ] {
        let mirrors: Vec<&Path> = mirrors.iter().map(PathBuf::as_path).collect();
        let output = bench.run(&mirrors);
        let line = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert!(
            line.lines().count() == 1 && line.contains("are the same directory"),
            "{line}"
        );
    }
}

#[test]
fn five_mirrors_are_wrong_usage() {
    let bench = Bench::new(0);
    let mirrors: Vec<PathBuf> = (0..5).map(|i| bench.mirror(i)).collect();
    let mirrors: Vec<&Path> = mirrors.iter().map(PathBuf::as_path).collect();
    let output = bench.run(&mirrors);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty() && stderr(&output).contains("--mirror"));
    let dirs: Vec<PathBuf> = mirrors.iter().map(|m| m.to_path_buf()).collect();
    assert!(matches!(
        Shards::open_mirrored(&[bench.model()], &dirs),
        Err(ShardError::TooManyMirrors { given: 5 })
    ));
}

#[test]
fn a_split_model_may_have_one_name_twice() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, mirror] = ["a", "b", "mirror"].map(|name| dir.path().join(name));
    for (path, tensor) in [(&a, "one"), (&b, "two"), (&mirror, "two")] {
        fs::create_dir(path).unwrap();
        let header = format!(r#"{{"{tensor}":{{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}}}"#);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes().chain([7, 8, 9]));
        fs::write(path.join("model.safetensors"), bytes).unwrap();
    }
    let shards = Shards::open_mirrored(&[a, b], &[mirror]).unwrap();
    assert!(shards.copies(0).is_empty());
    assert_eq!(shards.copies(1).len(), 1);
}

#[test]
fn resident_weights_come_from_a_mirror_when_the_primary_was_truncated() {
    let bench = Bench::new(1);
    let (name, raw) = {
        let shards = Shards::open(&[bench.model()]).unwrap();
        let last = shards.iter().filter(|t| t.file == 0).last().unwrap();
        let name = last.name.to_owned();
        let raw = shards.read_raw(&name, Cache::Drop).unwrap();
        (name, raw)
    };
    let path = shards(&bench.model()).remove(0);
    let mirrors = [bench.mirror(0)];
    let (mirrored, alone) = (
        Shards::open_mirrored(&[bench.model()], &mirrors).unwrap(),
        Shards::open(&[bench.model()]).unwrap(),
    );
    let half = fs::metadata(&path).unwrap().len() / 2;
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(half)
        .unwrap();
    assert!(alone.read_raw(&name, Cache::Drop).is_err());
    assert_eq!(mirrored.read_raw(&name, Cache::Drop).unwrap(), raw);
}
