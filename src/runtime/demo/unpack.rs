//! Writes the demo model's files, verifies them on each use, and replaces damaged ones.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use sha2::{Digest, Sha256};

use super::{FILES, File, hex, sum_of};

/// Ensures that `dir` has all files with the right content; writes nothing if it does.
///
/// Safe against other processes that do the same: a rename publishes complete files, and readers of a replaced file
/// keep their open descriptor. Symbolic links in place of the directory or a file are replaced, not followed.
/// `temporary` is called with the directory that the files are first written to.
///
/// # Errors
/// A file system error, or content that differs from what was written.
pub fn keep(dir: &Path, temporary: &dyn Fn(&Path)) -> io::Result<()> {
    if damaged(dir)?.is_empty() {
        return Ok(());
    }
    let parent = (dir.parent()).ok_or_else(|| io::Error::other("it has no parent"))?;
    // The XDG specification requires mode 0700 for directories that a program creates.
    let mut maker = DirBuilder::new();
    maker.recursive(true).mode(0o700).create(parent)?;
    let part = tempfile::Builder::new()
        .prefix(".unpacking-")
        .tempdir_in(parent)?;
    temporary(part.path());
    write(part.path(), FILES)?;
    if fs::symlink_metadata(dir).is_ok_and(|found| !found.is_dir()) {
        fs::remove_file(dir)?;
    }
    // Renaming a directory replaces only a missing or empty one.
    match fs::rename(part.path(), dir) {
        // The temporary directory no longer exists under its old name.
        Ok(()) => drop(part.keep()),
        Err(_) => {
            for file in damaged(dir)? {
                fs::rename(part.path().join(file.name), dir.join(file.name))?;
            }
        }
    }
    tracing::info!("the demo model is unpacked to {}", dir.display());
    match damaged(dir)?.first() {
        None => Ok(()),
        Some(file) => Err(io::Error::other(format!(
            "{} is not what was written",
            file.name
        ))),
    }
}

/// Writes new files.
///
/// # Errors
/// A file system error, or a file of that name that already exists.
pub fn write(dir: &Path, files: &[File]) -> io::Result<()> {
    for file in files {
        let mut out = fs::File::create_new(dir.join(file.name))?;
        out.write_all(file.bytes)?;
    }
    Ok(())
}

/// The files that are missing or have other content; all of them if `dir` is not a directory.
fn damaged(dir: &Path) -> io::Result<Vec<File>> {
    match fs::symlink_metadata(dir) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Ok(FILES.to_vec()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(FILES.to_vec()),
        Err(error) => return Err(error),
    }
    let intact = |file: &File| is_intact(&dir.join(file.name), file).unwrap_or(false);
    Ok(FILES.iter().filter(|file| !intact(file)).copied().collect())
}

/// Whether a path is a regular file with the content of `file`.
fn is_intact(path: &Path, file: &File) -> io::Result<bool> {
    // NONBLOCK: opening a FIFO of that name would block.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(path)?;
    let found = opened.metadata()?;
    if !found.is_file() || found.len() != file.bytes.len() as u64 {
        return Ok(false);
    }
    let (mut digest, mut rest) = (Sha256::new(), opened.take(found.len()));
    let mut buffer = vec![0; 1 << 16];
    loop {
        match rest.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => digest.update(&buffer[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(sum_of(file.name) == Some(&hex(&digest.finalize())))
}
