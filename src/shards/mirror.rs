//! Finds copies of shards in mirrors: directories on other drives. A mirror adds bandwidth and changes no result, so what is wrong
//! with one is a [`Fault`] to report, not an error.
//!
//! A file of a mirror is a copy of the primary of the same name if its size and its header equal the primary's, byte for byte. The
//! thread that has parsed a primary's header compares the copies with it, so that no header stays in memory.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use colibri_ring::headers::PREFIX;
use colibri_ring::{File, FileError};

use super::error::{MAX_MIRRORS, ShardError};

/// Bytes of a header that are compared at a time.
const PIECE: usize = 256 << 10;

/// A copy of a shard in a mirror.
#[derive(Clone, Debug)]
pub struct MirrorFile {
    /// Index of the mirror, in the order in which they were given.
    pub mirror: usize,
    /// The copy, opened for reading only.
    pub file: Arc<File>,
}

/// Why a mirror does not serve a file.
#[derive(Debug)]
pub enum Refusal {
    /// It does not have the file.
    Missing,
    /// The file cannot be opened or read.
    File(FileError),
    /// The file has another size.
    Size {
        /// Bytes of the primary.
        primary: u64,
        /// Bytes of the file in the mirror.
        mirror: u64,
    },
    /// The file has another header.
    Header,
    /// A sample of its content differs from the primary's.
    Content,
    /// It has holes where the primary has data.
    Hole,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Missing => f.write_str("it is missing"),
            Refusal::File(e) => e.fmt(f),
            Refusal::Size { primary, mirror } => {
                write!(f, "it has {mirror} bytes, the primary has {primary}")
            }
            Refusal::Header => f.write_str("its header differs from the primary's"),
            Refusal::Content => f.write_str(
                "its weights differ from the primary's: it is of another model or of an older version, copy it again",
            ),
            Refusal::Hole => f.write_str(
                "parts of it were never written and read as zeros: copy it again",
            ),
        }
    }
}

/// A file that a mirror does not serve.
#[derive(Debug)]
pub struct Unserved {
    /// The primary.
    pub primary: PathBuf,
    /// Where its copy would be.
    pub path: PathBuf,
    /// The reason.
    pub reason: Refusal,
}

/// What is wrong with a mirror.
#[derive(Debug)]
pub enum Fault {
    /// The directory cannot be read, so it serves no file.
    Directory {
        /// The mirror.
        dir: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// It does not serve every file.
    Files {
        /// The mirror.
        dir: PathBuf,
        /// The files that it does not serve, at least one.
        unserved: Vec<Unserved>,
        /// Number of files of the model.
        of: usize,
    },
}

impl Fault {
    /// Whether the mirror only lacks some files, like one that was staged within a budget.
    pub fn is_partial(&self) -> bool {
        match self {
            Fault::Directory { .. } => false,
            Fault::Files { unserved, of, .. } => {
                let missing = |file: &Unserved| matches!(file.reason, Refusal::Missing);
                unserved.len() < *of && unserved.iter().all(missing)
            }
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dir, unserved, of) = match self {
            Fault::Directory { dir, source } => {
                return write!(f, "mirror {} is not used: {source}", dir.display());
            }
            Fault::Files { dir, unserved, of } => (dir, unserved, of),
        };
        // A file that is not a copy tells more than one that is missing.
        let wrong = |file: &&Unserved| !matches!(file.reason, Refusal::Missing);
        let Some(first) = unserved.iter().find(wrong).or(unserved.first()) else {
            return Ok(());
        };
        let (path, reason) = (first.path.display(), &first.reason);
        match unserved.len() {
            1 => {
                let primary = first.primary.display();
                write!(f, "{path} is not used as a mirror of {primary}: {reason}")
            }
            // One line for a directory: a directory of another model would give hundreds.
            count => write!(
                f,
                "{}: {count} of {of} files are not used as mirrors, like {path}: {reason}",
                dir.display()
            ),
        }
    }
}

/// For one shard, the file of each readable mirror, or why it is not a copy.
pub(super) type Offers = Vec<(usize, Result<Arc<File>, Refusal>)>;

/// The mirrors of a model.
#[derive(Debug)]
pub(super) struct Mirrors<'a> {
    dirs: &'a [PathBuf],
    /// Indices of the directories that can be read.
    usable: Vec<usize>,
    /// The faults of the others.
    faults: Vec<Option<Fault>>,
}

/// Which copies are used.
#[derive(Debug)]
pub(super) struct Settled {
    /// By file: its copies.
    pub copies: Vec<Vec<MirrorFile>>,
    /// By mirror: its fault, if it has one.
    pub faults: Vec<Option<Fault>>,
}

impl<'a> Mirrors<'a> {
    /// Checks the directories. One that cannot be read has a fault.
    ///
    /// # Errors
    /// More than [`MAX_MIRRORS`], or a directory that is given twice, be it as a mirror or as one of the model's.
    pub(super) fn open(
        dirs: &'a [PathBuf],
        primaries: &[PathBuf],
    ) -> Result<Mirrors<'a>, ShardError> {
        if dirs.len() > MAX_MIRRORS {
            return Err(ShardError::TooManyMirrors { given: dirs.len() });
        }
        let mut seen: HashMap<(u64, u64), &PathBuf> = HashMap::new();
        for dir in primaries {
            if let Ok(meta) = dir.metadata() {
                seen.insert((meta.dev(), meta.ino()), dir);
            }
        }
        let (mut usable, mut faults) = (Vec::new(), Vec::new());
        for (i, dir) in dirs.iter().enumerate() {
            // Listing tells whether it is a directory that may be read.
            match std::fs::read_dir(dir).and_then(|_| dir.metadata()) {
                Ok(meta) => {
                    if let Some(first) = seen.insert((meta.dev(), meta.ino()), dir) {
                        return Err(ShardError::SameDirectory {
                            first: first.clone(),
                            second: dir.clone(),
                        });
                    }
                    usable.push(i);
                    faults.push(None);
                }
                Err(source) => faults.push(Some(Fault::Directory {
                    dir: dir.clone(),
                    source,
                })),
            }
        }
        Ok(Mirrors {
            dirs,
            usable,
            faults,
        })
    }

    /// The files of the mirrors for `primary`, whose header (without its length field) is `header`.
    pub(super) fn offers(&self, primary: &File, header: &[u8]) -> Offers {
        let offer = |&mirror: &usize| (mirror, self.offer(&self.dirs[mirror], primary, header));
        self.usable.iter().map(offer).collect()
    }

    fn offer(&self, dir: &Path, primary: &File, header: &[u8]) -> Result<Arc<File>, Refusal> {
        let name = primary.path().file_name().unwrap_or_default();
        let file = File::open(dir.join(name)).map_err(|e| match e {
            FileError::Open { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Refusal::Missing
            }
            e => Refusal::File(e),
        })?;
        if file.size() != primary.size() {
            return Err(Refusal::Size {
                primary: primary.size(),
                mirror: file.size(),
            });
        }
        match same_header(&file, header) {
            Ok(true) => Ok(Arc::new(file)),
            Ok(false) => Err(Refusal::Header),
            Err(e) => Err(Refusal::File(e)),
        }
    }

    /// Decides which copies are used, and the faults of the mirrors that do not serve every file.
    pub(super) fn settle(self, files: &[Arc<File>], offers: Vec<Offers>) -> Settled {
        let mut copies: Vec<Vec<MirrorFile>> = vec![Vec::new(); files.len()];
        let mut refused = Vec::new();
        for (i, offers) in offers.into_iter().enumerate() {
            for (mirror, offer) in offers {
                match offer {
                    Ok(file) => copies[i].push(MirrorFile { mirror, file }),
                    Err(reason) => refused.push((mirror, i, reason)),
                }
            }
        }
        for &mirror in &self.usable {
            self.report(mirror, files, &copies);
        }
        let mut faults = self.faults;
        for (mirror, i, reason) in refused {
            let name = files[i].path().file_name().unwrap_or_default();
            // In a model that is split over directories two files may have one name, and a mirror has a copy of one of them.
            let taken = (0..files.len()).any(|j| {
                files[j].path().file_name() == Some(name)
                    && copies[j].iter().any(|copy| copy.mirror == mirror)
            });
            if taken {
                continue;
            }
            refuse(&mut faults[mirror], &self.dirs[mirror], files, i, reason);
        }
        Settled { copies, faults }
    }

    fn report(&self, mirror: usize, files: &[Arc<File>], copies: &[Vec<MirrorFile>]) {
        let dir = self.dirs[mirror].display();
        let served = (0..files.len()).filter_map(|i| {
            let at = copies[i].iter().position(|copy| copy.mirror == mirror)?;
            Some((i, at))
        });
        let served: Vec<(usize, usize)> = served.collect();
        let total = files.len();
        tracing::info!("mirror {dir} serves {} of {total} files", served.len());
        // Only of the copies before it, so that of two mirrors on one drive the second is named.
        let doubled = served.iter().find_map(|&(i, at)| {
            let file = &copies[i][at].file;
            let before = copies[i][..at].iter().map(|copy| &copy.file);
            let mut before = std::iter::once(&files[i]).chain(before);
            before.find(|other| other.drive() == file.drive())
        });
        if let Some(other) = doubled {
            let other = other.path().parent().unwrap_or(Path::new(""));
            tracing::warn!(
                "mirror {dir} is on the same drive as {}: it brings no bandwidth",
                other.display()
            );
        }
    }
}

/// Adds to the fault of the mirror `dir` that it does not serve a file.
pub(super) fn refuse(
    fault: &mut Option<Fault>,
    dir: &Path,
    files: &[Arc<File>],
    file: usize,
    reason: Refusal,
) {
    let fault = fault.get_or_insert_with(|| Fault::Files {
        dir: dir.to_owned(),
        unserved: Vec::new(),
        of: files.len(),
    });
    if let Fault::Files { unserved, .. } = fault {
        let primary = files[file].path();
        unserved.push(Unserved {
            primary: primary.to_owned(),
            path: dir.join(primary.file_name().unwrap_or_default()),
            reason,
        });
    }
}

/// Whether a file has the size and the header of a shard.
pub(crate) fn is_copy(shard: &File, file: &File) -> Result<bool, FileError> {
    if file.size() != shard.size() {
        return Ok(false);
    }
    let mut prefix = [0; PREFIX as usize];
    shard.read_at(&mut prefix, 0)?;
    let len = u64::from_le_bytes(prefix).min(shard.size() - PREFIX);
    let mut header = vec![0; len as usize];
    shard.read_at(&mut header, PREFIX)?;
    same_header(file, &header)
}

/// Whether a file begins with this header and its length.
fn same_header(file: &File, header: &[u8]) -> Result<bool, FileError> {
    let mut prefix = [0; PREFIX as usize];
    file.read_at(&mut prefix, 0)?;
    if u64::from_le_bytes(prefix) != header.len() as u64 {
        return Ok(false);
    }
    let mut buf = vec![0; PIECE.min(header.len())];
    let mut at = PREFIX;
    for piece in header.chunks(PIECE) {
        let buf = &mut buf[..piece.len()];
        file.read_at(buf, at)?;
        if buf != piece {
            return Ok(false);
        }
        at += piece.len() as u64;
    }
    Ok(true)
}
