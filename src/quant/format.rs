//! Names the weight formats and computes their sizes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Rows, and columns, of a block that shares one FP8 scale.
pub const FP8_BLOCK: usize = 128;

/// Columns that share an MXFP4 scale.
pub const MXFP4_GROUP: usize = 32;

/// How a weight matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Format {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Signed bytes, one scale a row.
    Int8Row,
    /// Nibbles less 8, the low one first; one scale a row.
    Int4Row,
    /// Nibbles less 8, the low one first; one scale for this many columns (the last group of a row may be short).
    Int4Group(u32),
    /// Two-bit fields less 2, the lowest first; one scale a row.
    Int2Row,
    /// F8_E4M3, one scale for a block of 128 by 128.
    Fp8Block,
    /// As [`Format::Fp8Block`], with BF16 scales.
    Fp8BlockBf16,
    /// FP4 (E2M1) nibbles, the low one first; for 32 columns one scale, a power of two as its biased exponent in a byte (E8M0).
    Mxfp4,
}

impl Format {
    /// Bytes of the weights of a row of `cols`; `None` when that overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        match self {
            Format::F32 => cols.checked_mul(4),
            Format::F16 | Format::Bf16 => cols.checked_mul(2),
            Format::Int8Row | Format::Fp8Block | Format::Fp8BlockBf16 => Some(cols),
            Format::Int4Row | Format::Int4Group(_) | Format::Mxfp4 => Some(cols.div_ceil(2)),
            Format::Int2Row => Some(cols.div_ceil(4)),
        }
    }

    /// Whether weights are floating-point numbers, which can be rounded to codes.
    pub fn is_floating(self) -> bool {
        match self {
            Format::F32 | Format::F16 | Format::Bf16 => true,
            Format::Fp8Block | Format::Fp8BlockBf16 => true,
            Format::Int8Row | Format::Int4Row | Format::Int4Group(_) | Format::Int2Row => false,
            // Codes of four bits already: rounding them again would save nothing.
            Format::Mxfp4 => false,
        }
    }

    /// Number of scales along a row of `cols`; 0 for floats.
    pub fn row_scales(self, cols: usize) -> usize {
        match self {
            Format::F32 | Format::F16 | Format::Bf16 => 0,
            Format::Int8Row | Format::Int4Row | Format::Int2Row => 1,
            Format::Int4Group(size) => cols.div_ceil(size.max(1) as usize),
            Format::Fp8Block | Format::Fp8BlockBf16 => cols.div_ceil(FP8_BLOCK),
            Format::Mxfp4 => cols.div_ceil(MXFP4_GROUP),
        }
    }

    /// Bytes of the scales of a matrix [rows, cols]; `None` when that overflows.
    pub fn scale_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        let rows = match self.is_fp8() {
            true => rows.div_ceil(FP8_BLOCK),
            false => rows,
        };
        self.scale_row_bytes(cols)?.checked_mul(rows)
    }

    /// Bytes of the scales along a row of `cols`; `None` when that overflows.
    pub fn scale_row_bytes(self, cols: usize) -> Option<usize> {
        self.row_scales(cols).checked_mul(self.scale_width())
    }

    /// Bytes of a scale.
    pub fn scale_width(self) -> usize {
        match self {
            Format::Fp8BlockBf16 => 2,
            Format::Mxfp4 => 1,
            _ => 4,
        }
    }

    /// Whether weights are F8_E4M3 and blocks of rows share scales.
    pub fn is_fp8(self) -> bool {
        matches!(self, Format::Fp8Block | Format::Fp8BlockBf16)
    }

    /// The name that a container's `colibri.fmt` stamp uses.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::F16 => "f16",
            Format::Bf16 => "bf16",
            Format::Int8Row => "int8-row",
            Format::Int4Row => "int4-row",
            Format::Int4Group(_) => "int4-grouped",
            Format::Int2Row => "int2-row",
            Format::Fp8Block | Format::Fp8BlockBf16 => "fp8-e4m3-b128",
            Format::Mxfp4 => "mxfp4",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::F32 => f.write_str("F32"),
            Format::F16 => f.write_str("F16"),
            Format::Bf16 => f.write_str("BF16"),
            Format::Int4Group(size) => write!(f, "int4-g{size}"),
            packed => f.write_str(packed.name()),
        }
    }
}
