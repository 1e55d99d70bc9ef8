//! Unfinished files under temporary names.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// Opens an unfinished file for reading and writing, as long as it was, and makes it if there is none.
///
/// # Errors
/// Besides those of the system: a link, a pipe or another thing that is no regular file, and a file that has another name
/// too. Writing there would destroy what is somebody else's.
pub(crate) fn open_part(path: &Path) -> io::Result<File> {
    let refused = || {
        io::Error::other(
            "it is a link, no regular file, or has several names, and is not written to: remove it",
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
    // No name at all: another process has just removed it.
    if meta.is_file() && meta.nlink() <= 1 {
        Ok(file)
    } else {
        Err(refused())
    }
}
