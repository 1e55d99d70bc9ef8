//! Finds the drive below a path: through partitions, volumes, subvolumes, bind mounts and overlays.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, makedev, minor};

use crate::mount::mount_of;

/// Overlays may lie on overlays.
const MAX_DEPTH: usize = 8;

/// The number of the drive that holds `path`, which exists: of the whole disk, if the kernel tells which one that is; otherwise the
/// `st_dev` of the path. Loop devices count as drives.
///
/// # Errors
/// A path that cannot be examined.
pub fn drive_of(path: &Path) -> io::Result<u64> {
    below(path, MAX_DEPTH)
}

fn below(path: &Path, depth: usize) -> io::Result<u64> {
    let dev = fs::metadata(path)?.dev();
    // File systems that are not on one block device have numbers of the kind 0:N.
    if major(dev) != 0 {
        return Ok(disk(dev, MAX_DEPTH));
    }
    let drive = mount_of(path).and_then(|mount| match mount.kind.as_str() {
        "overlay" if depth > 0 => mount
            .layers()
            .find_map(|layer| below(&layer.join(&mount.inside), depth - 1).ok()),
        "overlay" => None,
        _ => {
            let source = fs::metadata(&mount.source).ok()?;
            let block = source.file_type().is_block_device();
            block.then(|| disk(source.rdev(), MAX_DEPTH))
        }
    });
    Ok(drive.unwrap_or(dev))
}

/// The disk below a block device: of a partition its disk, of a volume the only device below it.
fn disk(dev: u64, depth: usize) -> u64 {
    let sys = PathBuf::from(format!("/sys/dev/block/{}:{}", major(dev), minor(dev)));
    let Ok(block) = fs::canonicalize(sys) else {
        return dev;
    };
    if block.join("partition").exists()
        && let Some(parent) = block.parent().and_then(number)
    {
        return disk(parent, depth.saturating_sub(1));
    }
    let slaves = fs::read_dir(block.join("slaves")).into_iter().flatten();
    let mut slaves: Vec<u64> = slaves
        .filter_map(|slave| number(&slave.ok()?.path()))
        .map(|slave| {
            if depth == 0 {
                slave
            } else {
                disk(slave, depth - 1)
            }
        })
        .collect();
    slaves.dedup();
    match slaves[..] {
        [only] => only,
        // Several drives serve it, or none that the kernel names.
        _ => dev,
    }
}

/// The number of a block device, from its directory in sysfs.
fn number(block: &Path) -> Option<u64> {
    let text = fs::read_to_string(block.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_directory_share_a_drive() {
        let exe = std::env::current_exe().unwrap();
        let drive = drive_of(&exe).unwrap();
        assert_eq!(drive, drive_of(exe.parent().unwrap()).unwrap());
        assert!(drive_of(Path::new("/nonexistent")).is_err());
    }
}
