//! Multiplies packed codes on AVX2 and AVX-512.

use std::arch::x86_64::*;

use super::{AXPY_ROWS, BLOCK, Code, FINE, Groups, HALF, PackedLoops, QUARTER, Row, is_grouped};
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

impl<C: Unpack<__m256>, const S: u8> PackedLoops<C, S> for Avx2 {
    const COLS: usize = 2;

    // Four accumulators a row and column, and the codes of half a block beside them. Fields take six constants more.
    fn rows(cols: usize) -> usize {
        if cols == 1 && !C::INTERLEAVED { 2 } else { 1 }
    }

    fn dot(rows: &[Row<'_>], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX2.
        unsafe {
            match (rows.len(), y.len()) {
                (2, _) => dot::<C, __m256, S, 2, 1>(rows, x, y, at),
                (_, 1) => dot::<C, __m256, S, 1, 1>(rows, x, y, at),
                _ => dot::<C, __m256, S, 1, 2>(rows, x, y, at),
            }
        }
    }

    fn axpy(rows: &[Row<'_>], a: &[f32], y: &mut [f32]) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX2.
        unsafe { axpy::<C, __m256, S>(rows, a, y) }
    }
}

impl<C: Unpack<__m512>, const S: u8> PackedLoops<C, S> for Avx512 {
    const COLS: usize = 4;

    // Two accumulators a row and column: four by two or two by four are sixteen of the thirty-two registers.
    fn rows(cols: usize) -> usize {
        if cols <= 2 { 4 } else { 2 }
    }

    fn dot(rows: &[Row<'_>], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX-512.
        unsafe {
            match (rows.len(), y.len()) {
                (4, 1) => dot::<C, __m512, S, 4, 1>(rows, x, y, at),
                (4, _) => dot::<C, __m512, S, 4, 2>(rows, x, y, at),
                (2, 3) => dot::<C, __m512, S, 2, 3>(rows, x, y, at),
                (2, _) => dot::<C, __m512, S, 2, 4>(rows, x, y, at),
                (_, 1) => dot::<C, __m512, S, 1, 1>(rows, x, y, at),
                (_, 2) => dot::<C, __m512, S, 1, 2>(rows, x, y, at),
                (_, 3) => dot::<C, __m512, S, 1, 3>(rows, x, y, at),
                _ => dot::<C, __m512, S, 1, 4>(rows, x, y, at),
            }
        }
    }

    fn axpy(rows: &[Row<'_>], a: &[f32], y: &mut [f32]) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX-512.
        unsafe { axpy::<C, __m512, S>(rows, a, y) }
    }
}

/// y[c][at + r] = rows[r] . x[c], for R rows and N columns. Rows stay where they are: a copy of a slice that was just written waits for the
/// writes, which takes longer than a block.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
unsafe fn dot<C: Unpack<V>, V: Register, const S: u8, const R: usize, const N: usize>(
    rows: &[Row<'_>],
    x: &[f32],
    y: &mut [&mut [f32]],
    at: usize,
) {
    let rows = rows.first_chunk::<R>().expect("R rows");
    let cols = x.len() / N;
    let x: [&[f32]; N] = std::array::from_fn(|c| &x[c * cols..(c + 1) * cols]);
    let x = x.map(<[f32]>::as_ptr);
    let whole = rows[0].codes.len() / C::BYTES;
    let blocks = cols / BLOCK;
    // SAFETY: the caller's promise; every row has `whole` blocks of codes and a padded one, and every x[c] has BLOCK values for each.
    let sum = || unsafe {
        let mut lanes = [[[V::splat(0.0); 4]; N]; R];
        let mut groups = Groups::new(rows[0].group);
        let codes = rows.each_ref().map(|row| row.codes.as_ptr());
        for block in 0..whole {
            prefetch_rows::<C, R>(rows, block);
            let (at, group) = (block * C::BYTES, groups.next());
            step::<C, V, S, R, N>(codes, at, rows, block, group, x, &mut lanes);
        }
        if whole < blocks {
            let padded = rows.each_ref().map(|row| row.padded::<C>(whole));
            let codes = padded.each_ref().map(|codes| codes.as_ptr());
            step::<C, V, S, R, N>(codes, 0, rows, whole, groups.next(), x, &mut lanes);
        }
        add_lanes(lanes, LANES / V::WIDTH, y, at);
    };
    // SAFETY: the caller's promise.
    unsafe { V::run(sum) }
}

/// Prefetches what is ahead of a block of each row. Rows are short, so past the end of a row that is the row which takes
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
/// The CPU has the instructions of `V`, every `w` has a block of codes `at` bytes on, and every `x` the BLOCK values of `block`.
#[inline(always)]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
unsafe fn step<C: Unpack<V>, V: Register, const S: u8, const R: usize, const N: usize>(
    w: [*const u8; R],
    at: usize,
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
            let codes = C::block(w[r].add(at));
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
                    None if is_grouped(S) => {
                        C::weights(codes, part, V::splat(rows[r].scale::<S>(group)))
                    }
                    None if S == HALF => {
                        C::weights(codes, part, half_scales(&rows[r], block, part))
                    }
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

/// The scales of the positions of a part, the same for every k: columns of interleaved codes are in the first half of a block where i is
/// below 8.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
unsafe fn half_scales<V: Register>(row: &Row<'_>, block: usize, part: usize) -> V {
    let [first, second] = row.half_scales(block);
    // SAFETY: the caller's promise.
    unsafe { V::halves(first, second, part) }
}

/// y[p] += sum over r of a[r] * rows[r][p], r ascending, for 1 or [`AXPY_ROWS`] rows.
///
/// # Safety
/// The CPU has the instructions of `V`.
unsafe fn axpy<C: Unpack<V>, V: Register, const S: u8>(rows: &[Row<'_>], a: &[f32], y: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match rows.first_chunk::<AXPY_ROWS>() {
            Some(rows) => V::run(|| axpy_rows::<C, V, S, AXPY_ROWS>(rows, a, y)),
            None => V::run(|| axpy_rows::<C, V, S, 1>(rows.first_chunk().expect("a row"), a, y)),
        }
    }
}

/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
unsafe fn axpy_rows<C: Unpack<V>, V: Register, const S: u8, const R: usize>(
    rows: &[Row<'_>; R],
    a: &[f32],
    y: &mut [f32],
) {
    let mut groups = Groups::new(rows[0].group);
    for (block, y) in y.chunks_exact_mut(BLOCK).enumerate() {
        let group = if is_grouped(S) { groups.next() } else { 0 };
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
                    } else if S == HALF {
                        let scales = half_scales(&rows[r], block, part);
                        factors = [V::mul(V::splat(a[r]), scales); 4];
                    } else {
                        factors = [V::splat(a[r] * rows[r].scale::<S>(group)); 4];
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
