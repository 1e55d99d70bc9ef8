//! Multiplies packed codes without SIMD intrinsics: the definition that the other loops are tested against.

use super::{BLOCK, Code, FINE, Groups, HALF, PackedLoops, QUARTER, ROW, Row, column, is_grouped};
use crate::quant::LANES;
use crate::quant::kernel::sum_lanes;

/// Any CPU.
pub struct Portable;

/// The codes of a block by position; 0 beyond the row's end.
fn codes<C: Code>(row: &Row<'_>, block: usize) -> [f32; BLOCK] {
    std::array::from_fn(|p| {
        let column = block * BLOCK + column::<C>(p);
        let byte = row.codes.get(column / C::PER_BYTE);
        byte.map_or(0.0, |byte| C::decode(*byte, column % C::PER_BYTE))
    })
}

impl<C: Code, const S: u8> PackedLoops<C, S> for Portable {
    const COLS: usize = 1;

    fn rows(_: usize) -> usize {
        1
    }

    fn dot(rows: &[Row<'_>], x: &[f32], y: &mut [&mut [f32]], at: usize) {
        let row = &rows[0];
        let mut lanes = [0f32; LANES];
        let mut groups = Groups::new(row.group);
        for (block, x) in x.chunks_exact(BLOCK).enumerate() {
            let mut weights = codes::<C>(row, block);
            if S != ROW {
                let scales = block_scales::<C, S>(row, block, &mut groups);
                weights.iter_mut().zip(scales).for_each(|(w, s)| *w *= s);
            }
            for (p, (w, x)) in weights.iter().zip(x).enumerate() {
                let lane = &mut lanes[QUARTER * (p / QUARTER % 2) + p % QUARTER];
                *lane = w.mul_add(*x, *lane);
            }
        }
        y[0][at] = sum_lanes(lanes);
    }

    fn axpy(rows: &[Row<'_>], a: &[f32], y: &mut [f32]) {
        for (row, &a) in rows.iter().zip(a) {
            let mut groups = Groups::new(row.group);
            for (block, y) in y.chunks_exact_mut(BLOCK).enumerate() {
                let codes = codes::<C>(row, block);
                let scales = block_scales::<C, S>(row, block, &mut groups);
                for ((y, code), scale) in y.iter_mut().zip(codes).zip(scales) {
                    *y = (a * scale).mul_add(code, *y);
                }
            }
        }
    }
}

/// The scale of every position of a block.
fn block_scales<C: Code, const S: u8>(
    row: &Row<'_>,
    block: usize,
    groups: &mut Groups,
) -> [f32; BLOCK] {
    match S {
        FINE => row.fine_scales::<C>(block),
        HALF => {
            let scales = row.half_scales(block);
            std::array::from_fn(|p| scales[column::<C>(p) / (BLOCK / 2)])
        }
        _ if is_grouped(S) => [row.scale::<S>(groups.next()); BLOCK],
        _ => [row.scale::<S>(0); BLOCK],
    }
}
