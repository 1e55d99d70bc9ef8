//! Finds the file system that holds a path, in `/proc/self/mountinfo`.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Type of the file system, like `ext4`.
    pub kind: String,
    /// What is mounted: for most types a block device.
    pub source: PathBuf,
    /// Options of the file system.
    options: String,
    /// The path below the root of the file system.
    pub(crate) inside: PathBuf,
}

/// The file system that holds `path`; `None` where the kernel does not tell.
pub fn mount_of(path: &Path) -> Option<Mount> {
    let path = fs::canonicalize(path).ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let stat = statx(CWD, &path, AtFlags::empty(), StatxFlags::MNT_ID).ok();
    let id = stat.filter(|stat| stat.stx_mask & StatxFlags::MNT_ID.bits() != 0);
    find(&mounts, id.map(|stat| stat.stx_mnt_id), &path)
}

/// The mount with this id. Without one, which kernels before 5.8 do not tell, the deepest mount point: of several at one place the last
/// one is on top.
fn find(mountinfo: &str, id: Option<u64>, path: &Path) -> Option<Mount> {
    let lines = mountinfo.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ');
        let number: u64 = left.next()?.parse().ok()?;
        let mut left = left.skip(2).map(unescaped);
        let (root, point) = (left.next()?, left.next()?);
        let below = path.strip_prefix(&point).ok()?;
        let mut right = right.splitn(3, ' ');
        let mount = Mount {
            kind: right.next()?.to_owned(),
            source: unescaped(right.next()?),
            options: right.next()?.to_owned(),
            inside: root.strip_prefix("/").unwrap_or(&root).join(below),
        };
        Some((number, point.components().count(), mount))
    });
    let found = match id {
        Some(id) => { lines }.find(|(number, ..)| *number == id),
        None => lines.max_by_key(|(_, depth, _)| *depth),
    };
    found.map(|(.., mount)| mount)
}

impl Mount {
    /// The directories that an overlay joins, the one that hides the others first.
    pub(crate) fn layers(&self) -> impl Iterator<Item = PathBuf> {
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
        let mount = find(mounts, Some(40), Path::new("/a b/m/f")).unwrap();
        assert_eq!(mount.kind, "btrfs");
        assert_eq!(mount.source, Path::new("/dev/sda2"));
        assert_eq!(mount.inside, Path::new("sub/m/f"));
        let overlay = find(mounts, Some(41), Path::new("/o/m")).unwrap();
        let layers: Vec<PathBuf> = overlay.layers().collect();
        assert_eq!(layers, ["/u", "/l\\1", "/l2"].map(PathBuf::from));
        assert_eq!(find(mounts, Some(42), Path::new("/o")), None);
    }

    #[test]
    fn the_deepest_mount_holds_a_path() {
        let mounts = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
                      2 1 8:2 / /a\\040b rw - xfs /dev/nvme0n1p1 rw\n\
                      3 1 8:3 / /a rw - btrfs /dev/sdb rw\n";
        let found = |path: &str| find(mounts, None, Path::new(path)).unwrap().source;
        assert_eq!(found("/x/y"), Path::new("/dev/sda1"));
        assert_eq!(found("/a b/c"), Path::new("/dev/nvme0n1p1"));
        assert_eq!(found("/a/c"), Path::new("/dev/sdb"));
        assert_eq!(found("/ab"), Path::new("/dev/sda1"));
    }
}
