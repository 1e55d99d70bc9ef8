//! Opens unfinished files under temporary names.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;

/// The temporary name of a file: hidden, and without the ending of a shard.
pub(crate) fn part_of(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".part");
    path.with_file_name(name)
}

/// Opens an unfinished file for reading and writing at its current length, or creates it.
///
/// # Errors
/// Those of the system, and a path that is a link, not a regular file, or a file with several names: writing to one of these would
/// destroy another file.
pub(crate) fn open_part(path: &Path) -> io::Result<File> {
    let refused = || {
        io::Error::other(
            "it is a link, not a regular file, or has several names, and is not written to: remove it",
        )
    };
    // A pipe without a reader would wait for one.
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(flags.bits() as i32)
        .open(path)
        .map_err(|e| match Errno::from_io_error(&e) {
            Some(Errno::LOOP | Errno::NXIO) => refused(),
            _ => e,
        })?;
    let meta = file.metadata()?;
    // No name: another process has just removed it.
    if meta.is_file() && meta.nlink() <= 1 {
        Ok(file)
    } else {
        Err(refused())
    }
}
