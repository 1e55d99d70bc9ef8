//! The inner loops on AVX-512 F: the 32 lanes are two registers, a block is four.

use std::arch::x86_64::*;

use super::avx2::{Unpack8, prefetch_rows};
use super::{AXPY_ROWS, BLOCK, Blocks, Code, FINE, GROUP, Groups, QUARTER, Row};
use crate::quant::lanes512::{Lanes, add_lanes};

/// AVX-512 F on top of what [`super::avx2::Path`] needs.
pub struct Path;

/// Codes that AVX-512 unpacks a block at a time.
pub trait Unpack16: Code {
    /// The codes of the block at `p` by position.
    ///
    /// # Safety
    /// `BYTES` bytes at `p` are readable.
    unsafe fn codes16(p: *const u8) -> [__m512; 4];

    /// The same, times a scale.
    ///
    /// # Safety
    /// As for [`Unpack16::codes16`].
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn weights16(p: *const u8, scale: __m512) -> [__m512; 4] {
        // SAFETY: the caller's promise.
        let codes = unsafe { Self::codes16(p) };
        [
            _mm512_mul_ps(codes[0], scale),
            _mm512_mul_ps(codes[1], scale),
            _mm512_mul_ps(codes[2], scale),
            _mm512_mul_ps(codes[3], scale),
        ]
    }
}

impl<C: Unpack16 + Unpack8, const S: u8> Blocks<C, S> for Path {
    const COLS: usize = 4;

    // Two accumulators a row and column: four by two or two by four are sixteen of the thirty-two registers.
    fn rows(cols: usize) -> usize {
        if cols <= 2 { 4 } else { 2 }
    }

    fn dot(rows: &[Row<'_>], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: this path is chosen only on a CPU with these features (`Isa::available`).
        unsafe {
            match (rows, y.len()) {
                (&[a, b, c, d], 1) => dot::<C, S, 4, 1>([a, b, c, d], x, y, at),
                (&[a, b, c, d], _) => dot::<C, S, 4, 2>([a, b, c, d], x, y, at),
                (&[a, b], 3) => dot::<C, S, 2, 3>([a, b], x, y, at),
                (&[a, b], _) => dot::<C, S, 2, 4>([a, b], x, y, at),
                (_, 1) => dot::<C, S, 1, 1>([rows[0]], x, y, at),
                (_, 2) => dot::<C, S, 1, 2>([rows[0]], x, y, at),
                (_, 3) => dot::<C, S, 1, 3>([rows[0]], x, y, at),
                _ => dot::<C, S, 1, 4>([rows[0]], x, y, at),
            }
        }
    }

    fn axpy(rows: &[Row<'_>], a: &[f32], y: &mut [f32]) {
        // SAFETY: this path is chosen only on a CPU with these features (`Isa::available`).
        unsafe {
            match *rows {
                [p, q, r, s] => axpy::<C, S, AXPY_ROWS>([p, q, r, s], a, y),
                _ => axpy::<C, S, 1>([rows[0]], a, y),
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn dot<C: Unpack16, const S: u8, const R: usize, const N: usize>(
    rows: [Row<'_>; R],
    x: &[f32],
    y: &mut [&mut [f32]],
    at: usize,
) {
    let cols = x.len() / N;
    // Closures end here: where features are enabled by function, one inside the loop would be called, not inlined.
    let x: [*const f32; N] = std::array::from_fn(|c| x[c * cols..(c + 1) * cols].as_ptr());
    let codes = rows.map(|row| row.codes.as_ptr());
    let mut lanes: Lanes<R, N> = [[[_mm512_setzero_ps(); 2]; N]; R];
    let mut groups = Groups::new(rows[0].group);
    let whole = rows[0].codes.len() / C::BYTES;
    let padded;
    let mut tail = codes;
    let blocks = cols / BLOCK;
    if whole < blocks {
        padded = rows.map(|row| row.padded::<C>(whole));
        tail = std::array::from_fn(|r| padded[r].as_ptr());
    }
    // One call, so that it is inlined.
    for block in 0..blocks {
        prefetch_rows::<C, R>(&rows, block);
        let group = groups.next();
        let (w, at) = if block < whole {
            (codes, block * C::BYTES)
        } else {
            (tail, 0)
        };
        // SAFETY: there is a block at `w`, whole or padded, and every x[c] has BLOCK values for it.
        unsafe { step::<C, S, R, N>(w, at, &rows, block, group, x, &mut lanes) }
    }
    add_lanes(&lanes, y, at);
}

/// One block of every row and column.
///
/// # Safety
/// Every `w` has a block of codes `at` bytes on, and every `x` the BLOCK values of `block`.
#[inline]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn step<C: Unpack16, const S: u8, const R: usize, const N: usize>(
    w: [*const u8; R],
    at: usize,
    rows: &[Row<'_>; R],
    block: usize,
    group: usize,
    x: [*const f32; N],
    lanes: &mut Lanes<R, N>,
) {
    for r in 0..R {
        // SAFETY: the caller's promise.
        let weights = unsafe {
            match S {
                GROUP => C::weights16(w[r].add(at), _mm512_set1_ps(rows[r].scale(group))),
                FINE => {
                    let scales = rows[r].fine_scales::<C>(block);
                    let mut weights = C::codes16(w[r].add(at));
                    for k in 0..4 {
                        let scales = _mm512_loadu_ps(scales[k * QUARTER..].as_ptr());
                        weights[k] = _mm512_mul_ps(weights[k], scales);
                    }
                    weights
                }
                _ => C::codes16(w[r].add(at)),
            }
        };
        for k in 0..4 {
            for c in 0..N {
                // SAFETY: k * QUARTER + QUARTER <= BLOCK values.
                let x = unsafe { _mm512_loadu_ps(x[c].add(block * BLOCK + k * QUARTER)) };
                lanes[r][c][k % 2] = _mm512_fmadd_ps(weights[k], x, lanes[r][c][k % 2]);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
fn axpy<C: Unpack16, const S: u8, const R: usize>(rows: [Row<'_>; R], a: &[f32], y: &mut [f32]) {
    let mut groups = Groups::new(rows[0].group);
    for (block, y) in y.chunks_exact_mut(BLOCK).enumerate() {
        let group = if S == GROUP { groups.next() } else { 0 };
        // SAFETY: y has BLOCK values.
        let mut sums: [__m512; 4] =
            std::array::from_fn(|k| unsafe { _mm512_loadu_ps(y[k * QUARTER..].as_ptr()) });
        for r in 0..R {
            let padded;
            let codes = match rows[r].codes.get(block * C::BYTES..(block + 1) * C::BYTES) {
                Some(whole) => whole,
                None => {
                    padded = rows[r].padded::<C>(block);
                    &padded[..]
                }
            };
            // SAFETY: there is a block of codes.
            let codes = unsafe { C::codes16(codes.as_ptr()) };
            let factors = if S == FINE {
                let scales = rows[r].fine_scales::<C>(block);
                // SAFETY: there are BLOCK scales.
                std::array::from_fn(|k| unsafe {
                    let scales = _mm512_loadu_ps(scales[k * QUARTER..].as_ptr());
                    _mm512_mul_ps(_mm512_set1_ps(a[r]), scales)
                })
            } else {
                [_mm512_set1_ps(a[r] * rows[r].scale(group)); 4]
            };
            for k in 0..4 {
                sums[k] = _mm512_fmadd_ps(factors[k], codes[k], sums[k]);
            }
        }
        for k in 0..4 {
            // SAFETY: y has BLOCK values.
            unsafe { _mm512_storeu_ps(y[k * QUARTER..].as_mut_ptr(), sums[k]) };
        }
    }
}
