//! Multiplies as integers: the activations are rounded to signed bytes, as the weights are.
//!
//! # Rounding
//!
//! The activations of a vector are rounded once for a product, in blocks of [`BLOCK`] columns, the last one padded with
//! zeros: a block's scale is its largest magnitude divided by 127, a code is the activation divided by the scale, rounded to
//! the nearest integer, ties to even. A block with an activation that is infinite or NaN has codes 0 and the scale NaN, so that
//! the product is NaN too.
//!
//! # Reduction order
//!
//! The columns of a block have *places*: with F codes in a byte, field f of byte b is place f * 64 / F + b. Lane l of
//! [`LANES`] sums the products of places 4 l to 4 l + 3 as integers, exactly. RoundedBlock by block
//! `lane = fma(sum, factor, lane)` from +0, where the factor is the block's activation scale, times the group's weight scale
//! (rounded to f32) where there are groups. Lanes are added in pairs, l and l + 8, then 4, 2, 1 apart. With one scale a row the
//! result is multiplied by it.
//!
//! Groups that end inside a block have no integer products; they are computed exactly.

mod portable;
#[cfg(target_arch = "x86_64")]
pub(super) mod simd;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};
use std::marker::PhantomData;

use super::{BLOCK, Code, ROW, Row, Rows};
use crate::quant::Matrix;
use crate::quant::kernel::{Isa, Level};

/// Partial sums of a row.
const LANES: usize = 16;
/// Places that a lane takes of a block.
const PLACES: usize = BLOCK / LANES;
/// The largest code of an activation.
const MOST: f32 = 127.0;
/// Added to a small f32 and subtracted again, this rounds it to an integer, ties to even.
const ROUND: f32 = 1.5 * (1 << 23) as f32;

/// Codes that integer products take.
#[cfg(target_arch = "x86_64")]
pub trait Integer: Code + simd::Bytes<__m256> + simd::Bytes<__m512> {
    /// Added to a code, this makes it an unsigned number.
    const OFFSET: i32;
}
/// Codes that integer products take.
#[cfg(not(target_arch = "x86_64"))]
pub trait Integer: Code {
    /// Added to a code, this makes it an unsigned number.
    const OFFSET: i32;
}

/// Column of place `p` of a block.
fn column<C: Code>(p: usize) -> usize {
    p / C::BYTES + C::PER_BYTE * (p % C::BYTES)
}

/// Rounded activations of a block.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct RoundedBlock {
    /// By place.
    codes: [i8; BLOCK],
    /// A lane's sum of products with unsigned codes plus this is the sum with signed codes.
    corrections: [i32; LANES],
}

/// Rounded vectors.
pub struct RoundedVectors {
    /// [vectors, blocks].
    blocks: Vec<RoundedBlock>,
    /// [vectors, blocks].
    scales: Vec<f32>,
    /// Blocks of a vector.
    per_vector: usize,
}

/// One rounded vector.
#[derive(Clone, Copy)]
struct RoundedVector<'a> {
    blocks: &'a [RoundedBlock],
    scales: &'a [f32],
}

impl RoundedVectors {
    /// Rounds the vectors `x` [n, cols].
    fn round(
        x: &[f32],
        cols: usize,
        round_block: fn(&[f32; BLOCK]) -> (RoundedBlock, f32),
    ) -> RoundedVectors {
        let per_vector = cols.div_ceil(BLOCK);
        let count = x.len().checked_div(cols).unwrap_or(0) * per_vector;
        let mut vectors = RoundedVectors {
            blocks: Vec::with_capacity(count),
            scales: Vec::with_capacity(count),
            per_vector,
        };
        for x in x.chunks(cols.max(1)) {
            for x in x.chunks(BLOCK) {
                let mut padded = [0f32; BLOCK];
                padded[..x.len()].copy_from_slice(x);
                let (block, scale) = round_block(&padded);
                vectors.blocks.push(block);
                vectors.scales.push(scale);
            }
        }
        vectors
    }

    /// RoundedVector `i`.
    fn get(&self, i: usize) -> RoundedVector<'_> {
        let blocks = i * self.per_vector..(i + 1) * self.per_vector;
        RoundedVector {
            blocks: &self.blocks[blocks.clone()],
            scales: &self.scales[blocks],
        }
    }
}

/// Codes and scale of a block. Inlined, so that each instruction set compiles it.
#[inline(always)]
fn round_block<C: Integer>(x: &[f32; BLOCK]) -> (RoundedBlock, f32) {
    // The bits of magnitudes are in the order of the magnitudes, with infinity and NaN above all numbers.
    let largest = x.iter().fold(0, |most: i32, x| {
        most.max((x.to_bits() & (u32::MAX >> 1)) as i32)
    });
    let largest = f32::from_bits(largest as u32);
    let mut scale = largest / MOST;
    let mut rounded = [0i8; BLOCK];
    if !largest.is_finite() {
        scale = f32::NAN;
    } else if scale > 0.0 {
        for (code, x) in rounded.iter_mut().zip(x) {
            // A scale may be so small that it is rounded itself.
            let ratio = (x / scale).clamp(-MOST, MOST);
            *code = (ratio + ROUND).to_bits() as i8;
        }
    }
    let codes: [i8; BLOCK] = std::array::from_fn(|p| rounded[column::<C>(p)]);
    let corrections = std::array::from_fn(|l| {
        let places = &codes[PLACES * l..PLACES * (l + 1)];
        -C::OFFSET * places.iter().map(|c| i32::from(*c)).sum::<i32>()
    });
    (RoundedBlock { codes, corrections }, scale)
}

/// The integer products of one format on one instruction set. Each call stays on its thread.
pub trait IntegerKernel: Sync {
    /// Rounds the vectors `x` [n, cols]. A product calls it once, not once a tile.
    fn round(&self, x: &[f32], cols: usize) -> RoundedVectors;

    /// y[c][r] = W[r, :] . x[c] for all rows of `w` and all vectors; every element of `y` has `w.rows()` values.
    fn matmul(&self, w: Matrix<'_>, x: &RoundedVectors, y: &mut [&mut [f32]]);
}

/// The inner loops of one instruction set.
trait IntegerLoops<C, const S: u8>: Sync + 'static {
    /// Most vectors that [`IntegerLoops::dot`] takes. It takes one or two rows.
    const COLS: usize;
    /// Codes and scale of a block of activations.
    fn round(x: &[f32; BLOCK]) -> (RoundedBlock, f32);
    /// y[c][at + r] = rows[r] . x[c], without the scale of a row. `x` has as many vectors as `y`.
    fn dot(rows: &[Row<'_>], x: &[RoundedVector<'_>], y: &mut [&mut [f32]], at: usize);
}

/// The integer kernels of the codes `C` with scales of the kind `S`, for the best instructions of `isa` that the CPU has.
pub fn kernel<C: Integer, const S: u8>(isa: Isa) -> &'static dyn IntegerKernel {
    match isa.level() {
        Level::Portable => &IntegerProducts::<C, portable::Portable, S>(PhantomData),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 if is_x86_feature_detected!("avx512vnni") => {
            &IntegerProducts::<C, simd::Avx512, S>(PhantomData)
        }
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::Avx512 => &IntegerProducts::<C, simd::Avx2, S>(PhantomData),
    }
}

/// The kernels of the codes `C` with the inner loops `P` and scales of the kind `S`.
struct IntegerProducts<C, P, const S: u8>(PhantomData<(C, P)>);

/// Most vectors that any instruction set takes at once.
const MAX_COLS: usize = 4;

impl<C: Integer, P: IntegerLoops<C, S>, const S: u8> IntegerKernel for IntegerProducts<C, P, S> {
    fn round(&self, x: &[f32], cols: usize) -> RoundedVectors {
        RoundedVectors::round(x, cols, P::round)
    }

    fn matmul(&self, w: Matrix<'_>, x: &RoundedVectors, y: &mut [&mut [f32]]) {
        if w.cols() == 0 {
            return y.iter_mut().for_each(|y| y.fill(0.0));
        }
        assert_eq!(x.per_vector, w.cols().div_ceil(BLOCK));
        let rows = Rows::new::<C>(w);
        for (block, y) in y.chunks_mut(P::COLS).enumerate() {
            let vectors: [RoundedVector<'_>; MAX_COLS] =
                std::array::from_fn(|c| x.get(block * P::COLS + c.min(y.len() - 1)));
            let vectors = &vectors[..y.len()];
            for row in (0..w.rows()).step_by(2) {
                if row + 2 <= w.rows() {
                    P::dot(&[rows.row(row), rows.row(row + 1)], vectors, y, row);
                } else {
                    P::dot(&[rows.row(row)], vectors, y, row);
                }
            }
            if S == ROW {
                for y in y.iter_mut() {
                    for (r, y) in y[..w.rows()].iter_mut().enumerate() {
                        *y *= rows.row(r).scale::<ROW>(0);
                    }
                }
            }
        }
    }
}
