//! Integer products: the activations are rounded to signed bytes, as the codes of the weights are.
//!
//! # Rounding
//!
//! The activations of a vector are rounded once for a product, in blocks of [`BLOCK`] columns, the last one padded with
//! zeros: a block's scale is its largest magnitude divided by 127, a code is the activation divided by the scale, rounded to
//! the nearest integer, ties to even. A block with an activation that is infinite or NaN has codes 0 and the scale NaN, so that
//! what went wrong before the product still shows after it.
//!
//! # Reduction order
//!
//! The columns of a block have *places*: with F codes in a byte, field f of byte b is place f * 64 / F + b. Lane l of
//! [`LANES`] sums the products of places 4 l to 4 l + 3 as integers, exactly. Block by block
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
    /// What makes a code an unsigned number when it is added.
    const OFFSET: i32;
}
/// Codes that integer products take.
#[cfg(not(target_arch = "x86_64"))]
pub trait Integer: Code {
    /// What makes a code an unsigned number when it is added.
    const OFFSET: i32;
}

/// Column of place `p` of a block.
fn column<C: Code>(p: usize) -> usize {
    p / C::BYTES + C::PER_BYTE * (p % C::BYTES)
}

/// Rounded activations of a block.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Block {
    /// By place.
    codes: [i8; BLOCK],
    /// What a lane's sum is too large by, negated, when weights are taken as unsigned numbers.
    corrections: [i32; LANES],
}

/// Rounded vectors.
pub struct Vectors {
    /// [vectors, blocks].
    blocks: Vec<Block>,
    /// [vectors, blocks].
    scales: Vec<f32>,
    /// Blocks of a vector.
    per_vector: usize,
}

/// One rounded vector.
#[derive(Clone, Copy)]
struct Vector<'a> {
    blocks: &'a [Block],
    scales: &'a [f32],
}

impl Vectors {
    /// Rounds the vectors `x` [n, cols].
    fn round(x: &[f32], cols: usize, round_block: fn(&[f32; BLOCK]) -> (Block, f32)) -> Vectors {
        let per_vector = cols.div_ceil(BLOCK);
        let count = x.len().checked_div(cols).unwrap_or(0) * per_vector;
        let mut vectors = Vectors {
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

    /// Vector `i`.
    fn get(&self, i: usize) -> Vector<'_> {
        let blocks = i * self.per_vector..(i + 1) * self.per_vector;
        Vector {
            blocks: &self.blocks[blocks.clone()],
            scales: &self.scales[blocks],
        }
    }
}

/// Codes and scale of a block. Inlined, so that each path compiles it for its instructions.
#[inline(always)]
fn round_block<C: Integer>(x: &[f32; BLOCK]) -> (Block, f32) {
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
    (Block { codes, corrections }, scale)
}

/// The integer products of one format on one instruction set, on one thread.
pub trait IntegerKernel: Sync {
    /// Rounds the vectors `x` [n, cols]. Done once for a product, not once for each of its tiles.
    fn round(&self, x: &[f32], cols: usize) -> Vectors;

    /// y[c][r] = W[r, :] . x[c] for all rows of `w` and all vectors; every element of `y` has `w.rows()` values.
    fn matmul(&self, w: Matrix<'_>, x: &Vectors, y: &mut [&mut [f32]]);
}

/// The inner loops of one instruction set.
trait Dot<C, const S: u8>: Sync + 'static {
    /// Most vectors that [`Dot::dot`] takes. It takes one or two rows.
    const COLS: usize;
    /// Codes and scale of a block of activations.
    fn round(x: &[f32; BLOCK]) -> (Block, f32);
    /// y[c][at + r] = rows[r] . x[c], without the scale of a row. `x` has as many vectors as `y`.
    fn dot(rows: &[Row<'_>], x: &[Vector<'_>], y: &mut [&mut [f32]], at: usize);
}

/// The integer kernels of the codes `C` with scales of the kind `S`, of the best instructions that `isa` and the CPU have.
pub fn kernel<C: Integer, const S: u8>(isa: Isa) -> &'static dyn IntegerKernel {
    match isa.level() {
        Level::Portable => &Products::<C, portable::Portable, S>(PhantomData),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 if is_x86_feature_detected!("avx512vnni") => {
            &Products::<C, simd::Avx512, S>(PhantomData)
        }
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::Avx512 => &Products::<C, simd::Avx2, S>(PhantomData),
    }
}

/// The kernels of the codes `C` with the inner loops `P` and scales of the kind `S`.
struct Products<C, P, const S: u8>(PhantomData<(C, P)>);

/// Most vectors that any path takes at once.
const MAX_COLS: usize = 4;

impl<C: Integer, P: Dot<C, S>, const S: u8> IntegerKernel for Products<C, P, S> {
    fn round(&self, x: &[f32], cols: usize) -> Vectors {
        Vectors::round(x, cols, P::round)
    }

    fn matmul(&self, w: Matrix<'_>, x: &Vectors, y: &mut [&mut [f32]]) {
        if w.cols() == 0 {
            return y.iter_mut().for_each(|y| y.fill(0.0));
        }
        assert_eq!(x.per_vector, w.cols().div_ceil(BLOCK));
        let rows = Rows::new::<C>(w);
        for (block, y) in y.chunks_mut(P::COLS).enumerate() {
            let vectors: [Vector<'_>; MAX_COLS] =
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
                        *y *= rows.row(r).scale(0);
                    }
                }
            }
        }
    }
}
