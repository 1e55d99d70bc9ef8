//! Tensors as weights: looked up by name, checked against the shape and type that the model needs.

mod quantised;
mod role;
mod rows;
mod stored;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use crate::pool::Pool;
use crate::quant::encode::{NotFinite, Packing};
use crate::quant::infer::{Refusal, not_finite};
use crate::quant::{Format, Matrix};
use crate::shards::{Cache, Dtype, ShardError, Shards};

pub use quantised::{packed_bytes, packing_of};
pub use role::{EMBEDDING, HEAD, Role, role};
pub use rows::{Block, Piece, Rows, RowsError};
pub use stored::{Matrices, Stored, floats, scales_name};

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

/// A resident weight matrix [rows, cols], in the bytes it was stored in.
#[derive(Debug)]
pub struct Weight {
    format: Format,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
    scales: Vec<u8>,
}

impl Weight {
    /// The matrix, for products.
    pub fn matrix(&self) -> Matrix<'_> {
        Matrix {
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            bytes: &self.bytes,
            scales: &self.scales,
            skip: 0,
        }
    }
}

/// Reads resident weights and counts their bytes.
#[derive(Debug)]
pub struct Loader<'a> {
    shards: &'a Shards,
    matrices: Matrices<'a>,
    /// What float and FP8 matrices become, and who does it.
    dense: Option<(Packing, Pool)>,
    bytes: u64,
}

impl<'a> Loader<'a> {
    /// A loader that has loaded nothing yet.
    ///
    /// # Errors
    /// A malformed stamp of formats.
    pub fn new(shards: &'a Shards) -> Result<Loader<'a>, WeightError> {
        Ok(Loader {
            shards,
            matrices: Matrices::new(shards)?,
            dense: None,
            bytes: 0,
        })
    }

    /// Quantises float and FP8 matrices as they are read, on `threads` threads: see [`packing_of`].
    #[must_use]
    pub fn quantising(mut self, dense: Packing, threads: usize) -> Loader<'a> {
        self.dense = Some((dense, Pool::new(threads)));
        self
    }

    /// Bytes of everything loaded so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether there is a tensor of that name.
    pub fn has(&self, name: &str) -> bool {
        self.shards.find(name).is_some()
    }

    /// A matrix in its stored width, or quantised.
    ///
    /// # Errors
    /// Those of [`Matrices::find`], scales, or weights to be quantised, that are infinite or NaN, and a failed read.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Weight, WeightError> {
        let stored = self.matrices.find(name, &[rows, cols])?;
        if let Some((dense, pool)) = &self.dense
            && let Some(packing) = packing_of(name, *dense)
            && quantised::is_float(stored.format)
        {
            let weight = quantised::read(self.shards, pool, &stored, (rows, cols), packing)?;
            self.bytes += (weight.bytes.len() + weight.scales.len()) as u64;
            return Ok(weight);
        }
        // The copy here is the resident one; a second in the page cache would only take memory.
        let bytes = self.shards.read_raw(name, Cache::Drop)?;
        let mut scales = Vec::new();
        if let Some(tensor) = stored.scales {
            scales = self.shards.read_raw(tensor.name, Cache::Drop)?;
            if let Some((index, value)) = not_finite(&scales) {
                return Err(WeightError::Scale {
                    name: tensor.name.into(),
                    index,
                    value,
                });
            }
        }
        self.bytes += (bytes.len() + scales.len()) as u64;
        Ok(Weight {
            format: stored.format,
            rows,
            cols,
            bytes,
            scales,
        })
    }

    /// A vector as f32: a norm, a bias.
    ///
    /// # Errors
    /// When it is missing, has another shape, is not of floats, or cannot be read.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, WeightError> {
        floats(&self.shards.get(name)?, &[len])?;
        let values = self.shards.read_f32(name, Cache::Drop)?;
        self.bytes += 4 * values.len() as u64;
        Ok(values)
    }
}
