//! The inner loops on AVX-512 F: the 32 lanes are two registers.

use std::arch::x86_64::*;

use super::{AXPY_ROWS, Bf16, Blocks, Element, F16, F32, avx2};
use crate::quant::LANES;
use crate::quant::lanes512::{Lanes, add_lanes};

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

    /// The first `n` (at most 16) of them, the others +0.
    ///
    /// # Safety
    /// `n * BYTES` bytes at `p` are readable.
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn some16(p: *const u8, n: usize) -> __m512 {
        let mut padded = [0u8; 4 * REGISTER];
        // SAFETY: the caller's promise; elements have at most four bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(p, padded.as_mut_ptr(), n.min(REGISTER) * Self::BYTES);
            Self::load16(padded.as_ptr())
        }
    }
}

/// A mask of the first `n` of sixteen.
#[inline]
fn first(n: usize) -> u16 {
    ((1u32 << n.min(REGISTER)) - 1) as u16
}

impl Load16 for F32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn load16(p: *const u8) -> __m512 {
        // SAFETY: the caller's promise; loadu needs no alignment.
        unsafe { _mm512_loadu_ps(p.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn some16(p: *const u8, n: usize) -> __m512 {
        // SAFETY: what the mask leaves out is not read.
        unsafe { _mm512_maskz_loadu_ps(first(n), p.cast()) }
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

    // Two accumulators a row and column: four by two or two by four are sixteen of the thirty-two registers.
    fn rows(cols: usize) -> usize {
        if cols <= 2 { 4 } else { 2 }
    }

    fn dot(w: &[u8], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        let cols = x.len() / y.len();
        let rows = w.len() / (cols * E::BYTES);
        // SAFETY: this path is chosen only on a CPU with these features (`Isa::available`).
        unsafe {
            match (rows, y.len()) {
                (4, 1) => dot::<E, 4, 1>(w, x, cols, y, at),
                (4, _) => dot::<E, 4, 2>(w, x, cols, y, at),
                (2, 3) => dot::<E, 2, 3>(w, x, cols, y, at),
                (2, _) => dot::<E, 2, 4>(w, x, cols, y, at),
                (_, 1) => dot::<E, 1, 1>(w, x, cols, y, at),
                (_, 2) => dot::<E, 1, 2>(w, x, cols, y, at),
                (_, 3) => dot::<E, 1, 3>(w, x, cols, y, at),
                _ => dot::<E, 1, 4>(w, x, cols, y, at),
            }
        }
    }

    fn axpy(w: &[&[u8]], a: &[f32], y: &mut [f32]) {
        // SAFETY: this path is chosen only on a CPU with these features (`Isa::available`).
        unsafe {
            match *w {
                [p, q, r, s] => axpy::<E, AXPY_ROWS>([p, q, r, s], a, y),
                _ => axpy::<E, 1>([w[0]], a, y),
            }
        }
    }
}

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
        // SAFETY: cols - whole elements of every w[r] and x[c] are left.
        unsafe {
            last_step::<E, R, C>(
                w.map(|w| w.as_ptr().add(whole * E::BYTES)),
                x.map(|x| x.as_ptr().add(whole)),
                cols - whole,
                &mut lanes,
            );
        }
    }
    add_lanes(&lanes, y, at);
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

/// A last block of `left` elements, padded with weights and activations of +0.
///
/// # Safety
/// Every pointer has `left` readable elements.
#[inline]
// Three nested counts over four arrays read best as counts.
#[allow(clippy::needless_range_loop)]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn last_step<E: Load16, const R: usize, const C: usize>(
    w: [*const u8; R],
    x: [*const f32; C],
    left: usize,
    lanes: &mut Lanes<R, C>,
) {
    for k in 0..REGISTERS {
        let start = (k * REGISTER).min(left);
        let n = (left - start).min(REGISTER);
        for r in 0..R {
            // SAFETY: start + n <= left.
            let weights = unsafe { E::some16(w[r].add(start * E::BYTES), n) };
            for c in 0..C {
                // SAFETY: as above.
                let activations = unsafe { _mm512_maskz_loadu_ps(first(n), x[c].add(start)) };
                lanes[r][c][k] = _mm512_fmadd_ps(weights, activations, lanes[r][c][k]);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn axpy<E: Load16, const R: usize>(w: [&[u8]; R], a: &[f32], y: &mut [f32]) {
    let w: [&[u8]; R] = std::array::from_fn(|r| &w[r][..y.len() * E::BYTES]);
    let a: [__m512; R] = std::array::from_fn(|r| _mm512_set1_ps(a[r]));
    let whole = y.len() - y.len() % REGISTER;
    for j in (0..whole).step_by(REGISTER) {
        // SAFETY: j + 16 <= y.len(), the number of elements in every w[r].
        unsafe {
            let mut sums = _mm512_loadu_ps(y.as_ptr().add(j));
            for r in 0..R {
                let weights = w[r].as_ptr().add(j * E::BYTES);
                avx2::prefetch(weights, REGISTER * E::BYTES);
                sums = _mm512_fmadd_ps(a[r], E::load16(weights), sums);
            }
            _mm512_storeu_ps(y.as_mut_ptr().add(j), sums);
        }
    }
    let left = y.len() - whole;
    if left > 0 {
        // SAFETY: `left` elements of y and of every w[r] come after the whole registers.
        unsafe {
            let mut sums = _mm512_maskz_loadu_ps(first(left), y.as_ptr().add(whole));
            for r in 0..R {
                let weights = E::some16(w[r].as_ptr().add(whole * E::BYTES), left);
                sums = _mm512_fmadd_ps(a[r], weights, sums);
            }
            _mm512_mask_storeu_ps(y.as_mut_ptr().add(whole), first(left), sums);
        }
    }
}
