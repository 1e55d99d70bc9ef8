//! fio, as fast as it can be made: the rival that the ring is measured against.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

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

/// Random reads of `block` bytes at multiples of 4 KiB, `depth` at once, through everything that the ring uses too. What is
/// counted begins `warm_up` after its first read and takes `time`. The kernel's own books are asked: fio gives processor time in whole
/// milliseconds.
///
/// # Errors
/// When fio fails, or the kernel keeps no books of a thread's reads.
pub fn read(
    file: &Path,
    block: u64,
    depth: usize,
    warm_up: Duration,
    time: Duration,
) -> anyhow::Result<Reads> {
    /// To start, and to make its buffers; it is stopped as soon as it has been measured.
    const ROOM: Duration = Duration::from_secs(60);
    let runtime = warm_up + time + ROOM;
    let child = Command::new("fio")
        .args(["--name=rival", "--readonly", "--rw=randread", "--direct=1"])
        .args([
            "--ioengine=io_uring",
            "--fixedbufs=1",
            "--registerfiles=1",
            "--nonvectored=1",
        ])
        .args(["--iomem=mmaphuge", "--hugepage-size=2m", "--thread"])
        .args([
            "--norandommap",
            "--randrepeat=0",
            "--blockalign=4k",
            "--time_based",
        ])
        // Otherwise fio spends time on statistics that are not used.
        .args(["--gtod_reduce=0", "--disable_slat=1", "--disable_clat=1"])
        .arg(format!("--bs={block}"))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--runtime={}ms", runtime.as_millis()))
        .arg("--filename")
        .arg(file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run fio")?;
    let mut fio = Running(child);
    let started = Instant::now();
    let thread = loop {
        if let Some(busiest) = fio.reader(block)? {
            break busiest;
        }
        ensure!(
            started.elapsed() < ROOM,
            "fio has read nothing for a minute"
        );
        sleep(Duration::from_millis(10));
    };
    sleep(warm_up);
    let (begin, before) = (Instant::now(), books(&thread)?);
    sleep(time);
    let (end, after) = (Instant::now(), books(&thread)?);
    Ok(Reads {
        bytes: after.bytes - before.bytes,
        elapsed: end - begin,
        cpu: after.cpu.saturating_sub(before.cpu),
    })
}

/// Stopped when dropped.
struct Running(Child);

impl Running {
    /// The directory in /proc of the thread that has read `bytes` by now.
    fn reader(&mut self, bytes: u64) -> anyhow::Result<Option<PathBuf>> {
        if let Some(status) = self.0.try_wait()? {
            let mut said = String::new();
            if let Some(stderr) = &mut self.0.stderr {
                stderr.read_to_string(&mut said)?;
            }
            bail!("fio ended ({status}): {}", said.trim());
        }
        for thread in fs::read_dir(format!("/proc/{}/task", self.0.id()))? {
            let thread = thread?.path();
            let books = books(&thread);
            // fio has threads that soon end.
            if thread.exists() && books?.bytes >= bytes {
                return Ok(Some(thread));
            }
        }
        Ok(None)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a thread has done so far.
struct Books {
    /// Read from drives, in bytes.
    bytes: u64,
    /// Processor time.
    cpu: Duration,
}

fn books(thread: &Path) -> anyhow::Result<Books> {
    let of = |name: &str| {
        let path = thread.join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let io = of("io")?;
    let bytes = io
        .lines()
        .find_map(|line| line.strip_prefix("read_bytes: "));
    let schedstat = of("schedstat")?;
    let cpu = schedstat.split(' ').next();
    let number = |text: Option<&str>| text.and_then(|text| text.trim().parse::<u64>().ok());
    Ok(Books {
        bytes: number(bytes).context("the kernel does not count what a thread reads")?,
        cpu: Duration::from_nanos(number(cpu).context("the kernel does not count processor time")?),
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
