//! The inner loops on AVX2, FMA and F16C: the 32 lanes are four registers.

use std::arch::x86_64::*;

use super::{AXPY_ROWS, Bf16, Blocks, Element, F16, F32};
use crate::quant::LANES;

/// AVX2, FMA and F16C.
pub struct Path;

const REGISTER: usize = 8;
const REGISTERS: usize = LANES / REGISTER;

/// Elements that AVX2 converts eight at a time.
pub trait Load8: Element {
    /// Eight elements at `p` as f32.
    ///
    /// # Safety
    /// `8 * BYTES` bytes at `p` are readable.
    unsafe fn load8(p: *const u8) -> __m256;
}

impl Load8 for F32 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load8(p: *const u8) -> __m256 {
        // SAFETY: the caller's promise; loadu needs no alignment.
        unsafe { _mm256_loadu_ps(p.cast()) }
    }
}

impl Load8 for F16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load8(p: *const u8) -> __m256 {
        // SAFETY: the caller's promise; loadu needs no alignment.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(p.cast()) })
    }
}

impl Load8 for Bf16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load8(p: *const u8) -> __m256 {
        // SAFETY: the caller's promise; loadu needs no alignment.
        let halves = unsafe { _mm_loadu_si128(p.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
    }
}

impl<E: Load8> Blocks<E> for Path {
    const COLS: usize = 3;

    // Four accumulators a row and column: two by one or one by three leave room in sixteen registers.
    fn rows(cols: usize) -> usize {
        if cols == 1 { 2 } else { 1 }
    }

    fn dot(w: &[u8], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        let cols = x.len() / y.len();
        let rows = w.len() / (cols * E::BYTES);
        // SAFETY: this path is chosen only on a CPU with these features (`Isa::available`).
        unsafe {
            match (rows, y.len()) {
                (2, 1) => dot::<E, 2, 1>(w, x, cols, y, at),
                (_, 1) => dot::<E, 1, 1>(w, x, cols, y, at),
                (_, 2) => dot::<E, 1, 2>(w, x, cols, y, at),
                _ => dot::<E, 1, 3>(w, x, cols, y, at),
            }
        }
    }

    fn axpy(w: &[&[u8]], a: &[f32], y: &mut [f32]) {
        // SAFETY: this path is chosen only on a CPU with these features (`Isa::available`).
        unsafe {
            match w.len() {
                AXPY_ROWS => axpy::<E, AXPY_ROWS>(w, a, y),
                _ => axpy::<E, 1>(w, a, y),
            }
        }
    }
}

/// How far ahead of the loads weights are asked for, in bytes. The hardware's own prefetch stops at page ends and
/// leaves about 8% of the memory bandwidth unused with 2-byte weights.
pub(in crate::quant) const AHEAD: usize = 2048;

/// Asks for the `size` bytes that are [`AHEAD`] of `p`, which may be outside the matrix.
#[inline(always)]
pub(in crate::quant) fn prefetch(p: *const u8, size: usize) {
    for line in (0..size).step_by(64) {
        let at = p.wrapping_add(AHEAD + line);
        // The intrinsic is safe from some version of Rust on.
        #[allow(unused_unsafe)]
        // SAFETY: a prefetch has no effect on an address that cannot be read.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(at.cast())
        };
    }
}

/// The lanes of R rows times C columns.
type Lanes<const R: usize, const C: usize> = [[[__m256; REGISTERS]; C]; R];

#[target_feature(enable = "avx2,fma,f16c")]
fn dot<E: Load8, const R: usize, const C: usize>(
    w: &[u8],
    x: &[f32],
    cols: usize,
    y: &mut [&mut [f32]],
    at: usize,
) {
    let stride = cols * E::BYTES;
    let w: [&[u8]; R] = std::array::from_fn(|r| &w[r * stride..(r + 1) * stride]);
    let x: [&[f32]; C] = std::array::from_fn(|c| &x[c * cols..(c + 1) * cols]);
    let mut lanes: Lanes<R, C> = [[[_mm256_setzero_ps(); REGISTERS]; C]; R];

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
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step<E: Load8, const R: usize, const C: usize>(
    w: [*const u8; R],
    x: [*const f32; C],
    lanes: &mut Lanes<R, C>,
) {
    for w in w {
        prefetch(w, LANES * E::BYTES);
    }
    for k in 0..REGISTERS {
        for r in 0..R {
            // SAFETY: k * REGISTER + REGISTER <= LANES elements.
            let weights = unsafe { E::load8(w[r].add(k * REGISTER * E::BYTES)) };
            for c in 0..C {
                // SAFETY: as above.
                let activations = unsafe { _mm256_loadu_ps(x[c].add(k * REGISTER)) };
                lanes[r][c][k] = _mm256_fmadd_ps(weights, activations, lanes[r][c][k]);
            }
        }
    }
}

/// The pairwise sum: lanes 16 apart, then 8, 4, 2, 1.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum(lanes: &[__m256; REGISTERS]) -> f32 {
    let low = _mm256_add_ps(lanes[0], lanes[2]);
    let high = _mm256_add_ps(lanes[1], lanes[3]);
    sum8(_mm256_add_ps(low, high))
}

/// The pairwise sum of eight lanes: 4 apart, then 2, 1.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::quant) fn sum8(lanes: __m256) -> f32 {
    let four = _mm_add_ps(
        _mm256_castps256_ps128(lanes),
        _mm256_extractf128_ps::<1>(lanes),
    );
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    let one = _mm_add_ss(two, _mm_movehdup_ps(two));
    _mm_cvtss_f32(one)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn axpy<E: Load8, const R: usize>(w: &[&[u8]], a: &[f32], y: &mut [f32]) {
    let w: [&[u8]; R] = std::array::from_fn(|r| &w[r][..y.len() * E::BYTES]);
    let factors: [__m256; R] = std::array::from_fn(|r| _mm256_set1_ps(a[r]));
    let whole = y.len() - y.len() % REGISTER;
    for j in (0..whole).step_by(REGISTER) {
        let at = &mut y[j..j + REGISTER];
        // SAFETY: `at` has eight elements, and every w[r] as many elements as y.
        unsafe {
            let mut sum = _mm256_loadu_ps(at.as_ptr());
            for r in 0..R {
                let weights = E::load8(w[r].as_ptr().add(j * E::BYTES));
                sum = _mm256_fmadd_ps(factors[r], weights, sum);
            }
            _mm256_storeu_ps(at.as_mut_ptr(), sum);
        }
    }
    for (j, y) in y.iter_mut().enumerate().skip(whole) {
        for r in 0..R {
            *y = a[r].mul_add(E::decode(&w[r][j * E::BYTES..(j + 1) * E::BYTES]), *y);
        }
    }
}
