//! Multiplies matrices and vectors, shared by the threads of a pool.

use super::matrix::{Activations, Matrix};
use super::{Format, dispatch};
use crate::pool::Pool;

/// Products that read fewer weight bytes than this run on the calling thread: they take no longer than waking a helper, 10 us.
const INLINE_BYTES: usize = 256 << 10;
/// Weight bytes of a tile. Claiming a tile this large costs nothing by comparison. It is small enough that the last tiles of two threads
/// end together, and that it stays in the L2 cache while several columns pass over it.
const TILE_BYTES: usize = 128 << 10;

impl Matrix<'_> {
    /// y = W x for `n` columns: `x` is [n, cols], `y` is [n, rows], both row-major (one vector a column).
    /// The reduction order of an element depends on `cols` alone: not on `n`, the threads or the CPU.
    ///
    /// # Panics
    /// `x` or `y` has another length.
    pub fn matmul(&self, pool: &Pool, x: &[f32], n: usize, y: &mut [f32]) {
        assert_eq!((x.len(), y.len()), (n * self.cols(), n * self.rows()));
        if y.is_empty() {
            return;
        }
        let integer = match self.activations() {
            Activations::Exact => None,
            Activations::Int8 => dispatch::integer_kernel(self.format()),
        };
        if let Some(kernel) = integer {
            let x = kernel.round(x, self.cols());
            return self.in_bands(pool, n, y, &|w, y| kernel.matmul(w, &x, y));
        }
        let kernel = dispatch::kernel(self.format());
        let x = &*kernel.arrange(x, self.cols());
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
        if n == 1 && band == self.rows() {
            return product(*self, &mut [y]);
        }
        let mut parts = bands(y, self.rows(), band);
        pool.run_chunks(&mut parts, n, &|tile, y| {
            let start = tile * band;
            let rows = start..self.rows().min(start + band);
            product(self.slice_rows(rows), y);
        });
    }

    /// Rows of a tile of [`Matrix::matmul`]; all rows where one thread is faster.
    fn band(&self, pool: &Pool, n: usize) -> usize {
        let row = self.row_bytes().max(1);
        if pool.threads() == 1 && n == 1 || self.bytes().len().saturating_mul(n) < INLINE_BYTES {
            return self.rows();
        }
        // Many columns make a small matrix worth splitting too.
        let share = self.rows().div_ceil(4 * pool.threads());
        (TILE_BYTES / row).min(share).max(1).next_multiple_of(2)
    }

    /// y += a * W[row, :], with `y` of `cols` values. With a = 1 and y = 0 this reads a row (an embedding).
    ///
    /// # Panics
    /// `row` is not below `rows`, or `y` has another length.
    pub fn add_row(&self, row: usize, a: f32, y: &mut [f32]) {
        dispatch::kernel(self.format()).add_rows(self.slice_rows(row..row + 1), &[a], y);
    }

    /// y += transpose(W) a, rows ascending, with `y` of `cols` values. W may be a block of a KV cache, and `a` the
    /// probabilities of its positions.
    ///
    /// # Panics
    /// `a` or `y` has another length.
    pub fn add_rows(&self, a: &[f32], y: &mut [f32]) {
        dispatch::kernel(self.format()).add_rows(*self, a, y);
    }

    /// y = transpose(W) x for `n` columns: `x` is [n, rows], `y` is [n, cols], both row-major. Rows are added in
    /// ascending order. For a block of rows (one head of `kv_b`) call it on [`Matrix::slice_rows`].
    ///
    /// Threads share the columns only, because parts of rows stream badly: with one column, run the blocks of rows
    /// of a large matrix in parallel instead (a call inside [`Pool::run`] stays on its thread).
    ///
    /// # Panics
    /// `x` or `y` has another length.
    pub fn matmul_transposed(&self, pool: &Pool, x: &[f32], n: usize, y: &mut [f32]) {
        assert_eq!((x.len(), y.len()), (n * self.rows(), n * self.cols()));
        if y.is_empty() {
            return;
        }
        let kernel = dispatch::kernel(self.format());
        let product = |c: usize, y: &mut [f32]| {
            y.fill(0.0);
            kernel.add_rows(*self, &x[c * self.rows()..(c + 1) * self.rows()], y);
        };
        if self.bytes().len().saturating_mul(n) < INLINE_BYTES {
            for (c, y) in y.chunks_mut(self.cols()).enumerate() {
                product(c, y);
            }
        } else {
            pool.run_chunks(y, self.cols(), &product);
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
/// The lengths differ.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut y = [0.0];
    dispatch::kernel(Format::F32).matmul(Matrix::one_row(a), b, &mut [&mut y]);
    y[0]
}

/// y += a * x, one fused multiply-add an element.
///
/// # Panics
/// The lengths differ.
pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    dispatch::kernel(Format::F32).add_rows(Matrix::one_row(x), &[a], y);
}
