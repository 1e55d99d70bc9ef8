//! Why a KV file cannot be used, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use super::head::VERSION;

/// What is wrong with a KV file. Whatever it is, the file stays as it is.
#[derive(Debug, thiserror::Error)]
pub enum KvFileError {
    /// The operating system refused something.
    #[error("cannot {doing} {}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A turn was not saved.
    #[error("the conversation is not saved in {}, where everything stays as it was: {source}", file.display())]
    NotSaved {
        /// The file.
        file: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// It is a directory.
    #[error("{} is a directory: give the name of a file", file.display())]
    Directory {
        /// The directory.
        file: PathBuf,
    },
    /// It is a link that leads nowhere.
    #[error("{} is a link to {}, which is not there: give another name", file.display(), target.display())]
    Dangling {
        /// The link.
        file: PathBuf,
        /// What it names.
        target: PathBuf,
    },
    /// It is a file of another kind, a pipe.
    #[error("{} is no KV file; it stays as it is: give another name", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
    },
    /// A later version of the program wrote it.
    #[error(
        "{} has version {version} of the format, and this program knows {VERSION}; it stays as it is: give another name, or \
         --kv-reset to start it anew",
        file.display()
    )]
    Newer {
        /// The file.
        file: PathBuf,
        /// Its version.
        version: u32,
    },
    /// It is whole, and what it keeps was computed by another model or with other settings.
    #[error(
        "{} is of another model or of other settings ({what} differ); it stays as it is: give what it was made with, another \
         name, or --kv-reset to start it anew",
        file.display()
    )]
    Other {
        /// The file.
        file: PathBuf,
        /// What is not the same.
        what: &'static str,
    },
    /// It was one, and is truncated or has changed.
    #[error(
        "{} is damaged: {what}; it stays as it is: restore it from a copy, or give --kv-reset to start it anew",
        file.display()
    )]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong, and where.
        what: String,
    },
    /// Another process has it.
    #[error("{} is in use by another process: wait for its end, or give another name", file.display())]
    InUse {
        /// The file.
        file: PathBuf,
    },
    /// What is to be saved does not have the layers of what is there.
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

/// What is wrong with bytes, before anybody knows which file they are of.
#[derive(Debug)]
pub(super) enum Flaw {
    Foreign,
    Newer(u32),
    Other(&'static str),
    Damaged(String),
    Read(io::Error),
}

impl Flaw {
    /// Damage at a place of the file.
    pub fn at(offset: u64, what: &str) -> Flaw {
        Flaw::Damaged(format!("{what} at byte {offset}"))
    }

    /// The error of the file.
    pub fn of(self, path: &Path) -> KvFileError {
        let file = path.to_path_buf();
        match self {
            Flaw::Foreign => KvFileError::Foreign { file },
            Flaw::Newer(version) => KvFileError::Newer { file, version },
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
