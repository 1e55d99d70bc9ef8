//! Weight formats and the matrix-vector products on them.
//!
//! # One reduction order
//!
//! The value of an output element depends on its weights and activations alone: not on how many columns are
//! computed at once, the number of threads, how rows are split into tiles, or the instruction set. Every kernel
//! implements this order:
//!
//! - A row is cut into blocks of [`LANES`] elements; the last block is padded with weights and activations of +0.
//! - Lane l starts at +0 and takes element l of every block, in order, by a fused multiply-add:
//!   `lane[l] = fma(w[j], x[j], lane[l])` with `j % 32 == l`.
//! - The lanes are added in pairs: lane l and l + 16, then l + 8, l + 4, l + 2, l + 1.
//!
//! Thirty-two lanes are four AVX2 registers or two of AVX-512, enough independent chains to hide the latency of
//! the multiply-add. The sums over rows ([`Matrix::add_row`], [`Matrix::matmul_transposed`]) have no lanes: one fused
//! multiply-add an element and row, rows ascending. Results that are NaN are NaN everywhere, with any payload.
//!
//! The formats with scales have the same lanes; which element goes to which, and where the scale comes in, is in the
//! documentation of `packed`, and in `docs/formats.md`.
//!
//! # Adding a format
//!
//! Write its kernels (trait [`kernel::Kernel`]) in a file of its own, then name it in [`Format`] and in
//! `dispatch::kernel_for`.

mod dispatch;
pub mod encode;
mod float;
mod format;
pub mod infer;
mod kernel;
mod packed;
#[cfg(target_arch = "x86_64")]
mod register;
#[cfg(test)]
mod tests;

use std::ops::Range;

use serde::Serialize;

use crate::pool::Pool;

pub use format::{FP8_BLOCK, Format};
pub use kernel::Isa;

#[cfg(target_endian = "big")]
compile_error!("weights are little-endian and used in place");

/// What a product does with the activations before it multiplies them with packed weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// They stay f32.
    #[default]
    Exact,
    /// They are rounded to int8 with one scale for 64 columns, and multiplied as integers (`packed::integer`). Matrices of floats and
    /// of FP8, and groups that end inside 64 columns, are computed exactly all the same.
    Int8,
}

/// Number of partial sums of a dot product.
pub const LANES: usize = 32;

/// Products that touch fewer weight bytes than this run on the calling thread: they take about as long as waking a
/// helper, 10 us.
const INLINE_BYTES: usize = 256 << 10;
/// Weight bytes of a tile: enough to make claiming it free, and small enough that the last tiles of two threads
/// end together and that a tile stays in the L2 cache while several columns pass over it.
const TILE_BYTES: usize = 128 << 10;

/// The bytes are not a matrix of the stated shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// Wrong number of bytes.
    #[error("the {format} matrix [{rows}, {cols}] takes {expected} bytes, not {actual}")]
    Size {
        /// Format of the matrix.
        format: Format,
        /// Output size.
        rows: usize,
        /// Input size.
        cols: usize,
        /// Bytes it takes.
        expected: usize,
        /// Bytes there are.
        actual: usize,
    },
    /// Wrong number of bytes of scales.
    #[error("the {format} matrix [{rows}, {cols}] takes {expected} bytes of scales, not {actual}")]
    Scales {
        /// Format of the matrix.
        format: Format,
        /// Output size.
        rows: usize,
        /// Input size.
        cols: usize,
        /// Bytes of scales it takes.
        expected: usize,
        /// Bytes of scales there are.
        actual: usize,
    },
    /// The size does not fit in memory.
    #[error("the {format} matrix [{rows}, {cols}] is too large to address")]
    Overflow {
        /// Format of the matrix.
        format: Format,
        /// Output size.
        rows: usize,
        /// Input size.
        cols: usize,
    },
}

/// A borrowed weight matrix [rows, cols], row-major, in the bytes it was stored in (no alignment needed).
///
/// [`Matrix::new`] checks the shape. The products panic on a matrix built with bytes that do not match it.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Format of `bytes`.
    pub format: Format,
    /// Output size.
    pub rows: usize,
    /// Input size.
    pub cols: usize,
    /// The weights.
    pub bytes: &'a [u8],
    /// The scales: f32, little-endian, no alignment needed; empty for floats.
    pub scales: &'a [u8],
    /// Rows of the first row of FP8 blocks that come before this matrix, which was cut out of a larger one.
    pub skip: usize,
    /// How [`Matrix::matmul`] takes the activations. The sums over rows are exact always.
    pub activations: Activations,
}

impl<'a> Matrix<'a> {
    /// The matrix of floats [rows, cols] stored in `bytes`.
    ///
    /// # Errors
    /// When `bytes` has another length than the shape takes.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        bytes: &'a [u8],
    ) -> Result<Matrix<'a>, ShapeError> {
        Matrix::with_scales(format, rows, cols, bytes, &[])
    }

    /// The matrix [rows, cols] stored in `bytes` with its `scales`.
    ///
    /// # Errors
    /// When one of them has another length than the shape takes.
    pub fn with_scales(
        format: Format,
        rows: usize,
        cols: usize,
        bytes: &'a [u8],
        scales: &'a [u8],
    ) -> Result<Matrix<'a>, ShapeError> {
        let expected = format
            .row_bytes(cols)
            .and_then(|row| row.checked_mul(rows))
            .ok_or(ShapeError::Overflow { format, rows, cols })?;
        let actual = bytes.len();
        if actual != expected {
            return Err(ShapeError::Size {
                format,
                rows,
                cols,
                expected,
                actual,
            });
        }
        let expected =
            format
                .scale_bytes(rows, cols)
                .ok_or(ShapeError::Overflow { format, rows, cols })?;
        let actual = scales.len();
        if actual != expected {
            return Err(ShapeError::Scales {
                format,
                rows,
                cols,
                expected,
                actual,
            });
        }
        Ok(Matrix {
            format,
            rows,
            cols,
            bytes,
            scales,
            skip: 0,
            activations: Activations::Exact,
        })
    }

    /// `values` as a matrix with rows of `cols` values, the last incomplete row left out. A KV cache is one.
    pub fn from_f32(values: &'a [f32], cols: usize) -> Matrix<'a> {
        let rows = values.len().checked_div(cols).unwrap_or(0);
        Matrix {
            format: Format::F32,
            rows,
            cols,
            bytes: bytemuck::cast_slice(&values[..rows * cols]),
            scales: &[],
            skip: 0,
            activations: Activations::Exact,
        }
    }

    /// The matrix of the rows `range`.
    ///
    /// # Panics
    /// When `range` is not inside `0..rows`, as a slice does.
    pub fn rows(&self, range: Range<usize>) -> Matrix<'a> {
        let stride = self.row_bytes();
        let scale_stride = 4 * self.format.row_scales(self.cols);
        let (skip, scales) = match self.format {
            Format::Fp8Block => {
                let first = self.skip + range.start;
                let end = (self.skip + range.end).div_ceil(FP8_BLOCK);
                (first % FP8_BLOCK, (first / FP8_BLOCK).min(end)..end)
            }
            _ => (0, range.clone()),
        };
        Matrix {
            rows: range.len(),
            bytes: &self.bytes[range.start * stride..range.end * stride],
            scales: &self.scales[scales.start * scale_stride..scales.end * scale_stride],
            skip,
            ..*self
        }
    }

    /// Whether no scale is infinite or NaN.
    pub fn scales_are_finite(&self) -> bool {
        infer::not_finite(self.scales).is_none()
    }

    /// Bytes of one row.
    fn row_bytes(&self) -> usize {
        self.bytes.len().checked_div(self.rows).unwrap_or(0)
    }

    /// y = W x for `n` columns: `x` is [n, cols], `y` is [n, rows], both row-major (one vector a column).
    /// The reduction order of an element depends on `cols` alone: not on `n`, the threads or the CPU.
    ///
    /// # Panics
    /// When `x` or `y` has another length.
    pub fn matmul(&self, pool: &Pool, x: &[f32], n: usize, y: &mut [f32]) {
        assert_eq!((x.len(), y.len()), (n * self.cols, n * self.rows));
        if y.is_empty() {
            return;
        }
        let integer = match self.activations {
            Activations::Exact => None,
            Activations::Int8 => dispatch::integer_kernel(self.format),
        };
        if let Some(kernel) = integer {
            let x = kernel.round(x, self.cols);
            return self.in_bands(pool, n, y, &|w, y| kernel.matmul(w, &x, y));
        }
        let kernel = dispatch::kernel(self.format);
        let x = &*kernel.arrange(x, self.cols);
        self.in_bands(pool, n, y, &|w, y| kernel.matmul(w, x, y));
    }

    /// Cuts a product with `n` columns into bands of rows, which the threads share.
    fn in_bands(
        &self,
        pool: &Pool,
        n: usize,
        y: &mut [f32],
        product: &(dyn Fn(Matrix<'_>, &mut [&mut [f32]]) + Sync),
    ) {
        let band = self.band(pool, n);
        if n == 1 && band == self.rows {
            return product(*self, &mut [y]);
        }
        let mut parts = bands(y, self.rows, band);
        pool.run_chunks(&mut parts, n, &|tile, y| {
            let start = tile * band;
            let rows = start..self.rows.min(start + band);
            product(self.rows(rows), y);
        });
    }

    /// Rows of a tile of [`Matrix::matmul`]; all of them when it is not worth waking anybody.
    fn band(&self, pool: &Pool, n: usize) -> usize {
        let row = self.row_bytes().max(1);
        if pool.threads() == 1 && n == 1 || self.bytes.len().saturating_mul(n) < INLINE_BYTES {
            return self.rows;
        }
        // Many columns make a small matrix worth splitting too.
        let share = self.rows.div_ceil(4 * pool.threads());
        (TILE_BYTES / row).min(share).max(1).next_multiple_of(2)
    }

    /// y += a * W[row, :], with `y` of `cols` values. With a = 1 and y = 0 this reads a row (an embedding).
    ///
    /// # Panics
    /// When `row` is not below `rows`, or `y` has another length.
    pub fn add_row(&self, row: usize, a: f32, y: &mut [f32]) {
        dispatch::kernel(self.format).add_rows(self.rows(row..row + 1), &[a], y);
    }

    /// y += transpose(W) a, rows ascending, with `y` of `cols` values. W may be a block of a KV cache and `a` the
    /// probabilities of its positions.
    ///
    /// # Panics
    /// When `a` or `y` has another length.
    pub fn add_rows(&self, a: &[f32], y: &mut [f32]) {
        dispatch::kernel(self.format).add_rows(*self, a, y);
    }

    /// y = transpose(W) x for `n` columns: `x` is [n, rows], `y` is [n, cols], both row-major. Rows are added in
    /// ascending order. For a block of rows (one head of `kv_b`) call it on [`Matrix::rows`].
    ///
    /// Threads share the columns only, because parts of rows stream badly: with one column, run the blocks of rows
    /// of a large matrix in parallel instead (a call inside [`Pool::run`] stays on its thread).
    ///
    /// # Panics
    /// When `x` or `y` has another length.
    pub fn matmul_transposed(&self, pool: &Pool, x: &[f32], n: usize, y: &mut [f32]) {
        assert_eq!((x.len(), y.len()), (n * self.rows, n * self.cols));
        if y.is_empty() {
            return;
        }
        let kernel = dispatch::kernel(self.format);
        let product = |c: usize, y: &mut [f32]| {
            y.fill(0.0);
            kernel.add_rows(*self, &x[c * self.rows..(c + 1) * self.rows], y);
        };
        if self.bytes.len().saturating_mul(n) < INLINE_BYTES {
            for (c, y) in y.chunks_mut(self.cols).enumerate() {
                product(c, y);
            }
        } else {
            pool.run_chunks(y, self.cols, &product);
        }
    }
}

/// Cuts every vector of `y` ([n, len]) into bands of `band` elements. Band b of column c is at [b * n + c].
fn bands(y: &mut [f32], len: usize, band: usize) -> Vec<&mut [f32]> {
    let mut columns: Vec<_> = y.chunks_mut(len).map(|y| y.chunks_mut(band)).collect();
    let mut parts = Vec::with_capacity(columns.len() * len.div_ceil(band));
    for _ in 0..len.div_ceil(band) {
        parts.extend(columns.iter_mut().filter_map(Iterator::next));
    }
    parts
}

/// The dot product, in the same reduction order as [`Matrix::matmul`].
///
/// # Panics
/// When the lengths differ.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut y = [0.0];
    dispatch::kernel(Format::F32).matmul(row(a), b, &mut [&mut y]);
    y[0]
}

/// y += a * x, one fused multiply-add an element.
///
/// # Panics
/// When the lengths differ.
pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    dispatch::kernel(Format::F32).add_rows(row(x), &[a], y);
}

/// `values` as a matrix of one row.
fn row(values: &[f32]) -> Matrix<'_> {
    Matrix {
        format: Format::F32,
        rows: 1,
        cols: values.len(),
        bytes: bytemuck::cast_slice(values),
        scales: &[],
        skip: 0,
        activations: Activations::Exact,
    }
}
