//! The integer products on AVX-512 VNNI: the lanes are one register, and so is a block of bytes. `vpdpbusd` adds four products
//! of an unsigned and a signed byte in 32 bits, without saturation.

use std::arch::x86_64::*;

use super::super::avx2::{prefetch_rows, sum8};
use super::super::{GROUP, Groups, Row};
use super::{Dot, Integer, Vector};

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

#[target_feature(enable = "avx512f,avx512vnni,avx2,fma,f16c")]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
fn dot<C: Integer, const S: u8, const R: usize, const N: usize>(
    rows: [Row<'_>; R],
    x: [Vector<'_>; N],
    y: &mut [&mut [f32]],
    at: usize,
) {
    let mut lanes = [[_mm512_setzero_ps(); N]; R];
    let mut groups = Groups::new(rows[0].group);
    let whole = rows[0].codes.len() / C::BYTES;
    for block in 0..x[0].blocks.len() {
        prefetch_rows::<C, R>(&rows, block);
        let group = groups.next();
        for r in 0..R {
            let codes = if block < whole {
                // SAFETY: the block is whole.
                unsafe { C::bytes64(rows[r].codes.as_ptr().add(block * C::BYTES)) }
            } else {
                let padded = rows[r].padded::<C>(block);
                // SAFETY: the padded array holds a block.
                unsafe { C::bytes64(padded.as_ptr()) }
            };
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
    for r in 0..R {
        for c in 0..N {
            let low = _mm512_castps512_ps256(lanes[r][c]);
            let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(lanes[r][c]));
            y[c][at + r] = sum8(_mm256_add_ps(low, _mm256_castpd_ps(high)));
        }
    }
}
