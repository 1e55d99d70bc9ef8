//! Names the failures of reading experts.

use std::path::PathBuf;

use colibri_ring::{DirectRefused, EngineError, RangeError, ReadError};

use crate::quant::encode::NotFinite;
use crate::weight::Damage;

/// Why experts cannot be streamed.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// O_DIRECT was required and refused.
    #[error(transparent)]
    Direct(#[from] DirectRefused),
    /// A tensor's place in its file is impossible.
    #[error("{tensor}: {source}")]
    Range {
        /// The tensor.
        tensor: String,
        /// Why.
        source: RangeError,
    },
    /// The engine does not run, or has stopped.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A read failed on every copy.
    #[error("cannot read tensor {tensor}: {source}")]
    Read {
        /// The tensor.
        tensor: String,
        /// File, offset, and the operating system's answer.
        source: ReadError,
    },
    /// The bytes of an expert are no weights.
    #[error("{}: tensor {tensor}, expert {expert}: {found}; the file is damaged: fetch it again", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// The tensor with the weights or the scales.
        tensor: String,
        /// Index of the expert in its layer.
        expert: u32,
        /// What is wrong with them.
        found: Damage,
    },
    /// An expert that is to be quantised has an infinite or NaN weight.
    #[error("tensor {tensor}, expert {expert}, cannot be quantised: {found}")]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// Index of the expert in its layer.
        expert: u32,
        /// Where, and the weight.
        found: NotFinite,
    },
}
