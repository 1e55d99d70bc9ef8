//! Borrows weight matrices in the bytes they are stored in, and checks their sizes.

use std::ops::Range;

use serde::Serialize;

use super::format::{FP8_BLOCK, Format};
use super::infer;

/// How a product takes the activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// They stay f32.
    #[default]
    Exact,
    /// They are rounded to int8 with one scale for 64 columns, and multiplied as integers (`packed::integer`). Matrices of floats and
    /// of FP8, and groups that end inside 64 columns, are computed exactly nevertheless.
    Int8,
}

/// The bytes are not a matrix of the stated shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names every field")]
pub enum ShapeError {
    /// Wrong number of bytes for the format and the shape [rows, cols].
    #[error("the {format} matrix [{rows}, {cols}] takes {expected} bytes, not {actual}")]
    Size {
        format: Format,
        rows: usize,
        cols: usize,
        expected: usize,
        actual: usize,
    },
    /// Wrong number of bytes of scales for the format and the shape [rows, cols].
    #[error("the {format} matrix [{rows}, {cols}] takes {expected} bytes of scales, not {actual}")]
    Scales {
        format: Format,
        rows: usize,
        cols: usize,
        expected: usize,
        actual: usize,
    },
    /// The matrix [rows, cols] is larger than the address space.
    #[error("the {format} matrix [{rows}, {cols}] is too large to address")]
    Overflow {
        format: Format,
        rows: usize,
        cols: usize,
    },
}

/// A borrowed weight matrix [rows, cols], row-major, in the bytes it is stored in (no alignment needed). Every constructor checks that
/// the bytes are exactly those of the shape.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    format: Format,
    rows: usize,
    cols: usize,
    bytes: &'a [u8],
    /// f32, little-endian; empty for floats.
    scales: &'a [u8],
    /// Row of its FP8 block that the first row is: not 0 where the matrix was cut out of a larger one.
    row_in_block: usize,
    activations: Activations,
}

impl<'a> Matrix<'a> {
    /// The matrix of floats [rows, cols] stored in `bytes`.
    ///
    /// # Errors
    /// `bytes` has another length than the shape takes.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        bytes: &'a [u8],
    ) -> Result<Matrix<'a>, ShapeError> {
        Matrix::with_scales(format, rows, cols, bytes, &[])
    }

    /// The matrix [rows, cols] stored in `bytes` with its `scales` (f32, little-endian, no alignment needed).
    ///
    /// # Errors
    /// One of them has another length than the shape takes.
    pub fn with_scales(
        format: Format,
        rows: usize,
        cols: usize,
        bytes: &'a [u8],
        scales: &'a [u8],
    ) -> Result<Matrix<'a>, ShapeError> {
        let overflow = ShapeError::Overflow { format, rows, cols };
        let row = format.row_bytes(cols);
        let expected = row
            .and_then(|row| row.checked_mul(rows))
            .ok_or(overflow.clone())?;
        if bytes.len() != expected {
            return Err(ShapeError::Size {
                format,
                rows,
                cols,
                expected,
                actual: bytes.len(),
            });
        }
        let expected = format.scale_bytes(rows, cols).ok_or(overflow)?;
        if scales.len() != expected {
            return Err(ShapeError::Scales {
                format,
                rows,
                cols,
                expected,
                actual: scales.len(),
            });
        }
        Ok(Matrix {
            format,
            rows,
            cols,
            bytes,
            scales,
            row_in_block: 0,
            activations: Activations::Exact,
        })
    }

    /// `values` as a matrix with rows of `cols` values, an incomplete last row left out. A KV cache is one.
    pub fn from_f32(values: &'a [f32], cols: usize) -> Matrix<'a> {
        let rows = values.len().checked_div(cols).unwrap_or(0);
        Matrix::of_f32(rows, cols, &values[..rows * cols])
    }

    /// `values` as a matrix of one row, which may be empty.
    pub(super) fn one_row(values: &'a [f32]) -> Matrix<'a> {
        Matrix::of_f32(1, values.len(), values)
    }

    fn of_f32(rows: usize, cols: usize, values: &'a [f32]) -> Matrix<'a> {
        Matrix {
            format: Format::F32,
            rows,
            cols,
            bytes: bytemuck::cast_slice(values),
            scales: &[],
            row_in_block: 0,
            activations: Activations::Exact,
        }
    }

    /// The same matrix, with products that take activations this way. The sums over rows are exact always.
    #[must_use]
    pub fn with_activations(self, activations: Activations) -> Matrix<'a> {
        Matrix {
            activations,
            ..self
        }
    }

    /// The matrix of the rows `range`.
    ///
    /// # Panics
    /// `range` is not inside `0..rows`, as for a slice.
    #[must_use]
    pub fn slice_rows(&self, range: Range<usize>) -> Matrix<'a> {
        let stride = self.row_bytes();
        let scale_stride = self.scale_row_bytes();
        let (row_in_block, scales) = match self.format {
            Format::Fp8Block | Format::Fp8BlockBf16 => {
                let first = self.row_in_block + range.start;
                let end = (self.row_in_block + range.end).div_ceil(FP8_BLOCK);
                (first % FP8_BLOCK, (first / FP8_BLOCK).min(end)..end)
            }
            _ => (0, range.clone()),
        };
        Matrix {
            rows: range.len(),
            bytes: &self.bytes[range.start * stride..range.end * stride],
            scales: &self.scales[scales.start * scale_stride..scales.end * scale_stride],
            row_in_block,
            ..*self
        }
    }

    /// How it is stored.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Output size.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input size.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The floats or codes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The scales: f32, or BF16 with [`Format::Fp8BlockBf16`]; little-endian, empty for floats.
    pub fn scales(&self) -> &'a [u8] {
        self.scales
    }

    /// How products take the activations.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Row of its FP8 block that the first row is.
    pub(super) fn row_in_block(&self) -> usize {
        self.row_in_block
    }

    /// Whether no scale is infinite or NaN.
    pub fn scales_are_finite(&self) -> bool {
        infer::scale_not_finite(self.format, self.scales).is_none()
    }

    /// Bytes of the scales along one row.
    pub(super) fn scale_row_bytes(&self) -> usize {
        // The constructor has checked that the scales of all rows have a size.
        self.format.scale_row_bytes(self.cols).unwrap_or(0)
    }

    /// Bytes of the weights of one row.
    pub(super) fn row_bytes(&self) -> usize {
        self.bytes.len().checked_div(self.rows).unwrap_or(0)
    }
}
