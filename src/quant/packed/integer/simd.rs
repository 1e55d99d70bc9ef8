//! Multiplies codes and rounded activations as integers on AVX2 and AVX-512 VNNI.

use std::arch::x86_64::*;

use super::super::simd::prefetch_rows;
use super::super::{GROUP, Groups, Row};
use super::{BLOCK, Integer, IntegerLoops, LANES, RoundedBlock, RoundedVector, round_block};
use crate::quant::register::{Lanes, Register, add_lanes};

/// AVX2 and FMA: the lanes are two registers, a block is two registers of bytes.
pub struct Avx2;

/// AVX-512 F and VNNI on top of [`Avx2`]: the lanes are one register, and so is a block of bytes.
pub struct Avx512;

/// IntegerRegister of codes as integers. A part of a block is the codes of [`Register::WIDTH`] lanes.
///
/// # Safety of its functions
/// The CPU has the instructions.
pub trait IntegerRegister: Register {
    /// The codes of a block.
    type Codes: Copy;

    /// Calls `f` where the instructions are enabled.
    unsafe fn run_integers<T>(f: impl FnOnce() -> T) -> T;

    /// Sums of four products each, of a part of the codes, which have their offset, and that of `x`: exact integers.
    unsafe fn products<C: Integer>(codes: Self::Codes, x: &RoundedBlock, part: usize) -> Self;
}

/// Codes that become bytes in integer registers as wide as `V`.
///
/// # Safety of its functions
/// The CPU has the instructions of `V`, and a block of codes at `p` is readable.
pub trait Bytes<V: IntegerRegister> {
    /// The codes of the block at `p` by place, with their offset: unsigned.
    unsafe fn bytes(p: *const u8) -> V::Codes;
}

impl IntegerRegister for __m256 {
    type Codes = [__m256i; 2];

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run_integers<T>(f: impl FnOnce() -> T) -> T {
        f()
    }

    /// `maddubs` adds two products of an unsigned and a signed byte in 16 bits, with saturation. Fields of two or four bits stay far
    /// below it. Of int8 weights it takes the magnitude, and the sign goes to the activation: 2 * 128 * 127 fits.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn products<C: Integer>(codes: [__m256i; 2], x: &RoundedBlock, part: usize) -> __m256 {
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

impl IntegerRegister for __m512 {
    type Codes = __m512i;

    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma,f16c")]
    unsafe fn run_integers<T>(f: impl FnOnce() -> T) -> T {
        f()
    }

    /// `vpdpbusd` adds four products of an unsigned and a signed byte in 32 bits, without saturation.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma,f16c")]
    unsafe fn products<C: Integer>(codes: __m512i, x: &RoundedBlock, _part: usize) -> __m512 {
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

impl<C: Integer, const S: u8> IntegerLoops<C, S> for Avx2 {
    const COLS: usize = 2;

    fn round(x: &[f32; BLOCK]) -> (RoundedBlock, f32) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX2.
        unsafe { __m256::run(|| round_block::<C>(x)) }
    }

    fn dot(rows: &[Row<'_>], x: &[RoundedVector<'_>], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX2.
        unsafe {
            match (rows.len(), x.len()) {
                (2, 1) => dot::<C, __m256, S, 2, 1>(rows, x, y, at),
                (2, _) => dot::<C, __m256, S, 2, 2>(rows, x, y, at),
                (_, 1) => dot::<C, __m256, S, 1, 1>(rows, x, y, at),
                _ => dot::<C, __m256, S, 1, 2>(rows, x, y, at),
            }
        }
    }
}

impl<C: Integer, const S: u8> IntegerLoops<C, S> for Avx512 {
    const COLS: usize = 4;

    fn round(x: &[f32; BLOCK]) -> (RoundedBlock, f32) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX-512, which has AVX2.
        unsafe { __m256::run(|| round_block::<C>(x)) }
    }

    fn dot(rows: &[Row<'_>], x: &[RoundedVector<'_>], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX-512 on a CPU with VNNI.
        unsafe {
            match (rows.len(), x.len()) {
                (2, 1) => dot::<C, __m512, S, 2, 1>(rows, x, y, at),
                (2, 2) => dot::<C, __m512, S, 2, 2>(rows, x, y, at),
                (2, 3) => dot::<C, __m512, S, 2, 3>(rows, x, y, at),
                (2, _) => dot::<C, __m512, S, 2, 4>(rows, x, y, at),
                (_, 1) => dot::<C, __m512, S, 1, 1>(rows, x, y, at),
                (_, 2) => dot::<C, __m512, S, 1, 2>(rows, x, y, at),
                (_, 3) => dot::<C, __m512, S, 1, 3>(rows, x, y, at),
                _ => dot::<C, __m512, S, 1, 4>(rows, x, y, at),
            }
        }
    }
}

/// y[c][at + r] = rows[r] . x[c], without the scale of a row, for R rows and N vectors.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
unsafe fn dot<
    C: Integer + Bytes<V>,
    V: IntegerRegister,
    const S: u8,
    const R: usize,
    const N: usize,
>(
    rows: &[Row<'_>],
    x: &[RoundedVector<'_>],
    y: &mut [&mut [f32]],
    at: usize,
) {
    let rows = rows.first_chunk::<R>().expect("R rows");
    let x = x.first_chunk::<N>().expect("N vectors");
    let whole = rows[0].codes.len() / C::BYTES;
    let blocks = x[0].blocks.len();
    // SAFETY: the caller's promise; every row has `whole` blocks of codes and a padded one.
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
    unsafe { V::run_integers(sum) }
}

/// One block of every row and vector.
///
/// # Safety
/// The CPU has the instructions of `V`, and every `w` has a block of codes `at` bytes on.
#[inline(always)]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
unsafe fn step<
    C: Integer + Bytes<V>,
    V: IntegerRegister,
    const S: u8,
    const R: usize,
    const N: usize,
>(
    w: [*const u8; R],
    at: usize,
    rows: &[Row<'_>; R],
    block: usize,
    group: usize,
    x: &[RoundedVector<'_>; N],
    lanes: &mut Lanes<V, R, N>,
) {
    for r in 0..R {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = <C as Bytes<V>>::bytes(w[r].add(at));
            for c in 0..N {
                let mut factor = x[c].scales[block];
                if S == GROUP {
                    factor *= rows[r].scale::<S>(group);
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
