//! Names what can be wrong with a tensor that should be a weight.

use std::path::PathBuf;

use colibri_ring::bulk::BulkError;
use colibri_ring::{ArenaError, RangeError};

use crate::quant::encode::NotFinite;
use crate::quant::infer::Refusal;
use crate::shards::{Dtype, ShardError};

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
    /// A packed tensor has no scales.
    #[error("tensor {name} is U8, which needs the scales {scales}, and these are missing")]
    NoScales {
        /// The tensor.
        name: String,
        /// The tensor that should hold its scales.
        scales: String,
    },
    /// The scales are no F32.
    #[error("tensor {name} is {found}, scales must be F32")]
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
    /// A norm, a bias or a router's weight is infinite or NaN.
    #[error("tensor {name}: value {index} is {value}")]
    Value {
        /// The tensor.
        name: String,
        /// Which one.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A scale is infinite or NaN.
    #[error("tensor {name}: scale {index} is {value}")]
    Scale {
        /// The tensor with the scales.
        name: String,
        /// Which one.
        index: usize,
        /// The scale.
        value: f32,
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

impl WeightError {
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
            | WeightError::Value { name, .. }
            | WeightError::Scale { name, .. }
            | WeightError::NotFinite { name, .. }
            | WeightError::Format { name, .. } => Some(name),
            WeightError::Shard(_) | WeightError::Memory { .. } | WeightError::Stamp { .. } => None,
        }
    }
}
