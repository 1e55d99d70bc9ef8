//! F32, F16 and BF16: an element is converted to f32 exactly, and multiplied there.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use std::marker::PhantomData;

use super::Matrix;
use super::kernel::{Isa, Kernel};

/// A float format.
pub trait Element: Sync + 'static {
    /// Bytes of an element.
    const BYTES: usize;
    /// The value of the element in `bytes` (little-endian, of length [`Element::BYTES`]).
    fn decode(bytes: &[u8]) -> f32;
}

/// 32-bit float.
pub struct F32;
/// IEEE half.
pub struct F16;
/// bfloat16.
pub struct Bf16;

impl Element for F32 {
    const BYTES: usize = 4;
    fn decode(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

impl Element for F16 {
    const BYTES: usize = 2;
    fn decode(bytes: &[u8]) -> f32 {
        half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;
    fn decode(bytes: &[u8]) -> f32 {
        half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
    }
}

/// An element that every path can convert.
#[cfg(target_arch = "x86_64")]
pub trait Float: Element + avx2::Load8 + avx512::Load16 {}
#[cfg(target_arch = "x86_64")]
impl<E: Element + avx2::Load8 + avx512::Load16> Float for E {}
/// An element that every path can convert.
#[cfg(not(target_arch = "x86_64"))]
pub trait Float: Element {}
#[cfg(not(target_arch = "x86_64"))]
impl<E: Element> Float for E {}

/// The kernels of `E` on `isa`.
pub fn kernel<E: Float>(isa: Isa) -> &'static dyn Kernel {
    match isa {
        Isa::Portable => &Floats::<E, portable::Path>(PhantomData),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => &Floats::<E, avx2::Path>(PhantomData),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => &Floats::<E, avx512::Path>(PhantomData),
    }
}

/// The inner loops of one instruction set. They handle a few rows and columns that fit in its registers.
trait Blocks<E>: Sync + 'static {
    /// Most columns that [`Blocks::dot`] takes.
    const COLS: usize;
    /// Rows that [`Blocks::dot`] takes with `cols` columns, besides 1.
    fn rows(cols: usize) -> usize;
    /// y[c][at + r] = row r of `w` . x[c]. `w` is 1 or [`Blocks::rows`] rows, as many columns in `x` as in `y`,
    /// neither empty.
    fn dot(w: &[u8], x: &[f32], y: &mut [&mut [f32]], at: usize);
    /// y[j] += sum over r of a[r] * w[r][j], r ascending, for 1 or 4 rows `w` of y.len() elements.
    fn axpy(w: &[&[u8]], a: &[f32], y: &mut [f32]);
}

/// The kernels of the elements `E` with the inner loops `P`.
struct Floats<E, P>(PhantomData<(E, P)>);

/// Rows that [`Blocks::axpy`] adds in one pass over y.
const AXPY_ROWS: usize = 4;

impl<E: Element, P: Blocks<E>> Kernel for Floats<E, P> {
    fn matmul(&self, w: Matrix<'_>, x: &[f32], y: &mut [&mut [f32]]) {
        let cols = w.cols;
        let stride = cols * E::BYTES;
        assert_eq!(x.len(), y.len() * cols);
        if cols == 0 {
            return y.iter_mut().for_each(|y| y.fill(0.0));
        }
        // A block of columns stays in cache while the rows of the tile pass over it.
        for (block, y) in y.chunks_mut(P::COLS).enumerate() {
            let first = block * P::COLS;
            let x = &x[first * cols..(first + y.len()) * cols];
            let mut row = 0;
            while row < w.rows {
                let step = P::rows(y.len());
                let step = if row + step <= w.rows { step } else { 1 };
                P::dot(&w.bytes[row * stride..(row + step) * stride], x, y, row);
                row += step;
            }
        }
    }

    fn add_rows(&self, w: Matrix<'_>, a: &[f32], y: &mut [f32]) {
        assert_eq!((a.len(), y.len()), (w.rows, w.cols));
        let stride = w.cols * E::BYTES;
        let part = |r: usize| &w.bytes[r * stride..(r + 1) * stride];
        let mut row = 0;
        while row + AXPY_ROWS <= w.rows {
            let parts: [&[u8]; AXPY_ROWS] = std::array::from_fn(|r| part(row + r));
            P::axpy(&parts, &a[row..row + AXPY_ROWS], y);
            row += AXPY_ROWS;
        }
        for row in row..w.rows {
            P::axpy(&[part(row)], &a[row..=row], y);
        }
    }
}
