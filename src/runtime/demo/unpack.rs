//! Files that are written once, looked at on every use, and replaced when they are not what they should be.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use sha2::{Digest, Sha256};

use super::{FILES, File, hex, sum_of};

/// Makes sure that `dir` has all files with the right content. Nothing is written when it has.
///
/// Other processes may do the same at the same time: files appear under their names complete, by a rename, and whoever reads
/// one that is replaced keeps what it has opened. Links in the place of the directory or of a file are replaced, not followed.
/// `temporary` is told where the files are written first.
///
/// # Errors
/// A file system that cannot be read or written, or gives back something else than what was written.
pub fn keep(dir: &Path, temporary: &dyn Fn(&Path)) -> io::Result<()> {
    if damaged(dir)?.is_empty() {
        return Ok(());
    }
    let parent = (dir.parent()).ok_or_else(|| io::Error::other("it has no parent"))?;
    // As the XDG specification wants what it makes: for the user alone.
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
    // A directory takes the place of none and of an empty one only.
    match fs::rename(part.path(), dir) {
        // There is nothing left to be removed.
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
/// A file system that cannot be written, or has a file of such a name.
pub fn write(dir: &Path, files: &[File]) -> io::Result<()> {
    for file in files {
        let mut out = fs::File::create_new(dir.join(file.name))?;
        out.write_all(file.bytes)?;
    }
    Ok(())
}

/// The files that are missing or not as they should be; all of them where there is no directory.
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
    // A pipe of that name would be waited for.
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
