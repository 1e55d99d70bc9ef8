//! Creates files atomically: temporary name, content, fsync, rename, fsync of the directory. Errors never show a temporary name.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tempfile::{Builder, NamedTempFile};

/// Temporary names that may still exist.
static BEGUN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Creates a temporary file in the directory of `path`, to be renamed to `path`.
///
/// # Errors
/// A directory that is missing or read-only.
pub fn beside(path: &Path, builder: &Builder) -> io::Result<NamedTempFile> {
    let dir = directory(path);
    // Locked before the file exists, so that `remove_all` cannot miss it.
    let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
    let made = builder.tempfile_in(dir);
    // The library's error has the temporary name in its text; its kind has not.
    let made = made.map_err(|error| fs::metadata(dir).err().unwrap_or(error.kind().into()))?;
    begun.retain(|path| fs::symlink_metadata(path).is_ok());
    begun.push(made.path().to_owned());
    Ok(made)
}

/// Writes `bytes` to `path`, replacing a file of that name. `builder` decides the temporary name and the permissions. Of two writers at
/// once, the last one wins.
///
/// # Errors
/// Those of [`beside`], and a file system that fails or is full.
pub fn write(path: &Path, builder: &Builder, bytes: &[u8]) -> io::Result<()> {
    let mut temp = beside(path, builder)?;
    temp.write_all(bytes)?;
    temp.as_file().sync_all()?;
    temp.persist(path)?;
    Ok(())
}

/// Makes a rename to `path` durable: syncs its directory.
///
/// # Errors
/// A directory that cannot be opened or synced.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    fs::File::open(directory(path))?.sync_all()
}

/// Removes all temporary files, and blocks the creation of others. For a process that ends without dropping them.
pub fn remove_all() {
    let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
    for path in begun.drain(..) {
        // Fails where the file was renamed or dropped.
        let _ = fs::remove_file(path);
    }
    // Later calls of `beside` wait for the lock until the process ends.
    std::mem::forget(begun);
}

/// The directory of a file.
pub fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_do_not_have_the_name() {
        let dir = tempfile::tempdir().unwrap();
        let made = beside(&dir.path().join("a"), &Builder::new()).unwrap();
        assert_eq!(made.path().parent(), Some(dir.path()));
        let error = beside(&dir.path().join("none/a"), &Builder::new()).unwrap_err();
        assert_eq!(error.to_string(), "No such file or directory (os error 2)");
        let error = beside("/proc/a".as_ref(), &Builder::new()).unwrap_err();
        assert!(!error.to_string().contains("/proc/"), "{error}");
        assert_eq!(directory("a".as_ref()), Path::new("."));
    }
}
