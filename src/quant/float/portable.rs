//! Multiplies floats without SIMD intrinsics: the definition that the other loops are tested against.

use super::{Element, FloatLoops};
use crate::quant::LANES;
use crate::quant::kernel::sum_lanes;

/// Any CPU.
pub struct Portable;

impl<E: Element> FloatLoops<E> for Portable {
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
        y[0][at] = sum_lanes(lanes);
    }

    fn axpy(w: &[&[u8]], a: &[f32], y: &mut [f32]) {
        for (w, &a) in w.iter().zip(a) {
            for (y, w) in y.iter_mut().zip(w.chunks_exact(E::BYTES)) {
                *y = a.mul_add(E::decode(w), *y);
            }
        }
    }
}
