//! A control group that limits how fast its processes read each drive: `blkio` of version 1, `io` of version 2.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Drive, LabError};

/// A control group of our own. Dropping it moves this process back and removes it.
#[derive(Debug)]
pub(super) struct Throttle {
    group: PathBuf,
    version: Version,
    /// `cgroup.procs` of the group that this process came from.
    home: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Throttle {
    pub(super) fn new() -> Result<Throttle, LabError> {
        let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
        let (root, version) = hierarchy(&mounts).ok_or_else(|| {
            LabError::Missing(
                "the blkio controller (mount -t cgroup -o blkio none /sys/fs/cgroup/blkio) or version 2 with io".into(),
            )
        })?;
        if version == Version::V2 {
            write(&root.join("cgroup.subtree_control"), "+io")?;
        }
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let home = root.join(own_group(&own, version)).join("cgroup.procs");
        // Several labs may exist at once, also in one process: the directory that could be made is this one's.
        let mut number = 0;
        let group = loop {
            let group = root.join(format!("colibri-lab-{}-{number}", std::process::id()));
            match fs::create_dir(&group) {
                Ok(()) => break group,
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(source) => {
                    let what = format!("make {}", group.display());
                    return Err(LabError::Io { what, source });
                }
            }
        };
        Ok(Throttle {
            group,
            version,
            home,
        })
    }

    pub(super) fn procs(&self) -> PathBuf {
        self.group.join("cgroup.procs")
    }

    pub(super) fn join(&self) -> Result<(), LabError> {
        write(&self.procs(), &std::process::id().to_string())
    }

    pub(super) fn set_rate(&self, drive: &Drive, rate: Option<u64>) -> Result<(), LabError> {
        let number = drive.number();
        match self.version {
            // 0 lifts the limit.
            Version::V1 => write(
                &self.group.join("blkio.throttle.read_bps_device"),
                &format!("{number} {}", rate.unwrap_or(0)),
            ),
            Version::V2 => {
                let rate = rate.map_or("max".to_owned(), |rate| rate.to_string());
                write(&self.group.join("io.max"), &format!("{number} rbps={rate}"))
            }
        }
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        let inside = fs::read_to_string(self.procs()).unwrap_or_default();
        for process in inside.lines() {
            let _ = write(&self.home, process);
        }
        if let Err(e) = fs::remove_dir(&self.group) {
            eprintln!("SSD lab: cannot remove {}: {e}", self.group.display());
        }
    }
}

/// Where a hierarchy that can throttle is mounted.
fn hierarchy(mounts: &str) -> Option<(PathBuf, Version)> {
    let fields = |line: &'_ str| -> Option<(PathBuf, String, String)> {
        let mut fields = line.split(' ').skip(1).map(str::to_owned);
        Some((fields.next()?.into(), fields.next()?, fields.next()?))
    };
    let mounts = mounts.lines().filter_map(fields);
    mounts
        .filter_map(|(path, kind, options)| match kind.as_str() {
            "cgroup" if options.split(',').any(|o| o == "blkio") => Some((path, Version::V1)),
            "cgroup2" => {
                let controllers = fs::read_to_string(path.join("cgroup.controllers")).ok()?;
                let io = controllers.split_whitespace().any(|c| c == "io");
                io.then_some((path, Version::V2))
            }
            _ => None,
        })
        .next()
}

/// The group of a process in a hierarchy, relative to its root, from /proc/PID/cgroup.
fn own_group(text: &str, version: Version) -> PathBuf {
    let of_hierarchy = |line: &str| -> Option<String> {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next()?;
        let found = match version {
            Version::V1 => controllers.split(',').any(|c| c == "blkio"),
            Version::V2 => controllers.is_empty(),
        };
        found.then(|| {
            fields
                .next()
                .unwrap_or_default()
                .trim_start_matches('/')
                .to_owned()
        })
    };
    text.lines()
        .find_map(of_hierarchy)
        .unwrap_or_default()
        .into()
}

fn write(path: &Path, text: &str) -> Result<(), LabError> {
    fs::write(path, text).map_err(|source| LabError::Io {
        what: format!("write {text:?} to {}", path.display()),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_throttling_hierarchy_of_version_1_is_found() {
        let mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup /sys/fs/cgroup/blkio cgroup rw,relatime,blkio 0 0\n";
        let found = Some((PathBuf::from("/sys/fs/cgroup/blkio"), Version::V1));
        assert_eq!(hierarchy(mounts), found);
        assert_eq!(hierarchy("proc /proc proc rw 0 0\n"), None);
    }

    #[test]
    fn the_group_of_a_process() {
        let text = "7:blkio:/a/b\n4:memory:/c\n0::/d.slice\n";
        assert_eq!(own_group(text, Version::V1), Path::new("a/b"));
        assert_eq!(own_group(text, Version::V2), Path::new("d.slice"));
    }
}
