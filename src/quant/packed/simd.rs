//! Multiplies packed codes on AVX2 and AVX-512.

use std::arch::x86_64::*;

use super::{AXPY_ROWS, BLOCK, Blocks, Code, FINE, GROUP, Groups, QUARTER, Row};
use crate::quant::LANES;
use crate::quant::register::{AHEAD, Lanes, Register, add_lanes, prefetch};

/// AVX2, FMA and F16C: the 32 lanes are four registers, a block is two parts of four.
pub struct Avx2;

/// AVX-512 F on top of [`Avx2`]: the 32 lanes are two registers, a block is one part of four.
pub struct Avx512;

/// Codes that become f32 in registers `V`. A block is unpacked in parts: part h is the registers k below 4 with positions
/// 16 k + h * WIDTH and on.
///
/// # Safety of its functions
/// The CPU has the instructions of `V`, and `BYTES` bytes at `p` are readable until the last use of the prepared block.
pub trait Unpack<V: Register>: Code {
    /// What all parts of a block are made of.
    type Block: Copy;

    /// Prepares the block at `p`.
    unsafe fn block(p: *const u8) -> Self::Block;

    /// The codes of a part.
    unsafe fn codes(block: Self::Block, part: usize) -> [V; 4];

    /// The codes of a part, times `scale`.
    #[inline(always)]
    unsafe fn weights(block: Self::Block, part: usize, scale: V) -> [V; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b, c, d] = Self::codes(block, part);
            [
                V::mul(a, scale),
                V::mul(b, scale),
                V::mul(c, scale),
                V::mul(d, scale),
            ]
        }
    }
}

impl<C: Unpack<__m256>, const S: u8> Blocks<C, S> for Avx2 {
    const COLS: usize = 2;

    // Four accumulators a row and column, and the codes of half a block beside them. Fields take six constants more.
    fn rows(cols: usize) -> usize {
        if cols == 1 && !C::INTERLEAVED { 2 } else { 1 }
    }

    fn dot(rows: &[Row<'_>], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX2.
        unsafe {
            match (rows, y.len()) {
                (&[a, b], _) => dot::<C, __m256, S, 2, 1>([a, b], x, y, at),
                (_, 1) => dot::<C, __m256, S, 1, 1>([rows[0]], x, y, at),
                _ => dot::<C, __m256, S, 1, 2>([rows[0]], x, y, at),
            }
        }
    }

    fn axpy(rows: &[Row<'_>], a: &[f32], y: &mut [f32]) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX2.
        unsafe { axpy::<C, __m256, S>(rows, a, y) }
    }
}

impl<C: Unpack<__m512>, const S: u8> Blocks<C, S> for Avx512 {
    const COLS: usize = 4;

    // Two accumulators a row and column: four by two or two by four are sixteen of the thirty-two registers.
    fn rows(cols: usize) -> usize {
        if cols <= 2 { 4 } else { 2 }
    }

    fn dot(rows: &[Row<'_>], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX-512.
        unsafe {
            match (rows, y.len()) {
                (&[a, b, c, d], 1) => dot::<C, __m512, S, 4, 1>([a, b, c, d], x, y, at),
                (&[a, b, c, d], _) => dot::<C, __m512, S, 4, 2>([a, b, c, d], x, y, at),
                (&[a, b], 3) => dot::<C, __m512, S, 2, 3>([a, b], x, y, at),
                (&[a, b], _) => dot::<C, __m512, S, 2, 4>([a, b], x, y, at),
                (_, 1) => dot::<C, __m512, S, 1, 1>([rows[0]], x, y, at),
                (_, 2) => dot::<C, __m512, S, 1, 2>([rows[0]], x, y, at),
                (_, 3) => dot::<C, __m512, S, 1, 3>([rows[0]], x, y, at),
                _ => dot::<C, __m512, S, 1, 4>([rows[0]], x, y, at),
            }
        }
    }

    fn axpy(rows: &[Row<'_>], a: &[f32], y: &mut [f32]) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX-512.
        unsafe { axpy::<C, __m512, S>(rows, a, y) }
    }
}

/// y[c][at + r] = rows[r] . x[c], for R rows and N columns.
///
/// # Safety
/// The CPU has the instructions of `V`.
unsafe fn dot<C: Unpack<V>, V: Register, const S: u8, const R: usize, const N: usize>(
    rows: [Row<'_>; R],
    x: &[f32],
    y: &mut [&mut [f32]],
    at: usize,
) {
    let cols = x.len() / N;
    let x: [&[f32]; N] = std::array::from_fn(|c| &x[c * cols..(c + 1) * cols]);
    let x = x.map(<[f32]>::as_ptr);
    // SAFETY: the caller's promise; `each_block` gives a block of every row, and every x[c] has BLOCK values for it.
    let sum = || unsafe {
        let mut lanes = [[[V::splat(0.0); 4]; N]; R];
        each_block::<C, R>(&rows, cols / BLOCK, |block, group, w| {
            step::<C, V, S, R, N>(w, &rows, block, group, x, &mut lanes);
        });
        add_lanes(lanes, LANES / V::WIDTH, y, at);
    };
    // SAFETY: the caller's promise.
    unsafe { V::run(sum) }
}

/// Calls `step` for every block of the rows, in order, with the block's number, its group, and where the codes of each row are: a last
/// block that is incomplete is padded with zeros. Prefetches the codes on the way.
#[inline(always)]
pub(super) fn each_block<C: Code, const R: usize>(
    rows: &[Row<'_>; R],
    blocks: usize,
    mut step: impl FnMut(usize, usize, [*const u8; R]),
) {
    let codes = rows.map(|row| row.codes.as_ptr());
    let mut groups = Groups::new(rows[0].group);
    let whole = rows[0].codes.len() / C::BYTES;
    let padded;
    let mut tail = codes;
    if whole < blocks {
        padded = rows.map(|row| row.padded::<C>(whole));
        tail = padded.each_ref().map(|padded| padded.as_ptr());
    }
    // One call, so that it is inlined.
    for block in 0..blocks {
        prefetch_rows::<C, R>(rows, block);
        let (w, at) = match block < whole {
            true => (codes, block * C::BYTES),
            false => (tail, 0),
        };
        step(block, groups.next(), w.map(|w| w.wrapping_add(at)));
    }
}

/// Prefetches what is ahead of a block of each row. Rows are short, so past the end of a row that is the row which takes
/// its place next: R further on, not the neighbour that is being read already.
#[inline(always)]
fn prefetch_rows<C: Code, const R: usize>(rows: &[Row<'_>; R], block: usize) {
    for row in rows {
        let (at, len) = (block * C::BYTES, row.codes.len());
        let next = if at + AHEAD < len { 0 } else { (R - 1) * len };
        prefetch(row.codes.as_ptr().wrapping_add(at + next), C::BYTES);
    }
}

/// One block of every row and column.
///
/// # Safety
/// The CPU has the instructions of `V`, every `w` has a block of codes, and every `x` the BLOCK values of `block`.
#[inline(always)]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
unsafe fn step<C: Unpack<V>, V: Register, const S: u8, const R: usize, const N: usize>(
    w: [*const u8; R],
    rows: &[Row<'_>; R],
    block: usize,
    group: usize,
    x: [*const f32; N],
    lanes: &mut Lanes<V, R, N>,
) {
    let parts = QUARTER / V::WIDTH;
    // SAFETY: the caller's promise; `place` + WIDTH is at most BLOCK.
    unsafe {
        for r in 0..R {
            let fine = match S {
                FINE => Some(rows[r].fine_scales::<C>(block)),
                _ => None,
            };
            let codes = C::block(w[r]);
            for part in 0..parts {
                let place = |k: usize| k * QUARTER + part * V::WIDTH;
                let weights = match &fine {
                    Some(scales) => {
                        let mut weights = C::codes(codes, part);
                        for k in 0..4 {
                            weights[k] = V::mul(weights[k], V::load(scales[place(k)..].as_ptr()));
                        }
                        weights
                    }
                    None if S == GROUP => C::weights(codes, part, V::splat(rows[r].scale(group))),
                    None => C::codes(codes, part),
                };
                for k in 0..4 {
                    for c in 0..N {
                        let x = V::load(x[c].add(block * BLOCK + place(k)));
                        let lane = &mut lanes[r][c][parts * (k % 2) + part];
                        *lane = V::fma(weights[k], x, *lane);
                    }
                }
            }
        }
    }
}

/// y[p] += sum over r of a[r] * rows[r][p], r ascending, for 1 or [`AXPY_ROWS`] rows.
///
/// # Safety
/// The CPU has the instructions of `V`.
unsafe fn axpy<C: Unpack<V>, V: Register, const S: u8>(rows: &[Row<'_>], a: &[f32], y: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match *rows {
            [p, q, r, s] => V::run(|| axpy_rows::<C, V, S, AXPY_ROWS>([p, q, r, s], a, y)),
            _ => V::run(|| axpy_rows::<C, V, S, 1>([rows[0]], a, y)),
        }
    }
}

/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
unsafe fn axpy_rows<C: Unpack<V>, V: Register, const S: u8, const R: usize>(
    rows: [Row<'_>; R],
    a: &[f32],
    y: &mut [f32],
) {
    let mut groups = Groups::new(rows[0].group);
    for (block, y) in y.chunks_exact_mut(BLOCK).enumerate() {
        let group = if S == GROUP { groups.next() } else { 0 };
        for part in 0..QUARTER / V::WIDTH {
            let place = |k: usize| k * QUARTER + part * V::WIDTH;
            // SAFETY: the caller's promise; y, codes and scales are BLOCK values each.
            unsafe {
                let mut sums = [V::splat(0.0); 4];
                for k in 0..4 {
                    sums[k] = V::load(y[place(k)..].as_ptr());
                }
                for r in 0..R {
                    let padded;
                    let codes = match rows[r].codes.get(block * C::BYTES..(block + 1) * C::BYTES) {
                        Some(whole) => whole,
                        None => {
                            padded = rows[r].padded::<C>(block);
                            &padded[..]
                        }
                    };
                    let codes = C::codes(C::block(codes.as_ptr()), part);
                    let mut factors = [V::splat(a[r]); 4];
                    if S == FINE {
                        let scales = rows[r].fine_scales::<C>(block);
                        for k in 0..4 {
                            factors[k] = V::mul(factors[k], V::load(scales[place(k)..].as_ptr()));
                        }
                    } else {
                        factors = [V::splat(a[r] * rows[r].scale(group)); 4];
                    }
                    for k in 0..4 {
                        sums[k] = V::fma(factors[k], codes[k], sums[k]);
                    }
                }
                for k in 0..4 {
                    V::store(y[place(k)..].as_mut_ptr(), sums[k]);
                }
            }
        }
    }
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
