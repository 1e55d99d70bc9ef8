//! The integer products on AVX2: the lanes are two registers, a block is two registers of bytes.
//!
//! `maddubs` adds two products of an unsigned and a signed byte in 16 bits, with saturation. Fields of two or four bits stay far
//! below it. Of int8 weights it takes the magnitude, and the sign goes to the activation: 2 * 128 * 127 fits.

use std::arch::x86_64::*;

use super::super::avx2::{prefetch_rows, sum8};
use super::super::{BLOCK, GROUP, Groups, Row};
use super::{Block, Dot, Integer, Vector, round_block};

/// AVX2 and FMA.
pub struct Path;

/// Codes that AVX2 unpacks to bytes.
pub trait Bytes32 {
    /// The codes of the block at `p` by place, with their offset: unsigned.
    ///
    /// # Safety
    /// A block of codes at `p` is readable.
    unsafe fn bytes32(p: *const u8) -> [__m256i; 2];
}

impl<C: Integer, const S: u8> Dot<C, S> for Path {
    const COLS: usize = 2;

    fn round(x: &[f32; BLOCK]) -> (Block, f32) {
        // SAFETY: this path is chosen only on a CPU with these features.
        unsafe { round::<C>(x) }
    }

    fn dot(rows: &[Row<'_>], x: &[Vector<'_>], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: this path is chosen only on a CPU with these features (`Isa::available`).
        unsafe {
            match (rows, x) {
                (&[a, b], &[x]) => dot::<C, S, 2, 1>([a, b], [x], y, at),
                (&[a, b], _) => dot::<C, S, 2, 2>([a, b], [x[0], x[1]], y, at),
                (_, &[x]) => dot::<C, S, 1, 1>([rows[0]], [x], y, at),
                _ => dot::<C, S, 1, 2>([rows[0]], [x[0], x[1]], y, at),
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn round<C: Integer>(x: &[f32; BLOCK]) -> (Block, f32) {
    round_block::<C>(x)
}

/// Eight sums of four products each, of codes with their offset and rounded activations.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn products<C: Integer>(codes: __m256i, x: __m256i, correction: __m256i) -> __m256i {
    let ones = _mm256_set1_epi16(1);
    if C::OFFSET == 128 {
        let signed = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed));
        return _mm256_madd_epi16(pairs, ones);
    }
    let pairs = _mm256_maddubs_epi16(codes, x);
    _mm256_add_epi32(_mm256_madd_epi16(pairs, ones), correction)
}

/// The lanes of R rows times N vectors.
type Lanes<const R: usize, const N: usize> = [[[__m256; 2]; N]; R];

#[target_feature(enable = "avx2,fma,f16c")]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
fn dot<C: Integer, const S: u8, const R: usize, const N: usize>(
    rows: [Row<'_>; R],
    x: [Vector<'_>; N],
    y: &mut [&mut [f32]],
    at: usize,
) {
    let mut lanes: Lanes<R, N> = [[[_mm256_setzero_ps(); 2]; N]; R];
    let mut groups = Groups::new(rows[0].group);
    let whole = rows[0].codes.len() / C::BYTES;
    let codes = rows.map(|row| row.codes.as_ptr());
    let padded;
    let mut tail = codes;
    let blocks = x[0].blocks.len();
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
        // SAFETY: there is a block at `w`, whole or padded.
        unsafe { step::<C, S, R, N>(w, at, &rows, block, group, &x, &mut lanes) }
    }
    for r in 0..R {
        for c in 0..N {
            y[c][at + r] = sum8(_mm256_add_ps(lanes[r][c][0], lanes[r][c][1]));
        }
    }
}

/// One block of every row and vector.
///
/// # Safety
/// Every `w` has a block of codes `at` bytes on.
#[inline]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step<C: Integer, const S: u8, const R: usize, const N: usize>(
    w: [*const u8; R],
    at: usize,
    rows: &[Row<'_>; R],
    block: usize,
    group: usize,
    x: &[Vector<'_>; N],
    lanes: &mut Lanes<R, N>,
) {
    for r in 0..R {
        // SAFETY: the caller's promise.
        let codes = unsafe { C::bytes32(w[r].add(at)) };
        for c in 0..N {
            let rounded = &x[c].blocks[block];
            let mut factor = x[c].scales[block];
            if S == GROUP {
                factor *= rows[r].scale(group);
            }
            for half in 0..2 {
                // SAFETY: a block has 64 codes and 16 corrections.
                let sums = unsafe {
                    let x = _mm256_load_si256(rounded.codes.as_ptr().add(32 * half).cast());
                    let correction = rounded.corrections.as_ptr().add(8 * half);
                    products::<C>(codes[half], x, _mm256_load_si256(correction.cast()))
                };
                let lane = &mut lanes[r][c][half];
                let sums = _mm256_cvtepi32_ps(sums);
                *lane = _mm256_fmadd_ps(sums, _mm256_set1_ps(factor), *lane);
            }
        }
    }
}
