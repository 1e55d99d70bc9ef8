//! Names what can be wrong with a tensor that should be a weight.

use std::path::PathBuf;

use colibri_ring::bulk::BulkError;
use colibri_ring::{ArenaError, RangeError};

use super::damage::Damage;
use crate::quant::encode::NotFinite;
use crate::quant::infer::Refusal;
use crate::shards::{Dtype, ShardError, Shards};

/// Why a tensor cannot be the weight that it is named for.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// It is missing or cannot be read.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// Its shape is not the one that the config implies.
    #[error("tensor {name} has shape {found:?}, the config needs {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<u64>,
        /// The shape it should have.
        expected: Vec<u64>,
    },
    /// Its elements are no weights.
    #[error(
        "tensor {name} is {found}, a weight must be BF16, F16 or F32, or a matrix of U8 or F8_E4M3 with scales"
    )]
    Dtype {
        /// The tensor.
        name: String,
        /// Its type.
        found: Dtype,
    },
    /// A packed tensor has more than one dimension.
    #[error("tensor {name} is U8 of shape {found:?}, a packed weight must have one dimension")]
    PackedShape {
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<u64>,
    },
    /// A packed or FP8 tensor has no scales.
    #[error("tensor {name} needs the scales {scales}, which are missing")]
    NoScales {
        /// The tensor.
        name: String,
        /// The tensor that should hold its scales.
        scales: String,
    },
    /// The scales are no F32.
    #[error("tensor {name} is {found}, scales must be F32, or BF16 for FP8 weights")]
    ScalesDtype {
        /// The tensor with the scales.
        name: String,
        /// Its type.
        found: Dtype,
    },
    /// It cannot be read.
    #[error("cannot read tensor {name}: {source}")]
    Read {
        /// The tensor.
        name: String,
        /// File, offset, and the operating system's answer.
        source: BulkError,
    },
    /// Its place in its file is impossible.
    #[error("tensor {name}: {source}")]
    Place {
        /// The tensor.
        name: String,
        /// Why.
        source: RangeError,
    },
    /// There is no memory for the resident weights.
    #[error("cannot allocate {bytes} bytes for the resident weights: {source}")]
    Memory {
        /// Wanted bytes.
        bytes: u64,
        /// The operating system's answer.
        source: ArenaError,
    },
    /// Its bytes are no weights.
    #[error("tensor {name}: {found}{}", remedy(found))]
    Damaged {
        /// The tensor.
        name: String,
        /// What is wrong with them.
        found: Damage,
    },
    /// A norm is zeros, so its output would be.
    #[error("tensor {name}: all of its {of} values are 0{}", FETCH)]
    ZeroNorm {
        /// The tensor.
        name: String,
        /// Number of values.
        of: usize,
    },
    /// What is wrong with a tensor of a file.
    #[error("{}: {source}", file.display())]
    In {
        /// The shard.
        file: PathBuf,
        /// What is wrong.
        source: Box<WeightError>,
    },
    /// A weight that should be quantised is infinite or NaN.
    #[error("tensor {name} cannot be quantised: {source}")]
    NotFinite {
        /// The tensor.
        name: String,
        /// Which weight.
        source: NotFinite,
    },
    /// Its sizes are those of no supported format.
    #[error("tensor {name}: {source}")]
    Format {
        /// The tensor.
        name: String,
        /// Why not.
        source: Refusal,
    },
    /// The formats that a file claims for its tensors are no JSON object of strings.
    #[error("{}: the metadata colibri.fmt is malformed: {reason}", file.display())]
    Stamp {
        /// The shard.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// What to do about a file whose bytes are not those that were published.
const FETCH: &str = "; the file is damaged or incomplete: fetch it again";

fn remedy(damage: &Damage) -> &'static str {
    match damage {
        Damage::Zeros { .. } | Damage::ZeroScales { .. } => FETCH,
        Damage::Scale { .. } | Damage::Value { .. } => "",
    }
}

impl WeightError {
    /// The same error, with the shard that the tensor is in.
    #[must_use]
    pub(crate) fn in_file(self, shards: &Shards, file: usize) -> WeightError {
        match self {
            // These name it.
            WeightError::Shard(_)
            | WeightError::Read { .. }
            | WeightError::Place { .. }
            | WeightError::Stamp { .. }
            | WeightError::In { .. } => self,
            error => WeightError::In {
                file: shards.files()[file].path().to_path_buf(),
                source: Box::new(error),
            },
        }
    }

    /// The tensor that it is about, if it is about one.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            WeightError::Shape { name, .. }
            | WeightError::Dtype { name, .. }
            | WeightError::PackedShape { name, .. }
            | WeightError::NoScales { name, .. }
            | WeightError::ScalesDtype { name, .. }
            | WeightError::Read { name, .. }
            | WeightError::Place { name, .. }
            | WeightError::Damaged { name, .. }
            | WeightError::ZeroNorm { name, .. }
            | WeightError::NotFinite { name, .. }
            | WeightError::Format { name, .. } => Some(name),
            WeightError::In { source, .. } => source.tensor(),
            WeightError::Shard(_) | WeightError::Memory { .. } | WeightError::Stamp { .. } => None,
        }
    }
}
