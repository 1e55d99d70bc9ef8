//! The inner loops on AVX-512 F: the 32 lanes are two registers.

use std::arch::x86_64::*;

use super::{AXPY_ROWS, Bf16, Blocks, Element, F16, F32, avx2};
use crate::quant::LANES;

/// AVX-512 F on top of what [`avx2::Path`] needs.
pub struct Path;

const REGISTER: usize = 16;
const REGISTERS: usize = LANES / REGISTER;

/// Elements that AVX-512 converts sixteen at a time.
pub trait Load16: Element {
    /// Sixteen elements at `p` as f32.
    ///
    /// # Safety
    /// `16 * BYTES` bytes at `p` are readable.
    unsafe fn load16(p: *const u8) -> __m512;
}

impl Load16 for F32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn load16(p: *const u8) -> __m512 {
        // SAFETY: the caller's promise; loadu needs no alignment.
        unsafe { _mm512_loadu_ps(p.cast()) }
    }
}

impl Load16 for F16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn load16(p: *const u8) -> __m512 {
        // SAFETY: the caller's promise; loadu needs no alignment.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(p.cast()) })
    }
}

impl Load16 for Bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn load16(p: *const u8) -> __m512 {
        // SAFETY: the caller's promise; loadu needs no alignment.
        let halves = unsafe { _mm256_loadu_si256(p.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
    }
}

impl<E: Load16 + avx2::Load8> Blocks<E> for Path {
    const COLS: usize = 4;

    // Two accumulators a row and column: two by four are sixteen of the thirty-two registers.
    fn rows(_: usize) -> usize {
        2
    }

    fn dot(w: &[u8], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        let cols = x.len() / y.len();
        let rows = w.len() / (cols * E::BYTES);
        // SAFETY: this path is chosen only on a CPU with these features (`Isa::available`).
        unsafe {
            match (rows, y.len()) {
                (2, 1) => dot::<E, 2, 1>(w, x, cols, y, at),
                (2, 2) => dot::<E, 2, 2>(w, x, cols, y, at),
                (2, 3) => dot::<E, 2, 3>(w, x, cols, y, at),
                (2, _) => dot::<E, 2, 4>(w, x, cols, y, at),
                (_, 1) => dot::<E, 1, 1>(w, x, cols, y, at),
                (_, 2) => dot::<E, 1, 2>(w, x, cols, y, at),
                (_, 3) => dot::<E, 1, 3>(w, x, cols, y, at),
                _ => dot::<E, 1, 4>(w, x, cols, y, at),
            }
        }
    }

    // Bound by memory, and every element has its own chain: wider registers gain nothing.
    fn axpy(w: &[&[u8]], a: &[f32], y: &mut [f32]) {
        debug_assert!(matches!(w.len(), 1 | AXPY_ROWS));
        <avx2::Path as Blocks<E>>::axpy(w, a, y);
    }
}

/// The lanes of R rows times C columns.
type Lanes<const R: usize, const C: usize> = [[[__m512; REGISTERS]; C]; R];

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn dot<E: Load16, const R: usize, const C: usize>(
    w: &[u8],
    x: &[f32],
    cols: usize,
    y: &mut [&mut [f32]],
    at: usize,
) {
    let stride = cols * E::BYTES;
    let w: [&[u8]; R] = std::array::from_fn(|r| &w[r * stride..(r + 1) * stride]);
    let x: [&[f32]; C] = std::array::from_fn(|c| &x[c * cols..(c + 1) * cols]);
    let mut lanes: Lanes<R, C> = [[[_mm512_setzero_ps(); REGISTERS]; C]; R];

    let whole = cols - cols % LANES;
    for j in (0..whole).step_by(LANES) {
        // SAFETY: j + LANES <= cols, the number of elements in every w[r] and x[c].
        unsafe {
            step::<E, R, C>(
                w.map(|w| w.as_ptr().add(j * E::BYTES)),
                x.map(|x| x.as_ptr().add(j)),
                &mut lanes,
            );
        }
    }
    if whole < cols {
        let mut weights = [[0u8; LANES * 4]; R];
        let mut activations = [[0f32; LANES]; C];
        for (padded, w) in weights.iter_mut().zip(w) {
            let tail = &w[whole * E::BYTES..];
            padded[..tail.len()].copy_from_slice(tail);
        }
        for (padded, x) in activations.iter_mut().zip(x) {
            padded[..cols - whole].copy_from_slice(&x[whole..]);
        }
        // SAFETY: the padded arrays hold LANES elements of any format.
        unsafe {
            step::<E, R, C>(
                std::array::from_fn(|r| weights[r].as_ptr()),
                std::array::from_fn(|c| activations[c].as_ptr()),
                &mut lanes,
            );
        }
    }
    for (r, lanes) in lanes.iter().enumerate() {
        for (y, lanes) in y.iter_mut().zip(lanes) {
            y[at + r] = sum(lanes);
        }
    }
}

/// One block of 32 elements of every row and column.
///
/// # Safety
/// Every pointer has `LANES` readable elements.
#[inline]
// Three nested counts over four arrays read best as counts.
#[allow(clippy::needless_range_loop)]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn step<E: Load16, const R: usize, const C: usize>(
    w: [*const u8; R],
    x: [*const f32; C],
    lanes: &mut Lanes<R, C>,
) {
    for w in w {
        avx2::prefetch(w, LANES * E::BYTES);
    }
    for k in 0..REGISTERS {
        for r in 0..R {
            // SAFETY: k * REGISTER + REGISTER <= LANES elements.
            let weights = unsafe { E::load16(w[r].add(k * REGISTER * E::BYTES)) };
            for c in 0..C {
                // SAFETY: as above.
                let activations = unsafe { _mm512_loadu_ps(x[c].add(k * REGISTER)) };
                lanes[r][c][k] = _mm512_fmadd_ps(weights, activations, lanes[r][c][k]);
            }
        }
    }
}

/// The pairwise sum: lanes 16 apart, then 8, 4, 2, 1.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn sum(lanes: &[__m512; REGISTERS]) -> f32 {
    let sixteen = _mm512_add_ps(lanes[0], lanes[1]);
    let low = _mm512_castps512_ps256(sixteen);
    let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(sixteen)));
    avx2::sum8(_mm256_add_ps(low, high))
}
