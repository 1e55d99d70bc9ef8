//! Runs a command on drives of given speeds. Needs root. In the command, `{0}`, `{1}`, ... stand for the directories where the
//! drives are mounted:
//!
//! ```text
//! cargo run --release -p colibri-bench --bin lab -- --drive 400MiB --drive 400MiB --copy MODEL \
//!     -- target/release/colibri-uring mirror bench --model {0} --mirror {1}
//! ```

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bytesize::ByteSize;
use clap::Parser;
use colibri_bench::lab::{Backing, Lab};

/// Runs a command on drives of given speeds
#[derive(Debug, Parser)]
#[command(
    after_help = "Needs root, loop devices, a control group that throttles, and memory (with --disk: room) for a copy of the directory \
    on each drive. In the command, {0}, {1}, ... are the drives' directories.\n\n\
    Example:\n  cargo build --release --workspace\n  \
    target/release/lab --drive 400MiB --drive 200MiB --copy MODEL -- \\\n    \
    target/release/colibri-uring mirror bench --model {0} --mirror {1}"
)]
struct Args {
    /// Speed of a drive in bytes a second, like 400MiB, or "max"; once for each drive
    #[arg(long = "drive", value_name = "SPEED", required = true)]
    drives: Vec<Speed>,
    /// Directory whose files are copied to every drive
    #[arg(long, value_name = "DIR")]
    copy: PathBuf,
    /// Keep the drives' bytes on disk, in the directory for temporary files, instead of in memory
    #[arg(long)]
    disk: bool,
    /// Change a speed while the command runs: DRIVE=SPEED@SECONDS
    #[arg(long, value_name = "CHANGE")]
    set: Vec<Change>,
    /// Break a drive while the command runs: DRIVE@SECONDS
    #[arg(long = "break", value_name = "BREAK")]
    broken: Vec<Break>,
    /// The command
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
struct Speed(Option<u64>);

impl FromStr for Speed {
    type Err = String;

    fn from_str(text: &str) -> Result<Speed, String> {
        match text {
            "max" => Ok(Speed(None)),
            _ => ByteSize::from_str(text).map(|size| Speed(Some(size.0))),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Change {
    drive: usize,
    speed: Speed,
    at: f64,
}

impl FromStr for Change {
    type Err = String;

    fn from_str(text: &str) -> Result<Change, String> {
        let wanted = || format!("{text} is not DRIVE=SPEED@SECONDS");
        let (rest, at) = text.split_once('@').ok_or_else(wanted)?;
        let (drive, speed) = rest.split_once('=').ok_or_else(wanted)?;
        Ok(Change {
            drive: drive.parse().map_err(|_| wanted())?,
            speed: speed.parse()?,
            at: at.parse().map_err(|_| wanted())?,
        })
    }
}

#[derive(Clone, Copy, Debug)]
struct Break {
    drive: usize,
    at: f64,
}

impl FromStr for Break {
    type Err = String;

    fn from_str(text: &str) -> Result<Break, String> {
        let wanted = || format!("{text} is not DRIVE@SECONDS");
        let (drive, at) = text.split_once('@').ok_or_else(wanted)?;
        Ok(Break {
            drive: drive.parse().map_err(|_| wanted())?,
            at: at.parse().map_err(|_| wanted())?,
        })
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let mut args = Args::parse();
    let drives = args.drives.len();
    let named = args
        .set
        .iter()
        .map(|c| c.drive)
        .chain(args.broken.iter().map(|b| b.drive));
    for drive in named {
        ensure!(
            drive < drives,
            "there is no drive {drive}: they are numbered from 0"
        );
    }
    let bytes =
        bytes_in(&args.copy).with_context(|| format!("cannot list {}", args.copy.display()))?;
    let mut lab = Lab::new(if args.disk {
        Backing::Disk
    } else {
        Backing::Memory
    })?;
    for speed in &args.drives {
        // A file system has needs of its own.
        let drive = lab.add(bytes + bytes / 16 + (16 << 20), speed.0)?;
        lab.copy_to(drive, &args.copy)?;
    }
    let filled = |text: &String| {
        (0..drives).fold(text.clone(), |text, drive| {
            text.replace(&format!("{{{drive}}}"), &lab.path(drive).to_string_lossy())
        })
    };
    let command: Vec<String> = args.command.iter().map(filled).collect();
    let mut child = lab.command(&command[0]).args(&command[1..]).spawn()?;
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let now = start.elapsed().as_secs_f64();
        let (due, later): (Vec<Change>, _) = args.set.iter().partition(|change| change.at <= now);
        args.set = later;
        for change in due {
            let Change { drive, speed, .. } = change;
            lab.set_rate(drive, speed.0)?;
        }
        let (due, later): (Vec<Break>, _) = args.broken.iter().partition(|b| b.at <= now);
        args.broken = later;
        for Break { drive, .. } in due {
            lab.break_drive(drive)?;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(1)))
}

/// Bytes of the files of a directory.
fn bytes_in(dir: &std::path::Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        let meta = std::fs::metadata(entry?.path())?;
        if meta.is_file() {
            bytes += meta.len();
        }
    }
    Ok(bytes)
}
