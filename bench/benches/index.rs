//! Opening the index of a model of 156 shards and 117,000 tensors: seconds, and growth of the peak RSS.
//!
//! Every measurement is a process of its own, so that none inherits another's memory; the kinds take
//! turns, so that drift of the machine meets all of them. The rival reads the same headers one after the
//! other with the safetensors crate.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use colibri_ring::EngineKind;
use colibri_uring::shards::Shards;
use safetensors::tensor::Metadata;

const SHARDS: usize = 156;
/// Per shard: weights, and as many scales.
const WEIGHTS: usize = 375;
const WEIGHT_BYTES: u64 = 2048 * 6144 / 2;
const SCALES: u64 = 2048 * 6144 / 64;
const ROUNDS: usize = 15;
const KINDS: [&str; 3] = ["uring", "pread", "rival"];

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    if let [_, kind, dir] = &args[..]
        && KINDS.contains(&kind.as_str())
    {
        return measure(kind, dir.into());
    }
    let dir = tempfile::tempdir()?;
    let list = make(dir.path())?;
    report("no list of shards", dir.path())?;
    fs::write(dir.path().join("model.safetensors.index.json"), list)?;
    report("with model.safetensors.index.json", dir.path())
}

/// Writes the shards: real headers, data of holes. Returns the list of shards.
fn make(dir: &Path) -> io::Result<String> {
    let projections = ["down_proj", "gate_proj", "up_proj"];
    let mut list = String::from(r#"{"metadata":{},"weight_map":{"#);
    for shard in 0..SHARDS {
        let file = format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1);
        let names: Vec<_> = (shard * WEIGHTS..(shard + 1) * WEIGHTS)
            .map(|i| {
                let (layer, expert) = (3 + i / (3 * 256), i / 3 % 256);
                let projection = projections[i % 3];
                format!("model.layers.{layer}.mlp.experts.{expert}.{projection}.weight")
            })
            .collect();
        let (mut header, mut end) = (String::from(r#"{"__metadata__":{"format":"pt"}"#), 0);
        // In the order of the format's library: wider elements first, then by name.
        for (suffix, dtype, n, bytes) in [
            (".qs", "F32", SCALES, 4 * SCALES),
            ("", "U8", WEIGHT_BYTES, WEIGHT_BYTES),
        ] {
            for name in &names {
                let next = end + bytes;
                write!(
                    header,
                    r#","{name}{suffix}":{{"dtype":"{dtype}","shape":[{n}],"data_offsets":[{end},{next}]}}"#
                )
                .expect("a String takes everything");
                let comma = if list.ends_with('{') { "" } else { "," };
                write!(list, r#"{comma}"{name}{suffix}":"{file}""#)
                    .expect("a String takes everything");
                end = next;
            }
        }
        header.push('}');
        let mut out = fs::File::create(dir.join(file))?;
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        out.set_len(8 + header.len() as u64 + end)?;
    }
    list.push_str("}}");
    Ok(list)
}

/// Runs the rounds and prints medians.
fn report(what: &str, dir: &Path) -> io::Result<()> {
    let mut runs = [const { Vec::new() }; KINDS.len()];
    for round in 0..=ROUNDS {
        for (kind, runs) in KINDS.iter().zip(&mut runs) {
            let out = Command::new(std::env::current_exe()?)
                .arg(kind)
                .arg(dir)
                .output()?;
            let text = String::from_utf8_lossy(&out.stdout);
            let numbers: Vec<f64> = text.split_whitespace().flat_map(str::parse).collect();
            let [seconds, mib] = numbers[..] else {
                return Err(io::Error::other(
                    String::from_utf8_lossy(&out.stderr).into_owned(),
                ));
            };
            // The first round warms the page cache.
            if round > 0 {
                runs.push((seconds, mib));
            }
        }
    }
    println!("{SHARDS} shards, {} tensors, {what}:", SHARDS * WEIGHTS * 2);
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let rival = median(runs[2].iter().map(|r| r.0).collect());
    for (kind, runs) in KINDS.iter().zip(&runs) {
        let seconds: Vec<f64> = runs.iter().map(|r| r.0).collect();
        let worst = seconds.iter().copied().fold(0.0, f64::max);
        let mib = runs.iter().map(|r| r.1).fold(0.0, f64::max);
        let seconds = median(seconds);
        println!(
            "  {kind}: {:.1} ms (worst {:.1}), peak RSS +{mib:.1} MiB, {:.2} times the rival's speed",
            seconds * 1e3,
            worst * 1e3,
            rival / seconds
        );
    }
    Ok(())
}

/// Opens the index once and prints seconds and MiB.
fn measure(kind: &str, dir: PathBuf) -> io::Result<()> {
    let before = peak_kib()?;
    let start = Instant::now();
    let (seconds, tensors) = match kind {
        "rival" => {
            let all = rival(&dir)?;
            let seconds = start.elapsed().as_secs_f64();
            // Counting is dear: it copies every name.
            (seconds, all.iter().map(|m| m.tensors().len()).sum())
        }
        _ => {
            let engine = match kind {
                "uring" => EngineKind::Auto,
                _ => EngineKind::Pread,
            };
            let shards = Shards::open_with(&[dir], &[], engine).map_err(io::Error::other)?;
            (start.elapsed().as_secs_f64(), shards.len())
        }
    };
    let peak = peak_kib()?;
    assert_eq!(tensors, SHARDS * WEIGHTS * 2);
    println!("{seconds} {}", (peak - before) / 1024.0);
    Ok(())
}

/// The headers of a directory, one after the other, by the safetensors crate.
fn rival(dir: &Path) -> io::Result<Vec<Metadata>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let mut file = fs::File::open(path)?;
            let mut len = [0; 8];
            file.read_exact(&mut len)?;
            let mut header = vec![0; u64::from_le_bytes(len) as usize];
            file.read_exact(&mut header)?;
            all.push(serde_json::from_slice(&header)?);
        }
    }
    Ok(all)
}

/// Peak RSS of this process so far, in KiB.
fn peak_kib() -> io::Result<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok())
        .ok_or_else(|| io::Error::other("no VmHWM"))
}
