//! Multiplies floats on AVX2 and AVX-512.

use std::arch::x86_64::{__m256, __m512};

use super::{AXPY_ROWS, Element, FloatLoops};
use crate::quant::LANES;
use crate::quant::register::{Lanes, Register, add_lanes, prefetch};

/// AVX2, FMA and F16C: the 32 lanes are four registers.
pub struct Avx2;

/// AVX-512 F on top of [`Avx2`]: the 32 lanes are two registers.
pub struct Avx512;

impl<E: Element> FloatLoops<E> for Avx2 {
    const COLS: usize = 3;

    // Four accumulators a row and column: two by one or one by three leave room in sixteen registers.
    fn rows(cols: usize) -> usize {
        if cols == 1 { 2 } else { 1 }
    }

    fn dot(w: &[u8], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        let rows = w.len() / (x.len() / y.len() * E::BYTES);
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX2.
        unsafe {
            match (rows, y.len()) {
                (2, 1) => dot::<E, __m256, 2, 1>(w, x, y, at),
                (_, 1) => dot::<E, __m256, 1, 1>(w, x, y, at),
                (_, 2) => dot::<E, __m256, 1, 2>(w, x, y, at),
                _ => dot::<E, __m256, 1, 3>(w, x, y, at),
            }
        }
    }

    fn axpy(w: &[&[u8]], a: &[f32], y: &mut [f32]) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX2.
        unsafe { axpy::<E, __m256>(w, a, y) }
    }
}

impl<E: Element> FloatLoops<E> for Avx512 {
    const COLS: usize = 4;

    // Two accumulators a row and column: four by two or two by four are sixteen of the thirty-two registers.
    fn rows(cols: usize) -> usize {
        if cols <= 2 { 4 } else { 2 }
    }

    fn dot(w: &[u8], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        let rows = w.len() / (x.len() / y.len() * E::BYTES);
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX-512.
        unsafe {
            match (rows, y.len()) {
                (4, 1) => dot::<E, __m512, 4, 1>(w, x, y, at),
                (4, _) => dot::<E, __m512, 4, 2>(w, x, y, at),
                (2, 3) => dot::<E, __m512, 2, 3>(w, x, y, at),
                (2, _) => dot::<E, __m512, 2, 4>(w, x, y, at),
                (_, 1) => dot::<E, __m512, 1, 1>(w, x, y, at),
                (_, 2) => dot::<E, __m512, 1, 2>(w, x, y, at),
                (_, 3) => dot::<E, __m512, 1, 3>(w, x, y, at),
                _ => dot::<E, __m512, 1, 4>(w, x, y, at),
            }
        }
    }

    fn axpy(w: &[&[u8]], a: &[f32], y: &mut [f32]) {
        // SAFETY: `kernel` chooses these loops for an `Isa` with AVX-512.
        unsafe { axpy::<E, __m512>(w, a, y) }
    }
}

/// y[c][at + r] = row r of `w` . x[c], for R rows and C columns.
///
/// # Safety
/// The CPU has the instructions of `V`.
unsafe fn dot<E: Element, V: Register, const R: usize, const C: usize>(
    w: &[u8],
    x: &[f32],
    y: &mut [&mut [f32]],
    at: usize,
) {
    let cols = x.len() / C;
    let stride = cols * E::BYTES;
    let w: [&[u8]; R] = std::array::from_fn(|r| &w[r * stride..(r + 1) * stride]);
    let x: [&[f32]; C] = std::array::from_fn(|c| &x[c * cols..(c + 1) * cols]);
    let (w, x) = (w.map(<[u8]>::as_ptr), x.map(<[f32]>::as_ptr));
    let whole = cols - cols % LANES;
    // SAFETY: the caller's promise; every row and column has `cols` elements, of which a step takes LANES or what is left.
    let sum = || unsafe {
        let mut lanes = [[[V::splat(0.0); 4]; C]; R];
        for j in (0..whole).step_by(LANES) {
            step::<E, V, R, C, true>(w, x, j, LANES, &mut lanes);
        }
        if whole < cols {
            step::<E, V, R, C, false>(w, x, whole, cols - whole, &mut lanes);
        }
        add_lanes(lanes, LANES / V::WIDTH, y, at);
    };
    // SAFETY: the caller's promise.
    unsafe { V::run(sum) }
}

/// Multiplies `len` elements of every row and column from element `j` on. WHOLE says that `len` is LANES; otherwise weights and activations
/// of +0 follow.
///
/// # Safety
/// The CPU has the instructions of `V`, and every pointer has `j + len` readable elements.
#[inline(always)]
// Three nested counts over four arrays read best as counts.
#[allow(clippy::needless_range_loop)]
unsafe fn step<E: Element, V: Register, const R: usize, const C: usize, const WHOLE: bool>(
    w: [*const u8; R],
    x: [*const f32; C],
    j: usize,
    len: usize,
    lanes: &mut Lanes<V, R, C>,
) {
    // SAFETY: the caller's promise; register k takes elements below j + len.
    unsafe {
        if WHOLE {
            w.iter()
                .for_each(|w| prefetch(w.add(j * E::BYTES), LANES * E::BYTES));
        }
        for k in 0..LANES / V::WIDTH {
            let start = (k * V::WIDTH).min(len);
            let n = (len - start).min(V::WIDTH);
            for r in 0..R {
                let w = w[r].add((j + start) * E::BYTES);
                let weights: V = if WHOLE {
                    E::load(w)
                } else {
                    E::load_first(w, n)
                };
                for c in 0..C {
                    let x = x[c].add(j + start);
                    let activations = if WHOLE {
                        V::load(x)
                    } else {
                        V::load_first(x, n)
                    };
                    lanes[r][c][k] = V::fma(weights, activations, lanes[r][c][k]);
                }
            }
        }
    }
}

/// y[j] += sum over r of a[r] * w[r][j], r ascending, for 1 or [`AXPY_ROWS`] rows.
///
/// # Safety
/// The CPU has the instructions of `V`.
unsafe fn axpy<E: Element, V: Register>(w: &[&[u8]], a: &[f32], y: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match *w {
            [p, q, r, s] => V::run(|| axpy_rows::<E, V, AXPY_ROWS>([p, q, r, s], a, y)),
            _ => V::run(|| axpy_rows::<E, V, 1>([w[0]], a, y)),
        }
    }
}

/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
unsafe fn axpy_rows<E: Element, V: Register, const R: usize>(
    w: [&[u8]; R],
    a: &[f32],
    y: &mut [f32],
) {
    let w = w.map(|w| &w[..y.len() * E::BYTES]);
    let a: [f32; R] = std::array::from_fn(|r| a[r]);
    let whole = y.len() - y.len() % V::WIDTH;
    // SAFETY: the caller's promise; y and every w[r] have WIDTH elements from each j on.
    unsafe {
        let mut factors = [V::splat(0.0); R];
        for (factor, a) in factors.iter_mut().zip(a) {
            *factor = V::splat(a);
        }
        for j in (0..whole).step_by(V::WIDTH) {
            let y = y.as_mut_ptr().add(j);
            let mut sums = V::load(y);
            for r in 0..R {
                let w = w[r].as_ptr().add(j * E::BYTES);
                prefetch(w, V::WIDTH * E::BYTES);
                sums = V::fma(factors[r], E::load(w), sums);
            }
            V::store(y, sums);
        }
    }
    for (j, y) in y.iter_mut().enumerate().skip(whole) {
        for r in 0..R {
            *y = a[r].mul_add(E::decode(&w[r][j * E::BYTES..(j + 1) * E::BYTES]), *y);
        }
    }
}
