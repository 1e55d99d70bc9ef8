//! The inner loops without SIMD intrinsics: the definition that the others are tested against.

use super::{Blocks, Element};
use crate::quant::LANES;

/// Any CPU.
pub struct Path;

impl<E: Element> Blocks<E> for Path {
    const COLS: usize = 1;

    fn rows(_: usize) -> usize {
        1
    }

    fn dot(w: &[u8], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        let mut lanes = [0f32; LANES];
        for (w, x) in w.chunks(LANES * E::BYTES).zip(x.chunks(LANES)) {
            let (mut weights, mut activations) = ([0f32; LANES], [0f32; LANES]);
            for (value, w) in weights.iter_mut().zip(w.chunks_exact(E::BYTES)) {
                *value = E::decode(w);
            }
            activations[..x.len()].copy_from_slice(x);
            for ((lane, w), x) in lanes.iter_mut().zip(weights).zip(activations) {
                *lane = w.mul_add(x, *lane);
            }
        }
        let mut width = LANES / 2;
        while width > 0 {
            for l in 0..width {
                lanes[l] += lanes[l + width];
            }
            width /= 2;
        }
        y[0][at] = lanes[0];
    }

    fn axpy(w: &[&[u8]], a: &[f32], y: &mut [f32]) {
        for (w, &a) in w.iter().zip(a) {
            for (y, w) in y.iter_mut().zip(w.chunks_exact(E::BYTES)) {
                *y = a.mul_add(E::decode(w), *y);
            }
        }
    }
}
