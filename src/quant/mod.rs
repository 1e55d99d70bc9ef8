//! Weight formats and the matrix-vector products on them.

use crate::pool::Pool;

/// How a weight matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
}

/// A borrowed weight matrix [rows, cols], row-major, in the bytes it was stored in (no alignment needed).
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
}

impl Matrix<'_> {
    /// y = W x for `n` columns: `x` is [n, cols], `y` is [n, rows], both row-major (one vector a column).
    /// The reduction order of an element depends on `cols` alone: not on `n`, the threads or the CPU.
    pub fn matmul(&self, pool: &Pool, x: &[f32], n: usize, y: &mut [f32]) {
        let _ = pool;
        let mut row = vec![0f32; self.cols];
        for r in 0..self.rows {
            row.fill(0.0);
            self.add_row(r, 1.0, &mut row);
            for c in 0..n {
                y[c * self.rows + r] = dot(&row, &x[c * self.cols..(c + 1) * self.cols]);
            }
        }
    }

    /// y += a * W[row, :], with `y` of `cols` values.
    pub fn add_row(&self, row: usize, a: f32, y: &mut [f32]) {
        for (c, y) in y.iter_mut().enumerate() {
            let at = row * self.cols + c;
            let w = match self.format {
                Format::F32 => {
                    f32::from_le_bytes(self.bytes[at * 4..at * 4 + 4].try_into().unwrap())
                }
                Format::F16 => {
                    half::f16::from_le_bytes(self.bytes[at * 2..at * 2 + 2].try_into().unwrap())
                        .to_f32()
                }
                Format::Bf16 => {
                    half::bf16::from_le_bytes(self.bytes[at * 2..at * 2 + 2].try_into().unwrap())
                        .to_f32()
                }
            };
            *y += a * w;
        }
    }
}

/// The dot product, in the same reduction order as [`Matrix::matmul`].
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
