//! Defines the errors of KV files, each with its remedy.

use std::io;
use std::path::{Path, PathBuf};

/// A KV file cannot be used. No variant modifies the file.
#[derive(Debug, thiserror::Error)]
pub enum KvFileError {
    /// A system call failed.
    #[error("cannot {doing} {}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The operation, as a verb.
        doing: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
    /// A turn could not be saved.
    #[error("the conversation is not saved in {}, where everything stays as it was: {source}", file.display())]
    NotSaved {
        /// The file.
        file: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The path names a directory.
    #[error("{} is a directory: give the name of a file", file.display())]
    Directory {
        /// The directory.
        file: PathBuf,
    },
    /// The path is a symbolic link whose target does not exist.
    #[error("{} is a link to {}, which is not there: give another name", file.display(), target.display())]
    Dangling {
        /// The link.
        file: PathBuf,
        /// Its target.
        target: PathBuf,
    },
    /// The file has another format, or is no regular file.
    #[error("{} is no KV file; it stays as it is: give another name", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
    },
    /// Another version of the program wrote it.
    #[error(
        "{} has version {version} of the format, and this program reads another; it stays as it is: give another name, or \
         --kv-reset to start it anew",
        file.display()
    )]
    Version {
        /// The file.
        file: PathBuf,
        /// Its version.
        version: u32,
    },
    /// The file is intact, but another model or other settings computed it.
    #[error(
        "{} is of another model or of other settings ({what} differ); it stays as it is: give what it was made with, another \
         name, or --kv-reset to start it anew",
        file.display()
    )]
    Other {
        /// The file.
        file: PathBuf,
        /// What differs.
        what: &'static str,
    },
    /// The file is truncated or corrupted.
    #[error(
        "{} is damaged: {what}; it stays as it is: restore it from a copy, or give --kv-reset to start it anew",
        file.display()
    )]
    Damaged {
        /// The file.
        file: PathBuf,
        /// The damage and its place.
        what: String,
    },
    /// Another process holds the lock.
    #[error("{} is in use by another process: wait for its end, or give another name", file.display())]
    InUse {
        /// The file.
        file: PathBuf,
    },
    /// The turn to save has other layers than the file.
    #[error(
        "{} keeps other layers, or rows of other widths, than the model has now; it stays as it is: give the settings that it \
         was made with, another name, or --kv-reset to start it anew",
        file.display()
    )]
    Shape {
        /// The file.
        file: PathBuf,
    },
}

/// A fault found in bytes, before the file's path is known.
#[derive(Debug)]
pub(super) enum Flaw {
    Foreign,
    Version(u32),
    Other(&'static str),
    Damaged(String),
    Read(io::Error),
}

impl Flaw {
    /// Damage at a byte offset.
    pub fn at(offset: u64, what: &str) -> Flaw {
        Flaw::Damaged(format!("{what} at byte {offset}"))
    }

    /// Adds the path.
    pub fn of(self, path: &Path) -> KvFileError {
        let file = path.to_path_buf();
        match self {
            Flaw::Foreign => KvFileError::Foreign { file },
            Flaw::Version(version) => KvFileError::Version { file, version },
            Flaw::Other(what) => KvFileError::Other { file, what },
            Flaw::Damaged(what) => KvFileError::Damaged { file, what },
            Flaw::Read(source) => KvFileError::Io {
                file,
                doing: "read",
                source,
            },
        }
    }
}

impl From<io::Error> for Flaw {
    fn from(error: io::Error) -> Flaw {
        Flaw::Read(error)
    }
}
