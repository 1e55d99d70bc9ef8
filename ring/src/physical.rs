//! Finds the drive below a path: through partitions, volumes, subvolumes, bind mounts and overlays.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, major, makedev, minor, statx};

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

/// A mounted file system.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    kind: String,
    source: PathBuf,
    /// Options of the file system, as in `mountinfo`.
    options: String,
    /// The path below the root of the file system.
    inside: PathBuf,
}

impl Mount {
    /// The directories that an overlay joins, the one that hides the others first.
    fn layers(&self) -> impl Iterator<Item = PathBuf> {
        let value = |name: &'static str| {
            let options = self.options.split(',');
            options.filter_map(move |option| option.strip_prefix(name))
        };
        let upper = value("upperdir=").map(unescaped);
        // `lowerdir+=` has one directory; a colon in a name is escaped.
        let single = value("lowerdir+=").map(unescaped);
        let lower = value("lowerdir=").flat_map(|list| {
            let joined = list.replace("\\:", "\0");
            let names: Vec<PathBuf> = joined
                .split(':')
                .map(|name| unescaped(&name.replace('\0', ":")))
                .collect();
            names
        });
        upper.chain(lower).chain(single)
    }
}

fn mount_of(path: &Path) -> Option<Mount> {
    let path = fs::canonicalize(path).ok()?;
    let id = statx(CWD, &path, AtFlags::empty(), StatxFlags::MNT_ID).ok()?;
    if id.stx_mask & StatxFlags::MNT_ID.bits() == 0 {
        return None;
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    find(&mounts, id.stx_mnt_id, &path)
}

fn find(mountinfo: &str, id: u64, path: &Path) -> Option<Mount> {
    let line = (mountinfo.lines()).find(|line| line.split(' ').next() == Some(&id.to_string()))?;
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3).map(unescaped);
    let (root, point) = (left.next()?, left.next()?);
    let mut right = right.splitn(3, ' ');
    Some(Mount {
        kind: right.next()?.to_owned(),
        source: unescaped(right.next()?),
        options: right.next()?.to_owned(),
        inside: root
            .strip_prefix("/")
            .ok()?
            .join(path.strip_prefix(point).ok()?),
    })
}

/// A path of `mountinfo`, which writes blanks and backslashes as three octal digits.
fn unescaped(text: &str) -> PathBuf {
    let codes = [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ];
    let plain = codes.iter();
    PathBuf::from(plain.fold(text.to_owned(), |text, (code, plain)| {
        text.replace(code, plain)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_id() {
        let mounts = "22 1 254:0 / / rw,relatime - ext4 /dev/root rw\n\
            40 22 0:30 /sub /a\\040b rw shared:1 - btrfs /dev/sda2 rw,compress=zstd:3\n\
            41 22 0:31 / /o rw - overlay overlay rw,lowerdir=/l\\1341:/l2,upperdir=/u,workdir=/w\n";
        let mount = find(mounts, 40, Path::new("/a b/m/f")).unwrap();
        assert_eq!(mount.kind, "btrfs");
        assert_eq!(mount.source, Path::new("/dev/sda2"));
        assert_eq!(mount.inside, Path::new("sub/m/f"));
        let overlay = find(mounts, 41, Path::new("/o/m")).unwrap();
        let layers: Vec<PathBuf> = overlay.layers().collect();
        assert_eq!(layers, ["/u", "/l\\1", "/l2"].map(PathBuf::from));
        assert_eq!(find(mounts, 42, Path::new("/o")), None);
    }

    #[test]
    fn files_of_one_directory_share_a_drive() {
        let exe = std::env::current_exe().unwrap();
        let drive = drive_of(&exe).unwrap();
        assert_eq!(drive, drive_of(exe.parent().unwrap()).unwrap());
        assert!(drive_of(Path::new("/nonexistent")).is_err());
    }
}
