//! Files that get their names when they are complete. Nobody has given or knows the names that they have before, so no error has those.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tempfile::{Builder, NamedTempFile};

/// Those that may not have got their names yet.
static BEGUN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Begins a file in the directory of `path`, the name that it is to have.
///
/// # Errors
/// A directory that is not there, or in which nothing can be made.
pub fn beside(path: &Path, builder: &Builder) -> io::Result<NamedTempFile> {
    let dir = directory(path);
    // Before it is made: nothing comes between that and its being known.
    let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
    let made = builder.tempfile_in(dir);
    // The library's error has the name in its text. What is left of it is its kind.
    let made = made.map_err(|error| fs::metadata(dir).err().unwrap_or(error.kind().into()))?;
    begun.retain(|path| fs::symlink_metadata(path).is_ok());
    begun.push(made.path().to_owned());
    Ok(made)
}

/// Removes those that have not got their names, and lets nobody begin another one: to be called where the process ends without dropping them.
pub fn remove_all() {
    let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
    for path in begun.drain(..) {
        // Gone already if it has got its name, or was dropped.
        let _ = fs::remove_file(path);
    }
    // Whoever begins a file now waits for the end of the process.
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
