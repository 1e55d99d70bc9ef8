//! Why a checkpoint cannot be converted.

use std::io;
use std::path::PathBuf;

use bytesize::ByteSize;
use colibri_ring::FileError;

use crate::arch::ConfigError;
use crate::quant::Format;
use crate::quant::encode::{NotFinite, Packing};
use crate::quant::infer::Refusal;
use crate::shards::{Findings, ShardError, WriteError};
use crate::stream::catalog::CatalogError;
use crate::weight::{Damage, WeightError};

/// Why a checkpoint cannot be converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// Its config.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its index.
    #[error(transparent)]
    Shards(#[from] ShardError),
    /// A tensor or file that is missing, or that does not fit.
    #[error("{0}")]
    NotWhole(Findings),
    /// A resident tensor.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// An expert.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// A file of the source.
    #[error(transparent)]
    Read(#[from] FileError),
    /// A file of the output.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// Experts that are stored together, and in 4 bits already.
    #[error(
        "the experts of {model_type} are published in 4 bits (mxfp4) and run as they are; --dense-bits rounds the rest when it is loaded"
    )]
    InPairs {
        /// The family.
        model_type: &'static str,
    },
    /// What would be written could not be read back as what it is.
    #[error(
        "tensor {name} has {cols} columns, of which {packing} cannot be read back \
         (int4-g64 suits every size, and so do int8, int4 and int2): {source}"
    )]
    Unreadable {
        /// The tensor.
        name: String,
        /// Input size.
        cols: usize,
        /// What it should become.
        packing: Packing,
        /// Why not.
        source: Refusal,
    },
    /// What would be written would be taken for another format.
    #[error(
        "tensor {name} has {cols} columns, and {packing} of them would be read back as {found}; \
         int4-g64 suits every size, and so do int8, int4 and int2"
    )]
    Misread {
        /// The tensor.
        name: String,
        /// Input size.
        cols: usize,
        /// What it should become.
        packing: Packing,
        /// What a reader would take it for.
        found: Format,
    },
    /// A weight is infinite or NaN.
    #[error(
        "{}: tensor {name} cannot be converted, the file is damaged or was made wrong (fetch it again): {source}",
        file.display()
    )]
    NotFinite {
        /// The file of the source.
        file: PathBuf,
        /// The tensor.
        name: String,
        /// Which one.
        source: NotFinite,
    },
    /// A matrix is zeros where weights should be, which the output would no longer show.
    #[error(
        "{}: tensor {name} cannot be converted: {found}; the file is damaged or incomplete: fetch it again",
        file.display()
    )]
    Zeros {
        /// The file of the source.
        file: PathBuf,
        /// The tensor, or the one whose scales these are.
        name: String,
        /// What is wrong.
        found: Damage,
    },
    /// The output is the source.
    #[error("{} is a directory of the checkpoint; the container needs one of its own", out.display())]
    SameDirectory {
        /// The output directory.
        out: PathBuf,
    },
    /// The output directory holds something that no conversion has begun.
    #[error("{} is not empty, and no conversion was begun there", out.display())]
    NotEmpty {
        /// The output directory.
        out: PathBuf,
    },
    /// The output directory was begun with other options.
    #[error(
        "{}: this conversion was begun with {key} {before}, now it is {now}; give the same again or another directory",
        out.display()
    )]
    OtherOptions {
        /// The output directory.
        out: PathBuf,
        /// The option.
        key: &'static str,
        /// Its value then.
        before: String,
        /// Its value now.
        now: String,
    },
    /// A file of the output is not what this conversion writes.
    #[error("{} is not what this conversion writes; remove it or give another directory", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// A file of the source is not the one that the conversion was begun with.
    #[error(
        "{} has changed since this conversion was begun; give another output directory, or delete {} and the shards beside it",
        path.display(), notes.display()
    )]
    SourceChanged {
        /// The file.
        path: PathBuf,
        /// The notes that say otherwise.
        notes: PathBuf,
    },
    /// A finished shard is not what was written, and cannot be made again.
    #[error(
        "{} is damaged, and {} that it was made from is not there any more; nothing was removed",
        path.display(), source_file.display()
    )]
    Damaged {
        /// The shard.
        path: PathBuf,
        /// A file that is missing.
        source_file: PathBuf,
    },
    /// Another conversion writes there.
    #[error("{}: another process is writing it", out.display())]
    Busy {
        /// The output directory.
        out: PathBuf,
    },
    /// A source file that would be removed has another name, which would keep its data.
    #[error(
        "{} {what}: removing it would free nothing; leave --delete-source away, or give the files themselves",
        path.display()
    )]
    Linked {
        /// The file.
        path: PathBuf,
        /// Is a link, or has several names.
        what: &'static str,
    },
    /// The disk cannot hold the output.
    #[error(
        "{} has {} free, and {} are needed there for {} of shards{}",
        out.display(), size(*free), size(*needed), size(*total),
        if *deletes { "" } else { "; --delete-source removes source files as they are converted" }
    )]
    Space {
        /// The output directory.
        out: PathBuf,
        /// Bytes needed at a time.
        needed: u64,
        /// Bytes free.
        free: u64,
        /// Bytes of all shards.
        total: u64,
        /// Whether source files are removed on the way.
        deletes: bool,
    },
    /// The notes of a conversion cannot be read or written.
    #[error("{}: {reason}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A system call on a path.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What should have been done.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// Asked to stop.
    #[error("stopped")]
    Stopped,
}

fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}
