//! Finds the directories of the process's control groups.

use std::fs;
use std::path::{Path, PathBuf};

use crate::memory::Roots;

/// A hierarchy of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V2,
}

/// The directories of the process's group and of its ancestors, in each hierarchy that may have the `controller`. A limit holds for
/// everything below it, so every ancestor counts.
pub(crate) fn directories(roots: &Roots, controller: &str) -> Vec<(Version, PathBuf)> {
    let read = |name| fs::read_to_string(roots.proc.join(name)).unwrap_or_default();
    let (membership, mounts) = (read("self/cgroup"), read("self/mountinfo"));
    let mut found = Vec::new();
    for version in [Version::V1, Version::V2] {
        let Some(own) = own_path(&membership, version, controller) else {
            continue;
        };
        let Some((mount_root, mount_point)) = mount(&mounts, version, controller) else {
            continue;
        };
        let top = roots
            .root
            .join(mount_point.strip_prefix("/").unwrap_or(&mount_point));
        // In a container the mount may show only a part of the tree: what lies outside cannot be read.
        let below = Path::new(own)
            .strip_prefix(&mount_root)
            .unwrap_or(Path::new(""));
        found.extend(below.ancestors().map(|below| (version, top.join(below))));
    }
    found
}

/// The process's path in the hierarchy, from `/proc/self/cgroup` (`4:memory:/a/b`, `0::/a/b`).
fn own_path<'a>(membership: &'a str, version: Version, controller: &str) -> Option<&'a str> {
    membership.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let found = match version {
            Version::V1 => controllers.split(',').any(|c| c == controller),
            Version::V2 => id == "0" && controllers.is_empty(),
        };
        found.then_some(path)
    })
}

/// Root and mount point of the hierarchy, from `/proc/self/mountinfo`.
fn mount(mounts: &str, version: Version, controller: &str) -> Option<(PathBuf, PathBuf)> {
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, point) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?, right.nth(1)?);
        let found = match version {
            Version::V1 => kind == "cgroup" && options.split(',').any(|o| o == controller),
            Version::V2 => kind == "cgroup2",
        };
        found.then(|| (PathBuf::from(root), PathBuf::from(point)))
    })
}
