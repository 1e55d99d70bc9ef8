//! SSDs to experiment with: loop devices with ext4 on them, each of them as fast as it is told to be.
//!
//! Their speed is set by the blkio throttle, which holds for the processes in one control group: see [`Lab::join`] and
//! [`Lab::command`]. It works in slices of 100 ms (40 MiB at 400 MiB/s arrive at once, then nothing for the rest of the slice): right
//! for bandwidth over seconds, not for latency.
//!
//! Everything is taken down on drop, also when a test panics.

mod drive;
mod throttle;

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub use drive::Drive;
use throttle::Throttle;

/// Why there is no lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// Not the superuser.
    #[error("the SSD lab makes loop devices, mounts and a control group: it needs root")]
    NotRoot,
    /// Something that it is made of is missing here.
    #[error("the SSD lab needs {0}")]
    Missing(String),
    /// A program that sets up drives failed.
    #[error("{program} failed: {message}")]
    Program {
        /// With its arguments.
        program: String,
        /// What it said.
        message: String,
    },
    /// A file could not be written.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The operating system's answer.
        source: io::Error,
    },
}

impl LabError {
    /// Whether a lab is impossible here, rather than broken: a test is skipped then.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, LabError::NotRoot | LabError::Missing(_))
    }
}

/// Where the bytes of the drives are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// In memory, in a tmpfs: nothing else slows them down.
    Memory,
    /// In files on the disk, read by the loop device with O_DIRECT.
    Disk,
}

/// Drives under one throttle.
#[derive(Debug)]
pub struct Lab {
    // In this order: processes leave the control group, drives are unmounted, then the directory goes.
    throttle: Throttle,
    drives: Vec<Drive>,
    dir: tempfile::TempDir,
}

impl Lab {
    /// A lab without drives.
    ///
    /// # Errors
    /// Without root, loop devices, or a control group that throttles.
    pub fn new(backing: Backing) -> Result<Lab, LabError> {
        if !rustix::process::geteuid().is_root() {
            return Err(LabError::NotRoot);
        }
        if !Path::new("/dev/loop-control").exists() {
            return Err(LabError::Missing("loop devices (modprobe loop)".into()));
        }
        let parent = match backing {
            Backing::Memory => PathBuf::from("/dev/shm"),
            Backing::Disk => std::env::temp_dir(),
        };
        let dir = tempfile::Builder::new()
            .prefix("colibri-lab-")
            .tempdir_in(&parent);
        let dir = dir.map_err(|source| LabError::Io {
            what: format!("make a directory in {}", parent.display()),
            source,
        })?;
        Ok(Lab {
            throttle: Throttle::new()?,
            drives: Vec::new(),
            dir,
        })
    }

    /// Adds a drive of `bytes` bytes, which for throttled processes gives at most `rate` bytes a second; `None`: whatever the
    /// backing gives. Returns its number.
    ///
    /// # Errors
    /// When a program that makes file systems or mounts them fails.
    pub fn add(&mut self, bytes: u64, rate: Option<u64>) -> Result<usize, LabError> {
        let number = self.drives.len();
        self.drives
            .push(Drive::new(self.dir.path(), number, bytes)?);
        self.set_rate(number, rate)?;
        Ok(number)
    }

    /// The directory where a drive is mounted.
    pub fn path(&self, drive: usize) -> &Path {
        self.drives[drive].path()
    }

    /// The drives.
    pub fn drives(&self) -> &[Drive] {
        &self.drives
    }

    /// Changes the speed of a drive, also while it is being read; `None` lifts the limit.
    ///
    /// # Errors
    /// When the control group refuses.
    pub fn set_rate(&self, drive: usize, rate: Option<u64>) -> Result<(), LabError> {
        self.throttle.set_rate(&self.drives[drive], rate)
    }

    /// Lets every later read of a drive fail with EIO, except what is in the page cache.
    ///
    /// # Errors
    /// When it cannot be remounted read-only, for instance because a file on it is open for writing.
    pub fn break_drive(&self, drive: usize) -> Result<(), LabError> {
        self.drives[drive].break_it()
    }

    /// Copies the files of a directory (not its subdirectories) to a drive, and drops them from the page cache.
    ///
    /// # Errors
    /// When a file cannot be read or written.
    pub fn copy_to(&self, drive: usize, from: &Path) -> Result<(), LabError> {
        self.drives[drive].copy(from)
    }

    /// Puts this process under the throttle, until the lab is gone.
    ///
    /// # Errors
    /// When the control group refuses.
    pub fn join(&self) -> Result<(), LabError> {
        self.throttle.join()
    }

    /// A command that runs under the throttle.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        // A shell that puts itself into the group and then becomes the program: no window in which it runs outside.
        let mut command = Command::new("/bin/sh");
        command
            .arg("-c")
            .arg("echo $$ > \"$0\" && exec \"$@\"")
            .arg(self.throttle.procs())
            .arg(program);
        command
    }
}

/// Runs a program to its end and returns what it printed.
fn run(program: &str, args: &[&str]) -> Result<String, LabError> {
    let shown = || format!("{program} {}", args.join(" "));
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .map_err(|_| LabError::Missing(format!("the program {program}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(LabError::Program {
        program: shown(),
        message: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}
