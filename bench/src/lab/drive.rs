//! One drive: a file, a loop device on it, an ext4 on that.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use colibri_ring::{Advice, File};

use super::{LabError, run};

/// A mounted loop device. Dropping it unmounts it and deletes its bytes.
#[derive(Debug)]
pub struct Drive {
    backing: PathBuf,
    mount: PathBuf,
    /// `st_dev` of the files on it.
    st_dev: u64,
}

impl Drive {
    pub(super) fn new(dir: &Path, number: usize, bytes: u64) -> Result<Drive, LabError> {
        let backing = dir.join(format!("drive-{number}.img"));
        let mount = dir.join(format!("drive-{number}"));
        let made = fs::File::create(&backing)
            .and_then(|file| file.set_len(bytes))
            .and_then(|()| fs::create_dir(&mount));
        made.map_err(|source| LabError::Io {
            what: format!("make {}", backing.display()),
            source,
        })?;
        let (file, place) = (text(&backing)?, text(&mount)?);
        // Without a journal and without lazy initialisation nothing writes in the background.
        run(
            "mkfs.ext4",
            &[
                "-q",
                "-F",
                "-m",
                "0",
                "-O",
                "^has_journal",
                "-E",
                "lazy_itable_init=0,nodiscard",
                file,
            ],
        )?;
        // A tmpfs refuses direct I/O, and needs none: it is the page cache already.
        let device = run("losetup", &["--find", "--show", "--direct-io=on", file])
            .or_else(|_| run("losetup", &["--find", "--show", file]))?;
        let mounted = run("mount", &["-o", "noatime", &device, place]);
        // From now on the device goes when it is unmounted, or now if it was not mounted.
        let _ = run("losetup", &["--detach", &device]);
        mounted?;
        let mut drive = Drive {
            backing,
            mount,
            st_dev: 0,
        };
        drive.st_dev = fs::metadata(&drive.mount)
            .map_err(|source| LabError::Io {
                what: format!("look at {}", drive.mount.display()),
                source,
            })?
            .dev();
        Ok(drive)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount
    }

    /// "major:minor", as control groups name it.
    pub fn number(&self) -> String {
        format!(
            "{}:{}",
            rustix::fs::major(self.st_dev),
            rustix::fs::minor(self.st_dev)
        )
    }

    /// A read-write mount would put the end of the truncated file back where it was, and reads would give zeros.
    pub(super) fn break_it(&self) -> Result<(), LabError> {
        run("mount", &["-o", "remount,ro", text(&self.mount)?])?;
        let file = fs::File::options().write(true).open(&self.backing);
        file.and_then(|file| file.set_len(0))
            .map_err(|source| LabError::Io {
                what: format!("truncate {}", self.backing.display()),
                source,
            })
    }

    pub(super) fn copy(&self, from: &Path) -> Result<(), LabError> {
        let copied = || -> io::Result<()> {
            for entry in fs::read_dir(from)? {
                let path = entry?.path();
                if !path.is_file() {
                    continue;
                }
                let to = self.mount.join(path.file_name().unwrap_or_default());
                fs::copy(&path, &to)?;
                // Only clean pages are dropped.
                fs::File::open(&to)?.sync_all()?;
                let file = File::open(&to).map_err(io::Error::other)?;
                file.advise(0, file.size(), Advice::DontNeed);
            }
            Ok(())
        };
        copied().map_err(|source| LabError::Io {
            what: format!("copy {} to {}", from.display(), self.mount.display()),
            source,
        })
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        let Ok(mount) = text(&self.mount) else { return };
        // A process of a failing test may still sit on it.
        if run("umount", &[mount]).is_err()
            && let Err(e) = run("umount", &["--lazy", mount])
        {
            eprintln!("SSD lab: {e}");
        }
        // The kernel detaches the device a moment later.
        if let Ok(backing) = text(&self.backing) {
            let attached =
                || run("losetup", &["--associated", backing]).is_ok_and(|s| !s.is_empty());
            for _ in 0..50 {
                if !attached() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        let _ = fs::remove_dir(&self.mount);
        let _ = fs::remove_file(&self.backing);
    }
}

fn text(path: &Path) -> Result<&str, LabError> {
    path.to_str()
        .ok_or_else(|| LabError::Missing("a temporary directory with a UTF-8 name".into()))
}
