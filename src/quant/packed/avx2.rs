//! The inner loops on AVX2, FMA and F16C: the 32 lanes are four registers, a block is two halves of four.

use std::arch::x86_64::*;

use super::{AXPY_ROWS, BLOCK, Blocks, Code, FINE, GROUP, Groups, QUARTER, Row};
pub(super) use crate::quant::float::avx2::sum8;
use crate::quant::float::avx2::{AHEAD, prefetch};

/// AVX2, FMA and F16C.
pub struct Path;

const REGISTER: usize = 8;

/// Codes that AVX2 unpacks half a block at a time.
pub trait Unpack8: Code {
    /// What both halves of a block are made of.
    type Block: Copy;

    /// Prepares the block at `p`.
    ///
    /// # Safety
    /// `BYTES` bytes at `p` are readable, until the last use of the result.
    unsafe fn block8(p: *const u8) -> Self::Block;

    /// Register k holds positions 16 k + 8 `half` to 16 k + 8 `half` + 7 of the block.
    ///
    /// # Safety
    /// As for [`Unpack8::block8`].
    unsafe fn codes8(block: Self::Block, half: usize) -> [__m256; 4];
}

/// Fields of `BITS` bits, k-th of each word, less `OFFSET`. The field is put into the mantissa of a power of two whose
/// last place is the field's, which is then subtracted together with the offset: exact. One shift brings the upper two fields to
/// where the lower two were, so that the constants of two fields do for all and stay in registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fields<const BITS: i32, const OFFSET: i32>(words: __m256i) -> [__m256; 4] {
    let upper = _mm256_srl_epi32(words, _mm_cvtsi32_si128(2 * BITS));
    std::array::from_fn(|k| {
        let words = if k < 2 { words } else { upper };
        let shift = BITS * (k % 2) as i32;
        let power = (127 + 23 - shift) << 23;
        let mask = _mm256_set1_epi32(((1 << BITS) - 1) << shift);
        let biased = _mm256_or_si256(_mm256_and_si256(words, mask), _mm256_set1_epi32(power));
        let bias = f32::from_bits(power as u32) + OFFSET as f32;
        _mm256_sub_ps(_mm256_castsi256_ps(biased), _mm256_set1_ps(bias))
    })
}

impl<C: Unpack8, const S: u8> Blocks<C, S> for Path {
    const COLS: usize = 2;

    // Four accumulators a row and column, and the codes of half a block beside them. Fields take six constants more.
    fn rows(cols: usize) -> usize {
        if cols == 1 && !C::INTERLEAVED { 2 } else { 1 }
    }

    fn dot(rows: &[Row<'_>], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: this path is chosen only on a CPU with these features (`Isa::available`).
        unsafe {
            match (rows, y.len()) {
                (&[a, b], _) => dot::<C, S, 2, 1>([a, b], x, y, at),
                (_, 1) => dot::<C, S, 1, 1>([rows[0]], x, y, at),
                _ => dot::<C, S, 1, 2>([rows[0]], x, y, at),
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

/// The lanes of R rows times N columns: register 2 (k % 2) + half.
type Lanes<const R: usize, const N: usize> = [[[__m256; 4]; N]; R];

#[target_feature(enable = "avx2,fma,f16c")]
fn dot<C: Unpack8, const S: u8, const R: usize, const N: usize>(
    rows: [Row<'_>; R],
    x: &[f32],
    y: &mut [&mut [f32]],
    at: usize,
) {
    let cols = x.len() / N;
    // Closures end here: where features are enabled by function, one inside the loop would be called, not inlined.
    let x: [*const f32; N] = std::array::from_fn(|c| x[c * cols..(c + 1) * cols].as_ptr());
    let codes = rows.map(|row| row.codes.as_ptr());
    let mut lanes: Lanes<R, N> = [[[_mm256_setzero_ps(); 4]; N]; R];
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
    for (r, lanes) in lanes.iter().enumerate() {
        for (y, lanes) in y.iter_mut().zip(lanes) {
            let low = _mm256_add_ps(lanes[0], lanes[2]);
            let high = _mm256_add_ps(lanes[1], lanes[3]);
            y[at + r] = sum8(_mm256_add_ps(low, high));
        }
    }
}

/// Asks for what is ahead of a block of each row. Rows are short, so past the end of a row that is the row which takes
/// its place next: R further on, not the neighbour that is being read already.
#[inline(always)]
pub(super) fn prefetch_rows<C: Code, const R: usize>(rows: &[Row<'_>; R], block: usize) {
    for row in rows {
        let (at, len) = (block * C::BYTES, row.codes.len());
        let next = if at + AHEAD < len { 0 } else { (R - 1) * len };
        prefetch(row.codes.as_ptr().wrapping_add(at + next), C::BYTES);
    }
}

/// One block of every row and column.
///
/// # Safety
/// Every `w` has a block of codes `at` bytes on, and every `x` the BLOCK values of `block`.
#[inline]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step<C: Unpack8, const S: u8, const R: usize, const N: usize>(
    w: [*const u8; R],
    at: usize,
    rows: &[Row<'_>; R],
    block: usize,
    group: usize,
    x: [*const f32; N],
    lanes: &mut Lanes<R, N>,
) {
    for r in 0..R {
        let fine = match S {
            FINE => Some(rows[r].fine_scales::<C>(block)),
            _ => None,
        };
        // SAFETY: the caller's promise.
        let codes = unsafe { C::block8(w[r].add(at)) };
        for half in 0..2 {
            // SAFETY: the caller's promise.
            let mut weights = unsafe { C::codes8(codes, half) };
            for k in 0..4 {
                let place = k * QUARTER + half * REGISTER;
                match &fine {
                    Some(scales) => {
                        // SAFETY: `place` + REGISTER <= BLOCK scales.
                        let scales = unsafe { _mm256_loadu_ps(scales[place..].as_ptr()) };
                        weights[k] = _mm256_mul_ps(weights[k], scales);
                    }
                    None if S == GROUP => {
                        let scale = _mm256_set1_ps(rows[r].scale(group));
                        weights[k] = _mm256_mul_ps(weights[k], scale);
                    }
                    None => {}
                }
                for c in 0..N {
                    // SAFETY: `place` + REGISTER <= BLOCK values.
                    let x = unsafe { _mm256_loadu_ps(x[c].add(block * BLOCK + place)) };
                    let lane = &mut lanes[r][c][2 * (k % 2) + half];
                    *lane = _mm256_fmadd_ps(weights[k], x, *lane);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
fn axpy<C: Unpack8, const S: u8, const R: usize>(rows: [Row<'_>; R], a: &[f32], y: &mut [f32]) {
    let mut groups = Groups::new(rows[0].group);
    for (block, y) in y.chunks_exact_mut(BLOCK).enumerate() {
        let group = if S == GROUP { groups.next() } else { 0 };
        for half in 0..2 {
            let place = |k: usize| k * QUARTER + half * REGISTER;
            // SAFETY: y has BLOCK values.
            let mut sums: [__m256; 4] =
                std::array::from_fn(|k| unsafe { _mm256_loadu_ps(y[place(k)..].as_ptr()) });
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
                let codes = unsafe { C::codes8(C::block8(codes.as_ptr()), half) };
                let factors = if S == FINE {
                    let scales = rows[r].fine_scales::<C>(block);
                    // SAFETY: there are BLOCK scales.
                    std::array::from_fn(|k| unsafe {
                        let scales = _mm256_loadu_ps(scales[place(k)..].as_ptr());
                        _mm256_mul_ps(_mm256_set1_ps(a[r]), scales)
                    })
                } else {
                    [_mm256_set1_ps(a[r] * rows[r].scale(group)); 4]
                };
                for k in 0..4 {
                    sums[k] = _mm256_fmadd_ps(factors[k], codes[k], sums[k]);
                }
            }
            for k in 0..4 {
                // SAFETY: y has BLOCK values.
                unsafe { _mm256_storeu_ps(y[place(k)..].as_mut_ptr(), sums[k]) };
            }
        }
    }
}
