//! Tensors as weights: looked up by name, checked against the shape and type that the model needs.

use crate::quant::{Format, Matrix};
use crate::shards::{Cache, Dtype, ShardError, Shards, Tensor};

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
    /// Its elements are no floats.
    #[error("tensor {name} is {found}, a weight must be BF16, F16 or F32")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its type.
        found: Dtype,
    },
}

/// Finds the tensor `name` of the given shape and says how its elements are stored.
///
/// # Errors
/// When it is missing, has another shape, or is of a type that no matrix product takes.
pub fn expect<'a>(
    shards: &'a Shards,
    name: &str,
    shape: &[usize],
) -> Result<(Tensor<'a>, Format), WeightError> {
    let tensor = shards.get(name)?;
    let same = |(found, expected): (&u64, &usize)| *found == *expected as u64;
    if tensor.shape.len() != shape.len() || !tensor.shape.iter().zip(shape).all(same) {
        return Err(WeightError::Shape {
            name: name.into(),
            found: tensor.shape.to_vec(),
            expected: shape.iter().map(|n| *n as u64).collect(),
        });
    }
    let format = match tensor.dtype {
        Dtype::Bf16 => Format::Bf16,
        Dtype::F16 => Format::F16,
        Dtype::F32 => Format::F32,
        found => {
            return Err(WeightError::Dtype {
                name: name.into(),
                found,
            });
        }
    };
    Ok((tensor, format))
}

/// A resident weight matrix [rows, cols], in the bytes it was stored in.
#[derive(Debug)]
pub struct Weight {
    format: Format,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
}

impl Weight {
    /// The matrix, for products.
    pub fn matrix(&self) -> Matrix<'_> {
        Matrix {
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            bytes: &self.bytes,
            scales: &[],
            skip: 0,
        }
    }
}

/// Reads resident weights and counts their bytes.
#[derive(Debug)]
pub struct Loader<'a> {
    shards: &'a Shards,
    bytes: u64,
}

impl<'a> Loader<'a> {
    /// A loader that has loaded nothing yet.
    pub fn new(shards: &'a Shards) -> Loader<'a> {
        Loader { shards, bytes: 0 }
    }

    /// Bytes of everything loaded so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether there is a tensor of that name.
    pub fn has(&self, name: &str) -> bool {
        self.shards.find(name).is_some()
    }

    /// A matrix in its stored width.
    ///
    /// # Errors
    /// Those of [`expect`], and a failed read.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Weight, WeightError> {
        let (_, format) = expect(self.shards, name, &[rows, cols])?;
        // The copy here is the resident one; a second in the page cache would only take memory.
        let bytes = self.shards.read_raw(name, Cache::Drop)?;
        self.bytes += bytes.len() as u64;
        Ok(Weight {
            format,
            rows,
            cols,
            bytes,
        })
    }

    /// A vector as f32: a norm, a bias.
    ///
    /// # Errors
    /// Those of [`expect`], and a failed read.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, WeightError> {
        expect(self.shards, name, &[len])?;
        let values = self.shards.read_f32(name, Cache::Drop)?;
        self.bytes += 4 * values.len() as u64;
        Ok(values)
    }
}
