//! Defines the errors of directories of shards.

use std::fmt;
use std::io;
use std::path::PathBuf;

use colibri_ring::FileError;
use colibri_ring::headers::HeaderError;

use super::{Dtype, Findings};

/// The largest number of mirrors of a model.
pub const MAX_MIRRORS: usize = 4;

/// Why a directory of shards cannot be indexed or read.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// No shard has a tensor that the model needs.
    #[error("tensor {} is missing from {}", Shown(name), list(dirs))]
    Missing {
        /// The tensor.
        name: String,
        /// The directories that were searched.
        dirs: Vec<PathBuf>,
    },
    /// No directory was given.
    #[error("no model directory is given")]
    NoDirectory,
    /// A directory could not be listed.
    #[error("cannot list {}: {source}", dir.display())]
    List {
        /// The directory.
        dir: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// A directory has no shard.
    #[error(
        "{} holds no *.safetensors file{}",
        dir.display(), others.as_ref().map_or(String::new(), |others| format!("; {others}"))
    )]
    NoShards {
        /// The directory.
        dir: PathBuf,
        /// A file of another format in it, and what to take instead.
        others: Option<String>,
    },
    /// One directory was given twice.
    #[error("{} and {} are the same directory", first.display(), second.display())]
    SameDirectory {
        /// One of its paths.
        first: PathBuf,
        /// The other path.
        second: PathBuf,
    },
    /// More than [`MAX_MIRRORS`] mirrors were given.
    #[error("{given} mirrors are given, at most {} are possible", MAX_MIRRORS)]
    TooManyMirrors {
        /// Number of them.
        given: usize,
    },
    /// A file could not be opened or read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file has no header, or one of an impossible length.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// A header is not valid UTF-8.
    #[error("{}: the header is not UTF-8 text from byte {valid} on", file.display())]
    Utf8 {
        /// The shard.
        file: PathBuf,
        /// Valid bytes before the first bad one.
        valid: usize,
    },
    /// A header is not JSON, or not of the format's structure.
    #[error("{}: {}the header is malformed: {reason}", file.display(), in_tensor(tensor.as_deref()))]
    Json {
        /// The shard.
        file: PathBuf,
        /// The tensor at whose entry the parser stopped, if it was in one.
        tensor: Option<String>,
        /// The parser's message, with line and column.
        reason: String,
    },
    /// A tensor's entry is wrong.
    #[error("{}: tensor {}: {flaw}", file.display(), Shown(tensor))]
    Tensor {
        /// The shard.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The flaw.
        flaw: Flaw,
    },
    /// A file has data but no tensor.
    #[error("{}: {bytes} bytes of data belong to no tensor", file.display())]
    NoTensors {
        /// The shard.
        file: PathBuf,
        /// Bytes after its header.
        bytes: u64,
    },
    /// Two shards have a tensor of the same name.
    #[error("tensor {} is in both {} and {}", Shown(tensor), first.display(), second.display())]
    InTwoShards {
        /// The tensor.
        tensor: String,
        /// One of the shards.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
    },
    /// Files are missing or broken.
    #[error("{0}")]
    NotWhole(Findings),
    /// The list of shards is malformed or too large.
    #[error("{}: not a list of shards: {reason}", list.display())]
    BadList {
        /// The list.
        list: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// More tensors, bytes of names or dimensions than the index can number.
    #[error("{}: with this file there are more than 2^32 {what}", file.display())]
    TooMany {
        /// The shard that exceeded the limit.
        file: PathBuf,
        /// The things that are too many.
        what: &'static str,
    },
    /// A tensor's data could not be read.
    #[error("cannot read tensor {}: {source}", Shown(tensor))]
    Read {
        /// The tensor.
        tensor: String,
        /// Names the file and the offset.
        source: FileError,
    },
    /// A tensor of another type was to be read as floats.
    #[error("tensor {} of {} is {dtype}; only BF16, F16 and F32 can be read as floats", Shown(tensor), file.display())]
    NotFloat {
        /// The shard.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
    },
    /// A slice is not inside its tensor.
    #[error("tensor {} of {} has {elements} elements; a slice of {count} from {start} on is outside", Shown(tensor), file.display())]
    Slice {
        /// The shard.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// First element of the slice.
        start: u64,
        /// Elements of the slice.
        count: u64,
        /// Elements of the tensor.
        elements: u64,
    },
    /// The buffer of a read cannot be allocated.
    #[error("no memory for {bytes} bytes of tensor {}", Shown(tensor))]
    Memory {
        /// The tensor.
        tensor: String,
        /// Its size.
        bytes: u64,
    },
}

/// Why one tensor's entry is invalid. Offsets are bytes of the data section, as in the header.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Flaw {
    /// Its name occurs more than once in the file.
    #[error("given twice in this file")]
    Twice,
    /// Its dtype is unknown.
    #[error("unknown dtype {}", Shown(.0))]
    UnknownDtype(String),
    /// A field is missing.
    #[error("no {0} given")]
    NoField(&'static str),
    /// Its dimensions overflow.
    #[error("shape {} of {dtype} overflows", dims(.shape))]
    ShapeOverflow {
        /// Dimensions.
        shape: Vec<u64>,
        /// Element type.
        dtype: Dtype,
    },
    /// Its elements, narrower than a byte, do not fill whole bytes.
    #[error("shape {} of {dtype} does not fill whole bytes", dims(.shape))]
    PartialByte {
        /// Dimensions.
        shape: Vec<u64>,
        /// Element type.
        dtype: Dtype,
    },
    /// Its data ends before it starts.
    #[error("its data ends at {end}, before its start at {start}")]
    Reversed {
        /// First byte.
        start: u64,
        /// Byte after the last one.
        end: u64,
    },
    /// Its data is not as long as its shape and dtype require.
    #[error("shape {} of {dtype} takes {want} bytes, but the offsets give {have}", dims(.shape))]
    Size {
        /// Dimensions.
        shape: Vec<u64>,
        /// Element type.
        dtype: Dtype,
        /// Bytes by shape and dtype.
        want: u64,
        /// Bytes by offsets.
        have: u64,
    },
    /// Its data reaches beyond the end of the file.
    #[error("its data [{start}, {end}) reaches beyond the file, which has {data} bytes of data")]
    BeyondFile {
        /// First byte.
        start: u64,
        /// Byte after the last one.
        end: u64,
        /// Bytes of the data section.
        data: u64,
    },
    /// No tensor covers the bytes before its data.
    #[error("bytes [{from}, {start}) before its data belong to no tensor")]
    Hole {
        /// First byte of the hole.
        from: u64,
        /// First byte of the tensor.
        start: u64,
    },
    /// Its data overlaps another tensor's.
    #[error("its data overlaps that of tensor {}", Shown(.0))]
    Overlap(String),
    /// It is the last tensor, and bytes follow its data.
    #[error("the last data ends at {end}, but the file has {data} bytes of data")]
    FileGoesOn {
        /// Byte after the last one.
        end: u64,
        /// Bytes of the data section.
        data: u64,
    },
}

/// Text from a file for one line of a message: control characters are escaped, and very long text is cut.
pub(super) struct Shown<'a>(pub &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 200;
        let cut = self.0.char_indices().nth(LONGEST).map(|(at, _)| at);
        let (shown, more) = match cut {
            Some(at) => (&self.0[..at], "..."),
            None => (self.0, ""),
        };
        if shown.is_empty() {
            return f.write_str("\"\"");
        }
        write!(f, "{}{more}", shown.escape_debug())
    }
}

fn in_tensor(tensor: Option<&str>) -> String {
    tensor.map_or(String::new(), |t| format!("tensor {}: ", Shown(t)))
}

pub(super) fn list(dirs: &[PathBuf]) -> String {
    let dirs: Vec<_> = dirs.iter().map(|d| d.display().to_string()).collect();
    dirs.join(", ")
}

fn dims(shape: &[u64]) -> String {
    const LONGEST: usize = 16;
    let shown: Vec<_> = shape.iter().take(LONGEST).map(u64::to_string).collect();
    let more = if shape.len() > LONGEST { ", ..." } else { "" };
    format!("[{}{more}]", shown.join(", "))
}
