//! The integer products on AVX-512 VNNI: the lanes are one register, and so is a block of bytes. `vpdpbusd` adds four products
//! of an unsigned and a signed byte in 32 bits, without saturation.

use std::arch::x86_64::*;

use super::super::avx2::{prefetch_rows, sum8};
use super::super::{BLOCK, GROUP, Groups, Row};
use super::{Block, Dot, Integer, Vector, avx2};

/// AVX-512 F and VNNI, on top of AVX2 and FMA.
pub struct Path;

/// Codes that AVX-512 unpacks to bytes.
pub trait Bytes64 {
    /// The codes of the block at `p` by place, with their offset: unsigned.
    ///
    /// # Safety
    /// A block of codes at `p` is readable.
    unsafe fn bytes64(p: *const u8) -> __m512i;
}

impl<C: Integer, const S: u8> Dot<C, S> for Path {
    const COLS: usize = 4;

    fn round(x: &[f32; BLOCK]) -> (Block, f32) {
        // SAFETY: this path is chosen only on a CPU with these features.
        unsafe { avx2::round::<C>(x) }
    }

    fn dot(rows: &[Row<'_>], x: &[Vector<'_>], y: &mut [&mut [f32]], at: usize) {
        // SAFETY: this path is chosen only on a CPU with these features (`kernel`).
        unsafe {
            match (rows, x) {
                (&[a, b], &[p]) => dot::<C, S, 2, 1>([a, b], [p], y, at),
                (&[a, b], &[p, q]) => dot::<C, S, 2, 2>([a, b], [p, q], y, at),
                (&[a, b], &[p, q, s]) => dot::<C, S, 2, 3>([a, b], [p, q, s], y, at),
                (&[a, b], &[p, q, s, t]) => dot::<C, S, 2, 4>([a, b], [p, q, s, t], y, at),
                (_, &[p]) => dot::<C, S, 1, 1>([rows[0]], [p], y, at),
                (_, &[p, q]) => dot::<C, S, 1, 2>([rows[0]], [p, q], y, at),
                (_, &[p, q, s]) => dot::<C, S, 1, 3>([rows[0]], [p, q, s], y, at),
                _ => dot::<C, S, 1, 4>([rows[0]], [x[0], x[1], x[2], x[3]], y, at),
            }
        }
    }
}

/// The lanes of R rows times N vectors.
type Lanes<const R: usize, const N: usize> = [[__m512; N]; R];

#[target_feature(enable = "avx512f,avx512vnni,avx2,fma,f16c")]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
fn dot<C: Integer, const S: u8, const R: usize, const N: usize>(
    rows: [Row<'_>; R],
    x: [Vector<'_>; N],
    y: &mut [&mut [f32]],
    at: usize,
) {
    let mut lanes: Lanes<R, N> = [[_mm512_setzero_ps(); N]; R];
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
            let low = _mm512_castps512_ps256(lanes[r][c]);
            let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(lanes[r][c]));
            y[c][at + r] = sum8(_mm256_add_ps(low, _mm256_castpd_ps(high)));
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
#[target_feature(enable = "avx512f,avx512vnni,avx2,fma,f16c")]
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
        let codes = unsafe { C::bytes64(w[r].add(at)) };
        for c in 0..N {
            let rounded = &x[c].blocks[block];
            let mut factor = x[c].scales[block];
            if S == GROUP {
                factor *= rows[r].scale(group);
            }
            // SAFETY: a block has 64 codes and 16 corrections.
            let sums = unsafe {
                let x = _mm512_load_si512(rounded.codes.as_ptr().cast());
                let correction = _mm512_load_si512(rounded.corrections.as_ptr().cast());
                _mm512_dpbusd_epi32(correction, codes, x)
            };
            let sums = _mm512_cvtepi32_ps(sums);
            lanes[r][c] = _mm512_fmadd_ps(sums, _mm512_set1_ps(factor), lanes[r][c]);
        }
    }
}
