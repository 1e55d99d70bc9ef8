//! Opens files for reads by range: one buffered descriptor and, where the file system allows it, one with O_DIRECT.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::Advice as Fadvice;

pub use crate::direct::DirectAlign;
use crate::direct::{self, Direct};
use crate::kernel::explained;
use crate::physical;

/// The longest single read in bytes; longer ones are done in pieces (Linux reads at most 2 GiB - 4 KiB at once).
pub(crate) const MAX_READ: usize = 1 << 30;

/// Advice to the page cache about a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Start reading the range into the page cache.
    WillNeed,
    /// Drop the range: it will not be read again soon.
    DontNeed,
}

/// Why a file cannot be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file could not be opened or examined.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A read failed.
    #[error("cannot read {} at offset {offset}: {source}{}", path.display(), explained(source))]
    Read {
        /// The file.
        path: PathBuf,
        /// Byte offset of the read.
        offset: u64,
        /// The kernel's error.
        source: io::Error,
    },
    /// The file ends inside a read.
    #[error("{} ends at byte {end}, inside a read of {len} bytes at offset {offset}", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Byte offset of the read.
        offset: u64,
        /// Requested bytes.
        len: usize,
        /// Its size in bytes.
        end: u64,
    },
}

/// A read-only file. Cheap to share behind an `Arc`; every method takes `&self`.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    buffered: std::fs::File,
    /// Opened at the first use: `Err` says why there is none.
    direct: OnceLock<Result<Direct, String>>,
    size: u64,
    /// Found at the first use.
    drive: OnceLock<u64>,
}

impl File {
    /// Opens a regular file for reading.
    ///
    /// # Errors
    /// [`FileError::Open`] when it does not exist, is no regular file, or permission is missing.
    pub fn open(path: impl Into<PathBuf>) -> Result<File, FileError> {
        let path = path.into();
        let opened = (|| {
            // O_NONBLOCK: a FIFO named like a shard must not hang the open. It has no effect on files.
            let file = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
                .open(&path)?;
            let meta = file.metadata()?;
            if !meta.is_file() {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "not a regular file",
                ));
            }
            // No readahead: nothing would drop the bytes after a range from the page cache. A read of any length still becomes
            // large requests.
            let _ = rustix::fs::fadvise(&file, 0, None, Fadvice::Random);
            Ok((file, meta))
        })();
        match opened {
            Ok((buffered, meta)) => Ok(File {
                path,
                buffered,
                direct: OnceLock::new(),
                size: meta.len(),
                drive: OnceLock::new(),
            }),
            Err(source) => Err(FileError::Open { path, source }),
        }
    }

    /// Size in bytes when the file was opened.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of the drive that holds the file: two files with the same number share one drive's bandwidth. It is the whole disk below
    /// partitions, subvolumes, bind mounts and overlays; where the kernel does not tell, the `st_dev` of the file.
    pub fn drive(&self) -> u64 {
        *self
            .drive
            .get_or_init(|| physical::drive_of(&self.path).unwrap_or(0))
    }

    /// The buffered descriptor.
    pub fn buffered_fd(&self) -> BorrowedFd<'_> {
        self.buffered.as_fd()
    }

    /// The O_DIRECT descriptor and the alignment that its reads need.
    ///
    /// # Errors
    /// In words, why reads of this file go through the page cache.
    pub fn direct_fd(&self) -> Result<(BorrowedFd<'_>, DirectAlign), &str> {
        let open = || Direct::open(&self.path, &self.buffered);
        match self.direct.get_or_init(open) {
            Ok(direct) => Ok((direct.file.as_fd(), direct.align)),
            Err(reason) => Err(reason),
        }
    }

    /// Reads exactly `buf.len()` bytes at `offset` through the page cache, in pieces of at most
    /// 1 GiB.
    ///
    /// # Errors
    /// [`FileError::Truncated`] when the file ends first, [`FileError::Read`] when the drive fails.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), FileError> {
        let len = buf.len();
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(MAX_READ);
            match self
                .buffered
                .read_at(&mut buf[done..done + piece], offset + done as u64)
            {
                Ok(0) => {
                    let end = offset + done as u64;
                    return Err(FileError::Truncated {
                        path: self.path.clone(),
                        offset,
                        len,
                        end,
                    });
                }
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    let offset = offset + done as u64;
                    return Err(FileError::Read {
                        path: self.path.clone(),
                        offset,
                        source,
                    });
                }
            }
        }
        Ok(())
    }

    /// Whether the byte at `offset` is in the page cache: reads it on condition that no drive is used. `None` where the file
    /// system cannot tell.
    pub fn is_cached(&self, offset: u64) -> Option<bool> {
        direct::is_cached(&self.buffered, offset)
    }

    /// Advises the page cache about a range. Failures are ignored.
    pub fn advise(&self, offset: u64, len: u64, advice: Advice) {
        let advice = match advice {
            Advice::WillNeed => Fadvice::WillNeed,
            Advice::DontNeed => Fadvice::DontNeed,
        };
        // A length of 0 would mean "to the end of the file".
        if let Some(len) = std::num::NonZeroU64::new(len) {
            let _ = rustix::fs::fadvise(&self.buffered, offset, Some(len), advice);
        }
    }
}

#[cfg(test)]
impl File {
    /// A file that no test reads.
    pub(crate) fn unread(size: u64) -> File {
        File {
            path: "/dev/null".into(),
            buffered: std::fs::File::open("/dev/null").unwrap(),
            direct: OnceLock::from(Err("it is not read".into())),
            size,
            drive: OnceLock::from(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On the disk: a tmpfs has no O_DIRECT.
    fn directory() -> tempfile::TempDir {
        let test = std::env::current_exe().unwrap();
        tempfile::tempdir_in(test.parent().unwrap()).unwrap()
    }

    #[test]
    fn a_replaced_file_keeps_its_first_content() {
        let dir = directory();
        let (path, other) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&path, [1; 4096]).unwrap();
        std::fs::write(&other, [2; 4096]).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::rename(&other, &path).unwrap();
        let reason = file.direct_fd().unwrap_err();
        assert!(
            reason.contains("replaced") || reason.contains("O_DIRECT"),
            "{reason}"
        );
        let mut byte = [0];
        file.read_at(&mut byte, 0).unwrap();
        assert_eq!(byte, [1]);
    }

    #[test]
    fn a_dropped_range_is_not_cached() {
        let dir = directory();
        let path = dir.path().join("a");
        std::fs::write(&path, [1; 8192]).unwrap();
        std::fs::File::open(&path).unwrap().sync_all().unwrap();
        let file = File::open(&path).unwrap();
        if file.is_cached(5000) == Some(true) {
            file.advise(0, 8192, Advice::DontNeed);
            assert_eq!(file.is_cached(5000), Some(false));
        }
    }
}
