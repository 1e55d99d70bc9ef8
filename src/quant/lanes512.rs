//! The 32 lanes of a dot product in two AVX-512 registers, and their sums.

use std::arch::x86_64::*;

use super::float::avx2::sum8;

/// The lanes of R rows times N columns.
pub type Lanes<const R: usize, const N: usize> = [[[__m512; 2]; N]; R];

/// y[c][at + r] = the sum of the lanes of row r and column c: lanes 16 apart are added first, then 8, 4, 2, 1.
///
/// A row of a small matrix has few blocks, and its sum takes as long as they do. So four sums are made together wherever there are four.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
pub fn add_lanes<const R: usize, const N: usize>(
    lanes: &Lanes<R, N>,
    y: &mut [&mut [f32]],
    at: usize,
) {
    if R == 4 {
        for c in 0..N {
            let sums = sum4(std::array::from_fn(|r| lanes[r][c]));
            y[c][at..at + 4].copy_from_slice(&sums);
        }
    } else if N == 4 {
        for r in 0..R {
            let sums = sum4(std::array::from_fn(|c| lanes[r][c]));
            for c in 0..N {
                y[c][at + r] = sums[c];
            }
        }
    } else {
        for r in 0..R {
            for c in 0..N {
                y[c][at + r] = sum(&lanes[r][c]);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn sum(lanes: &[__m512; 2]) -> f32 {
    let sixteen = _mm512_add_ps(lanes[0], lanes[1]);
    let low = _mm512_castps512_ps256(sixteen);
    let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(sixteen)));
    sum8(_mm256_add_ps(low, high))
}

/// Four sums in half as many instructions as one by one.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn sum4(lanes: [[__m512; 2]; 4]) -> [f32; 4] {
    let [a, b, c, d] = [
        _mm512_add_ps(lanes[0][0], lanes[0][1]),
        _mm512_add_ps(lanes[1][0], lanes[1][1]),
        _mm512_add_ps(lanes[2][0], lanes[2][1]),
        _mm512_add_ps(lanes[3][0], lanes[3][1]),
    ];
    // Eight lanes of a, then of b.
    let ab = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
    );
    let cd = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b01_00_01_00>(c, d),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d),
    );
    // Four lanes of each.
    let four = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd),
    );
    let two = _mm512_add_ps(four, _mm512_permute_ps::<0b01_00_11_10>(four));
    let one = _mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
    // The first of every four is a sum.
    let firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    let sums = _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, one));
    let mut out = [0.0; 4];
    // SAFETY: `out` has room for four values.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
    out
}
