//! Multiplies F32, F16 and BF16: each element is converted to f32 exactly.

mod portable;
#[cfg(target_arch = "x86_64")]
mod simd;

use std::marker::PhantomData;

use super::Matrix;
use super::kernel::{Isa, Kernel, Level};
#[cfg(target_arch = "x86_64")]
use super::register::Register;

/// A float format.
pub trait Element: Sync + 'static {
    /// Bytes of an element.
    const BYTES: usize;

    /// The value of the element in `bytes` (little-endian, of length [`Element::BYTES`]).
    fn decode(bytes: &[u8]) -> f32;

    /// A register of elements from `p` on, at any address.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`, and `V::WIDTH` elements at `p` are readable.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load<V: Register>(p: *const u8) -> V;

    /// The first `n` (at most `V::WIDTH`) elements at `p`, then +0.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`, and `n` elements at `p` are readable.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_first<V: Register>(p: *const u8, n: usize) -> V {
        /// The widest register, in bytes.
        const MOST: usize = 64;
        let mut padded = [0u8; MOST];
        // SAFETY: the caller's promise; elements have at most four bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(p, padded.as_mut_ptr(), n.min(V::WIDTH) * Self::BYTES);
            Self::load(padded.as_ptr())
        }
    }
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

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load<V: Register>(p: *const u8) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(p.cast()) }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_first<V: Register>(p: *const u8, n: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_first(p.cast(), n) }
    }
}

impl Element for F16 {
    const BYTES: usize = 2;

    fn decode(bytes: &[u8]) -> f32 {
        half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load<V: Register>(p: *const u8) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(p) }
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;

    fn decode(bytes: &[u8]) -> f32 {
        half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load<V: Register>(p: *const u8) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16(p) }
    }
}

/// The kernels of `E` on `isa`.
pub fn kernel<E: Element>(isa: Isa) -> &'static dyn Kernel {
    match isa.level() {
        Level::Portable => &FloatKernel::<E, portable::Portable>(PhantomData),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => &FloatKernel::<E, simd::Avx2>(PhantomData),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => &FloatKernel::<E, simd::Avx512>(PhantomData),
    }
}

/// The inner loops of one instruction set, over a few rows and columns that fit in its registers.
trait FloatLoops<E>: Sync + 'static {
    /// Most columns that [`FloatLoops::dot`] takes.
    const COLS: usize;
    /// Rows that [`FloatLoops::dot`] takes with `cols` columns, besides 1.
    fn rows(cols: usize) -> usize;
    /// y[c][at + r] = row r of `w` . x[c]. `w` is 1 or [`FloatLoops::rows`] rows, as many columns in `x` as in `y`,
    /// neither empty.
    fn dot(w: &[u8], x: &[f32], y: &mut [&mut [f32]], at: usize);
    /// y[j] += sum over r of a[r] * w[r][j], r ascending, for 1 or 4 rows `w` of y.len() elements.
    fn axpy(w: &[&[u8]], a: &[f32], y: &mut [f32]);
}

/// The kernels of the elements `E` with the inner loops `P`.
struct FloatKernel<E, P>(PhantomData<(E, P)>);

/// Rows that [`FloatLoops::axpy`] adds in one pass over y.
const AXPY_ROWS: usize = 4;

impl<E: Element, P: FloatLoops<E>> Kernel for FloatKernel<E, P> {
    fn matmul(&self, w: Matrix<'_>, x: &[f32], y: &mut [&mut [f32]]) {
        let cols = w.cols();
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
            while row < w.rows() {
                let step = P::rows(y.len());
                let step = if row + step <= w.rows() { step } else { 1 };
                P::dot(&w.bytes()[row * stride..(row + step) * stride], x, y, row);
                row += step;
            }
        }
    }

    fn add_rows(&self, w: Matrix<'_>, a: &[f32], y: &mut [f32]) {
        assert_eq!((a.len(), y.len()), (w.rows(), w.cols()));
        let stride = w.cols() * E::BYTES;
        let part = |r: usize| &w.bytes()[r * stride..(r + 1) * stride];
        let mut row = 0;
        while row + AXPY_ROWS <= w.rows() {
            let parts: [&[u8]; AXPY_ROWS] = std::array::from_fn(|r| part(row + r));
            P::axpy(&parts, &a[row..row + AXPY_ROWS], y);
            row += AXPY_ROWS;
        }
        for row in row..w.rows() {
            P::axpy(&[part(row)], &a[row..=row], y);
        }
    }
}
