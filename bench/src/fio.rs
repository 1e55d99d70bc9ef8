//! fio, as fast as it can be made: the rival that the ring is measured against.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;

/// What fio read.
#[derive(Clone, Copy, Debug)]
pub struct Reads {
    /// Bytes.
    pub bytes: u64,
    /// In this time.
    pub elapsed: Duration,
    /// Processor time of the reading thread.
    pub cpu: Duration,
}

/// What fio calls itself.
///
/// # Errors
/// When it cannot be run.
pub fn version() -> anyhow::Result<String> {
    let output = Command::new("fio").arg("--version").output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The load averages.
pub fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// Random reads of `block` bytes at multiples of 4 KiB, `depth` at once, through everything that the ring uses too.
///
/// # Errors
/// When fio fails, or says something else than is expected.
pub fn read(file: &Path, block: u64, depth: usize, seconds: f64) -> anyhow::Result<Reads> {
    let output = Command::new("fio")
        .args(["--name=rival", "--readonly", "--rw=randread", "--direct=1"])
        .args([
            "--ioengine=io_uring",
            "--fixedbufs=1",
            "--registerfiles=1",
            "--nonvectored=1",
        ])
        .args(["--iomem=mmaphuge", "--hugepage-size=2m"])
        .args([
            "--norandommap",
            "--randrepeat=0",
            "--blockalign=4k",
            "--time_based",
        ])
        // fio would make time for statistics that nobody reads.
        .args([
            "--gtod_reduce=0",
            "--disable_slat=1",
            "--disable_clat=1",
            "--output-format=json",
        ])
        .arg(format!("--bs={block}"))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--runtime={}ms", (seconds * 1000.0) as u64))
        .arg("--filename")
        .arg(file)
        .stdin(Stdio::null())
        .output()
        .context("cannot run fio")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("fio failed: {}", said.trim());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    // Warnings come before the object.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: Value = serde_json::from_str(json).context("fio printed no JSON")?;
    let job = &report["jobs"][0];
    let number = |value: &Value, name: &str| -> anyhow::Result<f64> {
        value[name]
            .as_f64()
            .with_context(|| format!("fio reported no {name}"))
    };
    let elapsed = number(&job["read"], "runtime")? / 1000.0;
    let busy = (number(job, "usr_cpu")? + number(job, "sys_cpu")?) / 100.0;
    Ok(Reads {
        bytes: number(&job["read"], "io_bytes")? as u64,
        elapsed: Duration::from_secs_f64(elapsed),
        cpu: Duration::from_secs_f64(busy * number(job, "job_runtime")? / 1000.0),
    })
}

const SETTING: &str = "/proc/sys/vm/nr_hugepages";

/// Huge pages for fio's buffers. Dropping it restores how many there were.
#[derive(Debug)]
pub struct HugePages {
    before: String,
}

impl HugePages {
    /// Makes room for `bytes` bytes, and for some more.
    ///
    /// # Errors
    /// When the kernel refuses, or finds no memory that is in one piece.
    pub fn reserve(bytes: u64) -> anyhow::Result<HugePages> {
        let before =
            fs::read_to_string(SETTING).with_context(|| format!("cannot read {SETTING}"))?;
        let pages = HugePages {
            before: before.trim().to_owned(),
        };
        let wanted = pages.before.parse::<u64>().unwrap_or(0) + bytes.div_ceil(2 << 20) + 8;
        fs::write(SETTING, wanted.to_string())
            .with_context(|| format!("cannot write {SETTING}"))?;
        let got = fs::read_to_string(SETTING).unwrap_or_default();
        if got.trim().parse::<u64>().unwrap_or(0) < wanted {
            bail!(
                "the kernel has only {} of {wanted} huge pages for fio: memory is fragmented",
                got.trim()
            );
        }
        Ok(pages)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Err(e) = fs::write(SETTING, &self.before) {
            eprintln!("cannot restore {SETTING} to {}: {e}", self.before);
        }
    }
}
