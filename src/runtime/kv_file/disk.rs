//! Files as a whole: finding and locking one, making a new one, putting it in the place of another.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use tempfile::{Builder, TempPath};

use super::error::KvFileError;
use super::fingerprint::Fingerprint;
use super::head::{self, Mark, SECTOR};
use crate::atomic_file;

/// Opens the file and locks it against every other process; `None` if there is none.
pub fn open_locked(path: &Path) -> Result<Option<File>, KvFileError> {
    let failed = |doing| {
        let file = path.to_path_buf();
        move |source| KvFileError::Io {
            file,
            doing,
            source,
        }
    };
    loop {
        // Before it is opened: opening a pipe would wait for its other end.
        match fs::metadata(path) {
            Ok(found) if found.is_file() => {}
            Ok(found) => {
                let file = path.to_path_buf();
                return Err(match found.is_dir() {
                    true => KvFileError::Directory { file },
                    false => KvFileError::Foreign { file },
                });
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // The link is there, and what it points to is not.
                return match fs::read_link(path) {
                    Ok(target) => Err(KvFileError::Dangling {
                        file: path.to_path_buf(),
                        target,
                    }),
                    Err(_) => Ok(None),
                };
            }
            Err(e) => return Err(failed("open")(e)),
        }
        let file = match File::options().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed("open")(e)),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let file = path.to_path_buf();
                return Err(KvFileError::InUse { file });
            }
            Err(TryLockError::Error(e)) => return Err(failed("lock")(e)),
        }
        // Who had it may have put another in its place between the two.
        let id = |found: fs::Metadata| (found.dev(), found.ino());
        let ours = file.metadata().map(id).map_err(failed("open"))?;
        if fs::metadata(path).is_ok_and(|found| id(found) == ours) {
            return Ok(Some(file));
        }
    }
}

/// A locked file without turns that nobody else sees yet. It is gone when it is dropped.
pub struct Blank {
    pub file: File,
    temp: TempPath,
    /// Where it is to be: what a link points to.
    path: PathBuf,
}

impl Blank {
    /// Makes one, to be put at `path`. Only its owner may read it.
    pub fn new(path: &Path, fingerprint: &Fingerprint) -> io::Result<Blank> {
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let named = atomic_file::beside(&path, Builder::new().prefix(".kv-"))?;
        let (file, temp) = named.into_parts();
        file.lock()?;
        let head = [head::head(fingerprint), Mark::EMPTY.to_bytes(), [0; SECTOR]].concat();
        file.write_all_at(&head, 0)?;
        file.sync_all()?;
        Ok(Blank { file, temp, path })
    }

    /// Gives it its name, if nothing has that yet.
    pub fn create(self) -> io::Result<File> {
        self.temp
            .persist_noclobber(&self.path)
            .map_err(|e| e.error)?;
        sync_directory(&self.path)?;
        Ok(self.file)
    }

    /// Puts it in the place of what has its name. From then on it is the file, also if its directory cannot be synced.
    pub fn replace(self) -> io::Result<(File, io::Result<()>)> {
        self.temp.persist(&self.path).map_err(|e| e.error)?;
        Ok((self.file, sync_directory(&self.path)))
    }
}

/// A name is on the disk when its directory is.
fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(atomic_file::directory(path))?.sync_all()
}
