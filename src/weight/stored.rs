//! Finds how a weight matrix is stored: as floats, or as codes with a second tensor of scales.

use std::collections::HashMap;

use super::damage;
use super::error::WeightError;
use crate::arch::{Architecture, TensorId};
use crate::quant::infer::{Refusal, Sizes, infer};
use crate::quant::{Format, MXFP4_GROUP};
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
        damage::format_of_scales(self.format)
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
        Format::Mxfp4 => Some(format!("{name}{MXFP4_SCALES}")),
        _ => Some(format!("{name}.qs")),
    }
}

/// Ends of the names of the two tensors of an MXFP4 matrix.
const MXFP4_BLOCKS: &str = "_blocks";
const MXFP4_SCALES: &str = "_scales";

/// Whether a matrix or a stack of them is stored, in one tensor or in several.
pub fn is_stored(shards: &Shards, name: &str) -> bool {
    find_codes(shards, name).is_some()
}

/// The tensor with the floats or codes of a matrix, which some formats name in a way of their own.
fn find_codes<'a>(shards: &'a Shards, name: &str) -> Option<Tensor<'a>> {
    let blocks = || shards.find(&format!("{name}{MXFP4_BLOCKS}"));
    shards.find(name).or_else(blocks)
}

/// The name of the tensor with the floats or codes of the matrix `name`.
pub fn codes_name(format: Format, name: String) -> String {
    match format {
        Format::Mxfp4 => name + MXFP4_BLOCKS,
        _ => name,
    }
}

/// The name of the matrix whose floats or codes `tensor` would hold.
fn owner_of_codes(tensor: &str) -> &str {
    tensor.strip_suffix(MXFP4_BLOCKS).unwrap_or(tensor)
}

/// The name of the tensor that `name` would hold the scales of.
pub fn owner_of_scales(name: &str) -> Option<&str> {
    [".qs", "_scale_inv", MXFP4_SCALES]
        .iter()
        .find_map(|suffix| name.strip_suffix(suffix))
}

/// The tensor of this name, or the one that it would hold the scales of.
pub fn id_of(arch: &Architecture, name: &str) -> Option<TensorId> {
    let parse = |name| arch.names.parse(name);
    parse(name)
        .or_else(|| parse(owner_of_scales(name)?))
        .or_else(|| parse(owner_of_codes(name)))
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
        let tensor = match find_codes(self.shards, name) {
            Some(tensor) => tensor,
            None => self.shards.get(name)?,
        };
        let found = match tensor.name == name {
            true => self.find_stored(tensor, shape),
            false => self.find_mxfp4(tensor, name, shape),
        };
        found.map_err(|error| error.in_file(self.shards, tensor.file))
    }

    /// Finds the stack of matrices `name` of experts in pairs: codes [stack, rows, cols], or floats [stack, cols, rows].
    ///
    /// # Errors
    /// As [`Matrices::find`].
    pub fn find_in_pairs(
        &self,
        name: &str,
        [stack, rows, cols]: [usize; 3],
    ) -> Result<Stored<'a>, WeightError> {
        match self.shards.find(name) {
            Some(_) => self.find(name, &[stack, cols, rows]),
            None => self.find(name, &[stack, rows, cols]),
        }
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

    /// FP4 codes with an exponent for every 32: in the shape [..., rows, groups, 16] and [..., rows, groups].
    fn find_mxfp4(
        &self,
        tensor: Tensor<'a>,
        name: &str,
        shape: &[usize],
    ) -> Result<Stored<'a>, WeightError> {
        if tensor.dtype != Dtype::U8 {
            let (name, found) = (tensor.name.into(), tensor.dtype);
            return Err(WeightError::Dtype { name, found });
        }
        let [stack @ .., cols] = shape else {
            return Err(refused(&tensor, Refusal::Unsupported("mxfp4 vector")));
        };
        if !cols.is_multiple_of(MXFP4_GROUP) {
            let what = "mxfp4 with a short last group";
            return Err(refused(&tensor, Refusal::Unsupported(what)));
        }
        let groups = cols / MXFP4_GROUP;
        check_shape(&tensor, &[stack, &[groups, MXFP4_GROUP / 2]].concat())?;
        let scales = self.scales(&tensor, format!("{name}{MXFP4_SCALES}"))?;
        if scales.dtype != Dtype::U8 {
            return Err(scales_dtype(&scales));
        }
        check_shape(&scales, &[stack, &[groups]].concat())?;
        Ok(Stored {
            tensor,
            scales: Some(scales),
            format: Format::Mxfp4,
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
