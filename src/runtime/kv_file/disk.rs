//! Opens and locks KV files, creates new ones and replaces existing ones.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use tempfile::{Builder, TempPath};

use super::error::KvFileError;
use super::fingerprint::Fingerprint;
use super::head::{self, Mark, SECTOR};
use crate::atomic_file;

/// Opens the file and takes an exclusive lock; `None` if it does not exist.
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
        // Checked before opening, because opening a FIFO would block.
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
                // The path may be a link whose target is missing.
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
        // The previous owner of the lock may have replaced the file after we opened it.
        let id = |found: fs::Metadata| (found.dev(), found.ino());
        let ours = file.metadata().map(id).map_err(failed("open"))?;
        if fs::metadata(path).is_ok_and(|found| id(found) == ours) {
            return Ok(Some(file));
        }
    }
}

/// A locked, still unnamed file without turns. Dropping it deletes it.
pub struct Blank {
    pub file: File,
    temp: TempPath,
    /// Its future path, symbolic links resolved.
    path: PathBuf,
}

impl Blank {
    /// Creates a file destined for `path`, readable by its owner alone.
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

    /// Names the file, unless the name exists.
    pub fn create(self) -> io::Result<File> {
        self.temp
            .persist_noclobber(&self.path)
            .map_err(|e| e.error)?;
        atomic_file::sync_directory(&self.path)?;
        Ok(self.file)
    }

    /// Replaces the file of that name. The replacement stands even if syncing the directory fails.
    pub fn replace(self) -> io::Result<(File, io::Result<()>)> {
        self.temp.persist(&self.path).map_err(|e| e.error)?;
        Ok((self.file, atomic_file::sync_directory(&self.path)))
    }
}
