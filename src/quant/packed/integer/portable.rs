//! Multiplies integers without SIMD intrinsics: the definition that the other loops are tested against.

use super::super::{BLOCK, GROUP, Groups, Row};
use super::{
    Integer, IntegerLoops, LANES, PLACES, RoundedBlock, RoundedVector, column, round_block,
};
use crate::quant::kernel::sum_lanes;

/// Any CPU.
pub struct Portable;

impl<C: Integer, const S: u8> IntegerLoops<C, S> for Portable {
    const COLS: usize = 1;

    fn round(x: &[f32; BLOCK]) -> (RoundedBlock, f32) {
        round_block::<C>(x)
    }

    fn dot(rows: &[Row<'_>], x: &[RoundedVector<'_>], y: &mut [&mut [f32]], at: usize) {
        for (r, row) in rows.iter().enumerate() {
            let mut lanes = [0f32; LANES];
            let mut groups = Groups::new(row.group);
            for (i, (block, scale)) in x[0].blocks.iter().zip(x[0].scales).enumerate() {
                let group = groups.next();
                let factor = if S == GROUP {
                    scale * row.scale::<S>(group)
                } else {
                    *scale
                };
                for (l, lane) in lanes.iter_mut().enumerate() {
                    let places = PLACES * l..PLACES * (l + 1);
                    let sum: i32 = places
                        .map(|p| {
                            let column = i * BLOCK + column::<C>(p);
                            let byte = row.codes.get(column / C::PER_BYTE);
                            let code = byte.map_or(0.0, |b| C::decode(*b, column % C::PER_BYTE));
                            code as i32 * i32::from(block.codes[p])
                        })
                        .sum();
                    *lane = (sum as f32).mul_add(factor, *lane);
                }
            }
            y[0][at + r] = sum_lanes(lanes);
        }
    }
}
