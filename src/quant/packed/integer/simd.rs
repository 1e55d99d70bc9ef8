//! Multiplies codes and rounded activations as integers on AVX2 and AVX-512 VNNI.

use std::arch::x86_64::*;

use super::super::simd::each_block;
use super::super::{GROUP, Row};
use super::{BLOCK, Block, Dot, Integer, LANES, Vector, round_block};
use crate::quant::register::{Lanes, Register, add_lanes};

/// AVX2 and FMA: the lanes are two registers, a block is two registers of bytes.
pub struct Avx2;

/// AVX-512 F and VNNI on top of [`Avx2`]: the lanes are one register, and so is a block of bytes.
pub struct Avx512;

/// Products of codes as integers. A part of a block is the codes of [`Register::WIDTH`] lanes.
///
/// # Safety of its functions
/// The CPU has the instructions.
pub trait Products: Register {
    /// The codes of a block.
    type Codes: Copy;

    /// Calls `f` where the instructions are enabled.
    unsafe fn run_integers<T>(f: impl FnOnce() -> T) -> T;

    /// Sums of four products each, of a part of the codes, which have their offset, and that of `x`: exact integers.
    unsafe fn products<C: Integer>(codes: Self::Codes, x: &Block, part: usize) -> Self;
}

/// Codes that become bytes in integer registers as wide as `V`.
///
/// # Safety of its functions
/// The CPU has the instructions of `V`, and a block of codes at `p` is readable.
pub trait Bytes<V: Products> {
    /// The codes of the block at `p` by place, with their offset: unsigned.
    unsafe fn bytes(p: *const u8) -> V::Codes;
}

impl Products for __m256 {
    type Codes = [__m256i; 2];

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run_integers<T>(f: impl FnOnce() -> T) -> T {
        f()
    }

    /// `maddubs` adds two products of an unsigned and a signed byte in 16 bits, with saturation. Fields of two or four bits stay far
    /// below it. Of int8 weights it takes the magnitude, and the sign goes to the activation: 2 * 128 * 127 fits.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn products<C: Integer>(codes: [__m256i; 2], x: &Block, part: usize) -> __m256 {
        let codes = codes[part];
        // SAFETY: a part has 32 codes and 8 corrections.
        let (x, correction) = unsafe {
            (
                _mm256_load_si256(x.codes.as_ptr().add(32 * part).cast()),
                _mm256_load_si256(x.corrections.as_ptr().add(8 * part).cast()),
            )
        };
        let ones = _mm256_set1_epi16(1);
        if C::OFFSET == 128 {
            let signed = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed));
            return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
        }
        let pairs = _mm256_maddubs_epi16(codes, x);
        let sums = _mm256_add_epi32(_mm256_madd_epi16(pairs, ones), correction);
        _mm256_cvtepi32_ps(sums)
    }
}

impl Products for __m512 {
    type Codes = __m512i;

    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma,f16c")]
    unsafe fn run_integers<T>(f: impl FnOnce() -> T) -> T {
        f()
    }

    /// `vpdpbusd` adds four products of an unsigned and a signed byte in 32 bits, without saturation.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma,f16c")]
    unsafe fn products<C: Integer>(codes: __m512i, x: &Block, _part: usize) -> __m512 {
        // SAFETY: a block has 64 codes and 16 corrections.
        let (x, correction) = unsafe {
            (
                _mm512_load_si512(x.codes.as_ptr().cast()),
                _mm512_load_si512(x.corrections.as_ptr().cast()),
            )
        };
        _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(correction, codes, x))
    }
}

impl<C: Integer, const S: u8> Dot<C, S> for Avx2 {
    const COLS: usize = 2;

    fn round(x: &[f32; BLOCK]) -> (Block, f32) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX2.
        unsafe { __m256::run(|| round_block::<C>(x)) }
    }

    fn dot(rows: &[Row<'_>], x: &[Vector<'_>], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX2.
        unsafe {
            match (rows, x) {
                (&[a, b], &[x]) => dot::<C, __m256, S, 2, 1>([a, b], [x], y, at),
                (&[a, b], _) => dot::<C, __m256, S, 2, 2>([a, b], [x[0], x[1]], y, at),
                (_, &[x]) => dot::<C, __m256, S, 1, 1>([rows[0]], [x], y, at),
                _ => dot::<C, __m256, S, 1, 2>([rows[0]], [x[0], x[1]], y, at),
            }
        }
    }
}

impl<C: Integer, const S: u8> Dot<C, S> for Avx512 {
    const COLS: usize = 4;

    fn round(x: &[f32; BLOCK]) -> (Block, f32) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX-512, which has AVX2.
        unsafe { __m256::run(|| round_block::<C>(x)) }
    }

    fn dot(rows: &[Row<'_>], x: &[Vector<'_>], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX-512 on a CPU with VNNI.
        unsafe {
            match (rows, x) {
                (&[a, b], &[p]) => dot::<C, __m512, S, 2, 1>([a, b], [p], y, at),
                (&[a, b], &[p, q]) => dot::<C, __m512, S, 2, 2>([a, b], [p, q], y, at),
                (&[a, b], &[p, q, s]) => dot::<C, __m512, S, 2, 3>([a, b], [p, q, s], y, at),
                (&[a, b], &[p, q, s, t]) => dot::<C, __m512, S, 2, 4>([a, b], [p, q, s, t], y, at),
                (_, &[p]) => dot::<C, __m512, S, 1, 1>([rows[0]], [p], y, at),
                (_, &[p, q]) => dot::<C, __m512, S, 1, 2>([rows[0]], [p, q], y, at),
                (_, &[p, q, s]) => dot::<C, __m512, S, 1, 3>([rows[0]], [p, q, s], y, at),
                _ => dot::<C, __m512, S, 1, 4>([rows[0]], [x[0], x[1], x[2], x[3]], y, at),
            }
        }
    }
}

/// y[c][at + r] = rows[r] . x[c], without the scale of a row, for R rows and N vectors.
///
/// # Safety
/// The CPU has the instructions of `V`.
unsafe fn dot<C: Integer + Bytes<V>, V: Products, const S: u8, const R: usize, const N: usize>(
    rows: [Row<'_>; R],
    x: [Vector<'_>; N],
    y: &mut [&mut [f32]],
    at: usize,
) {
    // SAFETY: the caller's promise; `each_block` gives a block of every row.
    let sum = || unsafe {
        let mut lanes = [[[V::splat(0.0); 4]; N]; R];
        each_block::<C, R>(&rows, x[0].blocks.len(), |block, group, w| {
            step::<C, V, S, R, N>(w, &rows, block, group, &x, &mut lanes);
        });
        add_lanes(lanes, LANES / V::WIDTH, y, at);
    };
    // SAFETY: the caller's promise.
    unsafe { V::run_integers(sum) }
}

/// One block of every row and vector.
///
/// # Safety
/// The CPU has the instructions of `V`, and every `w` has a block of codes.
#[inline(always)]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
unsafe fn step<C: Integer + Bytes<V>, V: Products, const S: u8, const R: usize, const N: usize>(
    w: [*const u8; R],
    rows: &[Row<'_>; R],
    block: usize,
    group: usize,
    x: &[Vector<'_>; N],
    lanes: &mut Lanes<V, R, N>,
) {
    for r in 0..R {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = <C as Bytes<V>>::bytes(w[r]);
            for c in 0..N {
                let mut factor = x[c].scales[block];
                if S == GROUP {
                    factor *= rows[r].scale(group);
                }
                for part in 0..LANES / V::WIDTH {
                    let sums = V::products::<C>(codes, &x[c].blocks[block], part);
                    let lane = &mut lanes[r][c][part];
                    *lane = V::fma(sums, V::splat(factor), *lane);
                }
            }
        }
    }
}
