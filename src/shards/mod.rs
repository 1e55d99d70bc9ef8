//! Indexes any number of safetensors files and reads ranges of them, by pread and posix_fadvise, never mmap.
//!
//! [`Shards::open`] finds the files (`scan`), selects those of the model (`select`, by Hugging Face's index in `list`), reads their
//! headers concurrently, parses each (`header`), and merges them into one hash index (`index`). `finding` describes what is missing,
//! `mirror` decides which files of other directories are copies, `read` reads tensors, and `write` writes new shards.

mod dtype;
mod error;
mod finding;
mod header;
mod holes;
mod index;
mod likeness;
mod list;
mod mirror;
mod part;
mod pieces;
mod read;
mod readahead;
mod sample;
mod scan;
mod select;
mod write;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use colibri_ring::headers::read_headers;
use colibri_ring::{EngineKind, File, Replica, Replicas, limits};

pub use dtype::Dtype;
pub use error::{Flaw, MAX_MIRRORS, ShardError};
pub use finding::{Finding, Findings, Kind, Severity};
pub use header::{MAX_HEADER, Metadata};
pub(crate) use mirror::is_copy;
pub use mirror::{Fault, MirrorFile, Refusal, Unserved};
pub(crate) use part::{open_part, part_of};
pub(crate) use pieces::Pieces;
pub use sample::data_sample;
pub use scan::other_weights;
pub use write::{
    Planned, ShardWriter, WriteError, free_space, shard_bytes, shard_header, write_whole,
};

use header::{Header, TensorEntry};
use index::Index;
use mirror::{Mirrors, Settled};
use select::{Ranked, Selection};

/// Key of `__metadata__` that marks a shard whose weights are synthetic: zeros in it are meant.
pub const SYNTHETIC: &str = "colibri.synthetic";

/// Whether the page cache keeps what was just read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Keep it.
    Keep,
    /// Drop it (posix_fadvise DONTNEED).
    Drop,
}

/// One tensor of the index, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Full name.
    pub name: &'a str,
    /// Index of its file in [`Shards::files`].
    pub file: usize,
    /// Absolute byte offset of its data in that file.
    pub offset: u64,
    /// Length of its data in bytes.
    pub bytes: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: &'a [u64],
}

impl Tensor<'_> {
    /// Number of elements: the product of the dimensions, which the index has checked not to overflow.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// The index: tensor name -> file, offset, bytes, dtype, shape.
#[derive(Debug)]
pub struct Shards {
    dirs: Vec<PathBuf>,
    mirrors: Vec<PathBuf>,
    files: Vec<Arc<File>>,
    /// By file: its copies in mirrors.
    copies: Vec<Vec<MirrorFile>>,
    /// By mirror: its fault, if it has one.
    faults: Vec<Option<Fault>>,
    /// By file: its directory, `__metadata__`, and its drive's read-ahead in bytes.
    dir_of: Vec<usize>,
    metadata: Vec<Metadata>,
    read_ahead: Vec<u64>,
    index: Index,
    /// Indices of the directories.
    lists: Vec<Ranked>,
    findings: Findings,
}

impl Shards {
    /// Indexes every `*.safetensors` of the directories.
    ///
    /// # Errors
    /// The first fault, with its file and tensor: see [`ShardError`] and [`Flaw`].
    pub fn open(dirs: &[PathBuf]) -> Result<Shards, ShardError> {
        Shards::open_with(dirs, &[], EngineKind::Auto)
    }

    /// Like [`Shards::open`], and finds the copies of the files in up to [`MAX_MIRRORS`] other directories. The fault of a mirror is a
    /// [`Shards::fault`], not an error.
    ///
    /// # Errors
    /// Those of [`Shards::open`], too many mirrors, and a directory that is given twice.
    pub fn open_mirrored(dirs: &[PathBuf], mirrors: &[PathBuf]) -> Result<Shards, ShardError> {
        Shards::open_with(dirs, mirrors, EngineKind::Auto)
    }

    /// Like [`Shards::open_mirrored`], and reads the headers by the given engine.
    ///
    /// # Errors
    /// Those of [`Shards::open_mirrored`].
    pub fn open_with(
        dirs: &[PathBuf],
        mirrors: &[PathBuf],
        engine: EngineKind,
    ) -> Result<Shards, ShardError> {
        let shards = Shards::open_partial(dirs, mirrors, engine)?;
        let errors = shards.findings.errors();
        match errors.is_empty() {
            true => Ok(shards),
            false => Err(ShardError::NotWhole(errors)),
        }
    }

    /// Like [`Shards::open_with`], and takes the files that exist where others are missing: see [`Shards::findings`].
    ///
    /// # Errors
    /// Those of [`Shards::open_with`], except [`ShardError::NotWhole`].
    pub fn open_partial(
        dirs: &[PathBuf],
        mirrors: &[PathBuf],
        engine: EngineKind,
    ) -> Result<Shards, ShardError> {
        if let Err(e) = limits::raise_open_files() {
            tracing::debug!("the limit of open files stays as it is: {e}");
        }
        scan::check_distinct(dirs)?;
        let mirroring = Mirrors::open(mirrors, dirs)?;
        let mut selection = Selection::new(dirs)?;
        let (mut files, mut dir_of) = (Vec::new(), Vec::new());
        for (dir, path) in &selection.files {
            files.push(Arc::new(File::open(path)?));
            dir_of.push(*dir);
        }

        let parsed = read_headers(&files, MAX_HEADER, engine, |i, text| {
            let file = &files[i];
            let header = Header::parse(text, file.path(), i as u32, file.size())?;
            Ok::<_, ShardError>((header, mirroring.offers(file, text)))
        })?;
        let (mut headers, offers): (Vec<_>, Vec<_>) = parsed.into_iter().unzip();
        let Settled { copies, faults } = mirroring.settle(&files, offers);
        let metadata = headers
            .iter_mut()
            .map(|h| std::mem::take(&mut h.metadata))
            .collect();
        let path = |file| files[file as usize].path();
        let decide = |tensor: &str, first, second| selection.decide(tensor, first, second);
        let index = Index::build(headers, path, decide)?;
        selection.check_stale(|name| Some(index.find(name)?.file as usize));
        Ok(Shards {
            dirs: dirs.to_vec(),
            mirrors: mirrors.to_vec(),
            copies,
            faults,
            read_ahead: read_ahead(&files),
            files,
            dir_of,
            metadata,
            index,
            lists: selection.lists,
            findings: Findings(selection.findings),
        })
    }

    /// The directories, as given.
    pub fn dirs(&self) -> &[PathBuf] {
        &self.dirs
    }

    /// What is wrong with the files: some that are missing, or that the index leaves out.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// Tensor -> name of the file that should have it, by the indices of the directories.
    ///
    /// # Errors
    /// An index that cannot be read again.
    pub fn named_files(&self) -> Result<HashMap<String, String>, ShardError> {
        let mut named = HashMap::new();
        for ranked in self.lists.iter().rev() {
            named.extend(ranked.list.tensors()?);
        }
        Ok(named)
    }

    /// Files that are missing between others of successive numbers. It is no error where the files that exist have every tensor.
    pub fn number_gaps(&self) -> Findings {
        if !self.lists.is_empty() {
            return Findings::default();
        }
        let names = self.files.iter().filter_map(|f| f.path().file_name());
        let gaps = scan::missing_numbers(&names.collect()).into_iter();
        let gaps = gaps.filter(|name| !name.contains("-of-"));
        let dirs = error::list(&self.dirs);
        Findings(
            gaps.map(|name| Finding::missing_number(name, &dirs))
                .collect(),
        )
    }

    /// The directories as one text, for messages.
    pub fn shown_dirs(&self) -> String {
        error::list(&self.dirs)
    }

    /// The files, in the order of [`Tensor::file`]: by directory, then by name.
    pub fn files(&self) -> &[Arc<File>] {
        &self.files
    }

    /// The mirrors, as given.
    pub fn mirrors(&self) -> &[PathBuf] {
        &self.mirrors
    }

    /// The fault of a mirror, given as an index of [`Shards::mirrors`]; `None` when it serves every file.
    pub fn fault(&self, mirror: usize) -> Option<&Fault> {
        self.faults[mirror].as_ref()
    }

    /// The faults of mirrors, in the order of the mirrors.
    pub fn faults(&self) -> impl Iterator<Item = &Fault> {
        self.faults.iter().flatten()
    }

    /// The copies of a file in mirrors.
    pub fn copies(&self, file: usize) -> &[MirrorFile] {
        &self.copies[file]
    }

    /// Every file and every copy of it.
    pub fn with_copies(&self) -> Vec<Arc<File>> {
        let replicas = self.replicas().into_iter().flatten();
        replicas.map(|replica| replica.file).collect()
    }

    /// Every file with its copies. A source is a directory: first the model's, then the mirrors.
    pub fn replicas(&self) -> Vec<Replicas> {
        let with_copies = |(i, file): (usize, &Arc<File>)| {
            let primary = Replica::new(file.clone(), self.dir_of(i));
            let copies = self
                .copies(i)
                .iter()
                .map(|copy| Replica::new(copy.file.clone(), self.dirs.len() + copy.mirror));
            std::iter::once(primary).chain(copies).collect()
        };
        self.files.iter().enumerate().map(with_copies).collect()
    }

    /// The directory that a file came from, as an index of [`Shards::dirs`].
    pub fn dir_of(&self, file: usize) -> usize {
        self.dir_of[file]
    }

    /// `__metadata__` of a file; empty if it has none.
    pub fn metadata(&self, file: usize) -> &Metadata {
        &self.metadata[file]
    }

    /// Whether a file says that its weights were made up and may be holes, as `synth --sparse` makes them.
    pub fn is_synthetic(&self, file: usize) -> bool {
        self.metadata[file].contains_key(SYNTHETIC)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.index.tensors.len()
    }

    /// Whether no shard has a tensor.
    pub fn is_empty(&self) -> bool {
        self.index.tensors.is_empty()
    }

    /// All tensors, by file and then by offset.
    pub fn iter(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.index.tensors.iter().map(|entry| self.tensor(entry))
    }

    /// The tensor of that name.
    pub fn find(&self, name: &str) -> Option<Tensor<'_>> {
        self.index.find(name).map(|entry| self.tensor(entry))
    }

    /// The tensor of that name; the error names it and the directories.
    ///
    /// # Errors
    /// [`ShardError::Missing`].
    pub fn get(&self, name: &str) -> Result<Tensor<'_>, ShardError> {
        self.find(name).ok_or_else(|| ShardError::Missing {
            name: name.to_string(),
            dirs: self.dirs.clone(),
        })
    }

    /// Longest hint to the page cache for a file, in bytes.
    fn read_ahead(&self, file: usize) -> u64 {
        self.read_ahead[file]
    }

    /// The tensors of a file.
    fn of_file(&self, file: usize) -> &[TensorEntry] {
        let tensors = &self.index.tensors;
        let first = tensors.partition_point(|entry| (entry.file as usize) < file);
        let end = tensors.partition_point(|entry| entry.file as usize <= file);
        &tensors[first..end]
    }

    fn tensor(&self, entry: &TensorEntry) -> Tensor<'_> {
        Tensor {
            name: entry.name(&self.index.names),
            file: entry.file as usize,
            offset: entry.offset,
            bytes: entry.bytes,
            dtype: entry.dtype,
            shape: entry.shape(&self.index.shapes),
        }
    }
}

/// The read-ahead of each file's drive, in bytes. Successive files on one drive share one query.
fn read_ahead(files: &[Arc<File>]) -> Vec<u64> {
    let mut last = None;
    let of_file = |file: &Arc<File>| match last {
        Some((drive, bytes)) if drive == file.drive() => bytes,
        _ => {
            let bytes = readahead::of_drive(file.drive());
            last = Some((file.drive(), bytes));
            bytes
        }
    };
    files.iter().map(of_file).collect()
}
