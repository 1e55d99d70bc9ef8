//! Finds how a weight matrix is stored: as floats, or as codes with a second tensor of scales.

use std::collections::HashMap;

use super::error::WeightError;
use crate::arch::{Architecture, TensorId};
use crate::quant::Format;
use crate::quant::infer::{Refusal, Sizes, infer};
use crate::shards::{Dtype, Shards, Tensor};

/// Key of `__metadata__` that may confirm formats: JSON text, tensor name -> format name.
const STAMP: &str = "colibri.fmt";

/// A weight matrix, or a stack of them, as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// The floats or codes.
    pub tensor: Tensor<'a>,
    /// The scales; `None` for floats.
    pub scales: Option<Tensor<'a>>,
    /// How the matrix is to be read.
    pub format: Format,
}

impl Stored<'_> {
    /// How the scales are checked: `None` for scales in F32, else as values of this format.
    pub(super) fn format_of_scales(&self) -> Option<Format> {
        (self.format == Format::Fp8BlockBf16).then_some(Format::Bf16)
    }
}

/// Finds weight matrices and their formats.
#[derive(Debug)]
pub struct Matrices<'a> {
    shards: &'a Shards,
    /// The stamps of every file.
    stamps: Vec<HashMap<String, String>>,
}

/// The name of the scales of a tensor stored in `format`; `None` for floats.
pub fn scales_name(format: Format, name: &str) -> Option<String> {
    match format {
        Format::F32 | Format::F16 | Format::Bf16 => None,
        Format::Fp8Block | Format::Fp8BlockBf16 => Some(format!("{name}_scale_inv")),
        _ => Some(format!("{name}.qs")),
    }
}

/// The name of the tensor that `name` would hold the scales of.
pub fn owner_of_scales(name: &str) -> Option<&str> {
    [".qs", "_scale_inv"]
        .iter()
        .find_map(|suffix| name.strip_suffix(suffix))
}

/// The tensor of this name, or the one that it would hold the scales of.
pub fn id_of(arch: &Architecture, name: &str) -> Option<TensorId> {
    let parse = |name| arch.names.parse(name);
    parse(name).or_else(|| parse(owner_of_scales(name)?))
}

impl<'a> Matrices<'a> {
    /// The matrices of `shards`.
    ///
    /// # Errors
    /// A stamp that is no JSON object of strings.
    pub fn new(shards: &'a Shards) -> Result<Matrices<'a>, WeightError> {
        let stamps = (0..shards.files().len())
            .map(|file| {
                let Some(text) = shards.metadata(file).get(STAMP) else {
                    return Ok(HashMap::new());
                };
                serde_json::from_str(text).map_err(|e| WeightError::Stamp {
                    file: shards.files()[file].path().to_path_buf(),
                    reason: e.to_string(),
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Matrices { shards, stamps })
    }

    /// Finds the matrix `name`: `shape` is [rows, cols], or [stack, rows, cols].
    ///
    /// # Errors
    /// When it or its scales are missing, have another shape, or are of a type or size that no matrix product takes.
    pub fn find(&self, name: &str, shape: &[usize]) -> Result<Stored<'a>, WeightError> {
        let tensor = self.shards.get(name)?;
        let found = self.find_stored(tensor, shape);
        found.map_err(|error| error.in_file(self.shards, tensor.file))
    }

    fn find_stored(&self, tensor: Tensor<'a>, shape: &[usize]) -> Result<Stored<'a>, WeightError> {
        let stored = match tensor.dtype {
            Dtype::U8 => return self.find_packed(tensor, shape),
            Dtype::F8E4M3 => self.find_fp8(tensor, shape)?,
            _ => Stored {
                tensor,
                scales: None,
                format: floats(&tensor, shape)?,
            },
        };
        match self.stamp(&tensor) {
            Some(stamp) if stamp != stored.format.name() => {
                let (stamp, found) = (stamp.to_string(), stored.format.to_string());
                Err(refused(&tensor, Refusal::Contradiction { stamp, found }))
            }
            _ => Ok(stored),
        }
    }

    fn stamp(&self, tensor: &Tensor<'_>) -> Option<&str> {
        self.stamps[tensor.file]
            .get(tensor.name)
            .map(String::as_str)
    }

    fn scales(&self, tensor: &Tensor<'_>, scales: String) -> Result<Tensor<'a>, WeightError> {
        self.shards.find(&scales).ok_or_else(|| {
            let name = tensor.name.into();
            WeightError::NoScales { name, scales }
        })
    }

    /// A U8 tensor, whose format follows from its size and that of its scales.
    fn find_packed(&self, tensor: Tensor<'a>, shape: &[usize]) -> Result<Stored<'a>, WeightError> {
        let stamp = self.stamp(&tensor);
        if tensor.shape.len() != 1 {
            return Err(WeightError::PackedShape {
                name: tensor.name.into(),
                found: tensor.shape.to_vec(),
            });
        }
        let scales = self.scales(&tensor, format!("{}.qs", tensor.name))?;
        let (rows, cols) = flat(shape);
        let sizes = Sizes {
            rows,
            cols,
            weights: tensor.bytes,
            scales: scales.elements(),
        };
        if scales.dtype != Dtype::F32 {
            // Powers of two for groups of 32 columns are those of a known format.
            let mxfp4 = rows.checked_mul(cols.div_ceil(32)).map(|n| n as u64);
            if scales.dtype.bits() == 8 && mxfp4 == Some(scales.elements()) {
                return Err(refused(&tensor, Refusal::Unsupported("mxfp4")));
            }
            return Err(scales_dtype(&scales));
        }
        Ok(Stored {
            tensor,
            scales: Some(scales),
            format: infer(sizes, stamp).map_err(|refusal| refused(&tensor, refusal))?,
        })
    }

    /// An FP8 tensor with a scale for every block of 128 by 128.
    fn find_fp8(&self, tensor: Tensor<'a>, shape: &[usize]) -> Result<Stored<'a>, WeightError> {
        check_shape(&tensor, shape)?;
        let &[rows, cols] = shape else {
            // A block of scales may hold rows of two matrices of a stack.
            return Err(refused(
                &tensor,
                Refusal::Unsupported("fused fp8-e4m3-b128"),
            ));
        };
        let scales = self.scales(&tensor, format!("{}_scale_inv", tensor.name))?;
        let format = match scales.dtype {
            Dtype::F32 => Format::Fp8Block,
            Dtype::Bf16 => Format::Fp8BlockBf16,
            _ => return Err(scales_dtype(&scales)),
        };
        check_shape(&scales, &[rows.div_ceil(128), cols.div_ceil(128)])?;
        Ok(Stored {
            tensor,
            scales: Some(scales),
            format,
        })
    }
}

/// Checks that `tensor` holds floats of the given shape, and says which.
///
/// # Errors
/// When it does not.
pub fn floats(tensor: &Tensor<'_>, shape: &[usize]) -> Result<Format, WeightError> {
    check_shape(tensor, shape)?;
    match tensor.dtype {
        Dtype::Bf16 => Ok(Format::Bf16),
        Dtype::F16 => Ok(Format::F16),
        Dtype::F32 => Ok(Format::F32),
        found => Err(WeightError::Dtype {
            name: tensor.name.into(),
            found,
        }),
    }
}

fn check_shape(tensor: &Tensor<'_>, shape: &[usize]) -> Result<(), WeightError> {
    let same = |(found, expected): (&u64, &usize)| *found == *expected as u64;
    if tensor.shape.len() == shape.len() && tensor.shape.iter().zip(shape).all(same) {
        return Ok(());
    }
    Err(WeightError::Shape {
        name: tensor.name.into(),
        found: tensor.shape.to_vec(),
        expected: shape.iter().map(|n| *n as u64).collect(),
    })
}

/// Rows and columns of a matrix or of a stack of them.
fn flat(shape: &[usize]) -> (usize, usize) {
    match shape {
        [stack @ .., cols] => {
            let rows = stack.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
            (rows.unwrap_or(usize::MAX), *cols)
        }
        [] => (0, 0),
    }
}

fn refused(tensor: &Tensor<'_>, source: Refusal) -> WeightError {
    WeightError::Format {
        name: tensor.name.into(),
        source,
    }
}

fn scales_dtype(scales: &Tensor<'_>) -> WeightError {
    WeightError::ScalesDtype {
        name: scales.name.into(),
        found: scales.dtype,
    }
}
