//! Recognises files that stand in for others: links to files that do not exist, and git-lfs pointers.

use std::fmt;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Why a file is not the one that its name promises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StandIn {
    /// A link, or a chain of them, to this file, which does not exist.
    Link(PathBuf),
    /// A git-lfs pointer.
    Pointer,
}

/// What a git-lfs pointer begins with.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
/// Longest pointer, in bytes.
const MAX_POINTER: u64 = 1024;
/// More links than Linux follows.
const MAX_LINKS: usize = 40;

impl StandIn {
    /// Examines a path; `None` for a usual file, and for none.
    pub fn find(path: &Path) -> Option<StandIn> {
        let Ok(meta) = fs::metadata(path) else {
            return missing_target(path).map(StandIn::Link);
        };
        // Opening a FIFO would wait for a writer.
        if !meta.is_file() || meta.len() > MAX_POINTER {
            return None;
        }
        let mut start = Vec::new();
        let file = fs::File::open(path).ok()?.take(POINTER.len() as u64);
        { file }.read_to_end(&mut start).ok()?;
        (start == POINTER).then_some(StandIn::Pointer)
    }

    /// What to do about the stand-in at `path`.
    pub fn remedy(&self, path: &Path) -> String {
        match self {
            StandIn::Link(_) => "fetch the file again, or restore the target of the link".into(),
            StandIn::Pointer => {
                let dir = path.parent().unwrap_or(Path::new("."));
                format!("run git lfs pull in {}", dir.display())
            }
        }
    }
}

impl fmt::Display for StandIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StandIn::Link(target) => {
                write!(f, "is a link to {}, which does not exist", target.display())
            }
            StandIn::Pointer => f.write_str("is a git-lfs pointer, not the file itself"),
        }
    }
}

/// The file at the end of a chain of links, if it does not exist.
fn missing_target(path: &Path) -> Option<PathBuf> {
    let mut at = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&at) {
            Ok(target) => at = at.parent().unwrap_or(Path::new("")).join(target),
            Err(_) => return (at != path && !at.exists()).then_some(at),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_to_nothing_and_pointers_are_recognised() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        symlink("second", path("first")).unwrap();
        symlink("../blob", path("second")).unwrap();
        let target = dir.path().join("../blob");
        assert_eq!(StandIn::find(&path("first")), Some(StandIn::Link(target)));
        assert_eq!(StandIn::find(&path("absent")), None);
        symlink("loop", path("loop")).unwrap();
        assert_eq!(StandIn::find(&path("loop")), None);
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n";
        fs::write(path("pointer"), pointer).unwrap();
        assert_eq!(StandIn::find(&path("pointer")), Some(StandIn::Pointer));
        symlink("pointer", path("linked")).unwrap();
        assert_eq!(StandIn::find(&path("linked")), Some(StandIn::Pointer));
        fs::write(path("text"), "version 2").unwrap();
        assert_eq!(StandIn::find(&path("text")), None);
        let remedy = StandIn::Pointer.remedy(&path("pointer"));
        assert_eq!(
            remedy,
            format!("run git lfs pull in {}", dir.path().display())
        );
    }
}
