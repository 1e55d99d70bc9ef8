//! Multiplies the formats with scales: int8, int4, int2, FP8 and MXFP4, whose codes become f32 exactly.
//!
//! # Reduction order
//!
//! A row is cut into blocks of [`BLOCK`] columns, the last one padded with weights and activations of +0. The columns
//! of a block have *positions* p = 16 k + i (k below 4, i below 16):
//!
//! - int8 and FP8: position p is column p;
//! - int4, int2 and MXFP4: position 16 k + i is column 4 i + k, so that field k of sixteen words meets sixteen neighbouring
//!   activations, once these have been brought into the same order.
//!
//! Lane 16 (k % 2) + i takes the positions that belong to it, k ascending, block by block, as the float formats do
//! ([`crate::quant`]): `lane = fma(w, x, lane)` from +0, and the 32 lanes are added in pairs. Here w is
//!
//! - with one scale a row: the code; the sum of the lanes is multiplied by the scale at the end;
//! - with groups or blocks: the code times the scale, rounded to f32.
//!
//! The sums over rows take `y = fma(a * s, code, y)` for every weight, `a * s` rounded, rows ascending.

mod fp4;
mod fp8;
mod int2;
mod int4;
mod int8;
pub mod integer;
mod portable;
#[cfg(target_arch = "x86_64")]
mod simd;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};
use std::borrow::Cow;
use std::marker::PhantomData;

use super::Matrix;
use super::format::{FP8_BLOCK, MXFP4_GROUP};
use super::kernel::{Isa, Kernel, Level};
use crate::quant::Format;

pub use fp4::Fp4;
pub use fp8::Fp8;
pub use int2::Int2;
pub use int4::Int4;
pub use int8::Int8;

/// Columns of a block.
pub const BLOCK: usize = 64;
/// Positions that share k.
const QUARTER: usize = 16;

/// How codes are stored.
pub trait Code: Sync + 'static {
    /// Codes of a byte.
    const PER_BYTE: usize;
    /// Bytes of a block.
    const BYTES: usize = BLOCK / Self::PER_BYTE;
    /// Whether position 16 k + i is column 4 i + k.
    const INTERLEAVED: bool;
    /// The code of field `field` of `byte`.
    fn decode(byte: u8, field: usize) -> f32;
}

/// The column of position `p` of a block.
fn column<C: Code>(p: usize) -> usize {
    if C::INTERLEAVED {
        4 * (p % QUARTER) + p / QUARTER
    } else {
        p
    }
}

/// Codes that every instruction set can unpack.
#[cfg(target_arch = "x86_64")]
pub trait Packed: Code + simd::Unpack<__m256> + simd::Unpack<__m512> {}
#[cfg(target_arch = "x86_64")]
impl<C: Code + simd::Unpack<__m256> + simd::Unpack<__m512>> Packed for C {}
/// Codes that every instruction set can unpack.
#[cfg(not(target_arch = "x86_64"))]
pub trait Packed: Code {}
#[cfg(not(target_arch = "x86_64"))]
impl<C: Code> Packed for C {}

/// One scale a row.
pub const ROW: u8 = 0;
/// One scale a group of whole blocks.
pub const GROUP: u8 = 1;
/// Groups that end inside a block.
pub const FINE: u8 = 2;
/// As [`GROUP`], with BF16 scales.
pub const GROUP_BF16: u8 = 3;
/// One scale for each half of a block: a power of two, stored as its exponent.
pub const HALF: u8 = 4;

/// Whether a group is of whole blocks.
const fn is_grouped(scales: u8) -> bool {
    matches!(scales, GROUP | GROUP_BF16)
}

/// The kernels of the codes `C` on `isa`, with scales of the kind `S`.
pub fn kernel<C: Packed, const S: u8>(isa: Isa) -> &'static dyn Kernel {
    match isa.level() {
        Level::Portable => &PackedKernel::<C, portable::Portable, S>(PhantomData),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => &PackedKernel::<C, simd::Avx2, S>(PhantomData),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => &PackedKernel::<C, simd::Avx512, S>(PhantomData),
    }
}

/// One row of a matrix.
#[derive(Clone, Copy)]
struct Row<'a> {
    codes: &'a [u8],
    /// f32, BF16 with [`GROUP_BF16`], or E8M0 with [`HALF`]; little-endian, no alignment needed.
    scales: &'a [u8],
    /// Columns that share a scale.
    group: usize,
}

impl Row<'_> {
    #[inline(always)]
    fn scale<const S: u8>(&self, i: usize) -> f32 {
        if S == HALF {
            return e8m0(self.scales[i]);
        }
        if S == GROUP_BF16 {
            let bytes = &self.scales[2 * i..2 * i + 2];
            return half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        }
        let bytes = &self.scales[4 * i..4 * i + 4];
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    /// The scales of both halves of a block. Beyond the row's end it is that of the first half.
    #[inline(always)]
    fn half_scales(&self, block: usize) -> [f32; 2] {
        let first = 2 * block;
        let second = (first + 1).min(self.scales.len() - 1);
        [self.scale::<HALF>(first), self.scale::<HALF>(second)]
    }

    /// The scale of every position of a block. Columns beyond the row's end take the last one.
    fn fine_scales<C: Code>(&self, block: usize) -> [f32; BLOCK] {
        let last = self.scales.len() / 4 - 1;
        std::array::from_fn(|p| {
            let column = block * BLOCK + column::<C>(p);
            self.scale::<FINE>((column / self.group).min(last))
        })
    }

    /// The bytes of a block, padded with zeroes.
    #[cfg(target_arch = "x86_64")]
    fn padded<C: Code>(&self, block: usize) -> [u8; BLOCK] {
        let mut padded = [0; BLOCK];
        let tail = &self.codes[block * C::BYTES..];
        let len = tail.len().min(C::BYTES);
        padded[..len].copy_from_slice(&tail[..len]);
        padded
    }
}

/// 2^(exponent - 127); infinite for 255, which is no number.
#[inline(always)]
pub fn e8m0(exponent: u8) -> f32 {
    // 2^-127 is subnormal.
    f32::from_bits((u32::from(exponent) << 23).max(1 << 22))
}

/// Counts through the blocks of a row: which group, and so which scale, a block has.
struct Groups {
    index: usize,
    left: usize,
    blocks: usize,
}

impl Groups {
    fn new(group: usize) -> Groups {
        let blocks = (group / BLOCK).max(1);
        Groups {
            index: 0,
            left: blocks,
            blocks,
        }
    }

    /// The group of this block. The next call is about the next block.
    #[inline(always)]
    fn next(&mut self) -> usize {
        let index = self.index;
        self.left -= 1;
        if self.left == 0 {
            self.index += 1;
            self.left = self.blocks;
        }
        index
    }
}

/// The inner loops of one instruction set, over a few rows and columns that fit in its registers.
trait PackedLoops<C, const S: u8>: Sync + 'static {
    /// Most columns that [`PackedLoops::dot`] takes.
    const COLS: usize;
    /// Rows that [`PackedLoops::dot`] takes with `cols` columns, besides 1.
    fn rows(cols: usize) -> usize;
    /// y[c][at + r] = rows[r] . x[c]. `x` is [y.len(), blocks * BLOCK] by position.
    fn dot(rows: &[Row<'_>], x: &[f32], y: &mut [&mut [f32]], at: usize);
    /// y[p] += sum over r of a[r] * rows[r][p], r ascending, for 1 or 4 rows; y is [blocks * BLOCK] by position.
    fn axpy(rows: &[Row<'_>], a: &[f32], y: &mut [f32]);
}

/// The kernels of the codes `C` with the inner loops `P` and scales of the kind `S`.
struct PackedKernel<C, P, const S: u8>(PhantomData<(C, P)>);

/// Rows that [`PackedLoops::axpy`] adds in one pass over y.
const AXPY_ROWS: usize = 4;

/// The rows of a matrix.
#[derive(Clone, Copy)]
struct Rows<'a> {
    matrix: Matrix<'a>,
    stride: usize,
    /// Bytes of the scales along a row.
    scale_stride: usize,
    group: usize,
}

impl<'a> Rows<'a> {
    fn new<C: Code>(matrix: Matrix<'a>) -> Rows<'a> {
        Rows {
            matrix,
            stride: matrix.cols().div_ceil(C::PER_BYTE),
            scale_stride: matrix.scale_row_bytes(),
            group: match matrix.format() {
                Format::Int4Group(size) => size.max(1) as usize,
                Format::Fp8Block | Format::Fp8BlockBf16 => FP8_BLOCK,
                Format::Mxfp4 => MXFP4_GROUP,
                _ => matrix.cols(),
            },
        }
    }

    fn row(&self, r: usize) -> Row<'a> {
        let scales = match self.matrix.format().is_fp8() {
            true => (self.matrix.row_in_block() + r) / FP8_BLOCK,
            false => r,
        };
        Row {
            codes: &self.matrix.bytes()[r * self.stride..(r + 1) * self.stride],
            scales: &self.matrix.scales()[scales * self.scale_stride..][..self.scale_stride],
            group: self.group,
        }
    }
}

impl<C: Code, P: PackedLoops<C, S>, const S: u8> Kernel for PackedKernel<C, P, S> {
    fn arrange<'x>(&self, x: &'x [f32], cols: usize) -> Cow<'x, [f32]> {
        if cols == 0 || !C::INTERLEAVED && cols.is_multiple_of(BLOCK) {
            return Cow::Borrowed(x);
        }
        let padded = cols.next_multiple_of(BLOCK);
        let mut arranged = vec![0.0; x.len() / cols * padded];
        for (x, arranged) in x.chunks(cols).zip(arranged.chunks_mut(padded)) {
            scatter::<C>(x, arranged);
        }
        Cow::Owned(arranged)
    }

    fn matmul(&self, w: Matrix<'_>, x: &[f32], y: &mut [&mut [f32]]) {
        if w.cols() == 0 {
            return y.iter_mut().for_each(|y| y.fill(0.0));
        }
        let cols = w.cols().next_multiple_of(BLOCK);
        assert_eq!(x.len(), y.len() * cols);
        let rows = Rows::new::<C>(w);
        // A block of columns stays in cache while the rows of the tile pass over it.
        for (block, y) in y.chunks_mut(P::COLS).enumerate() {
            let first = block * P::COLS;
            let x = &x[first * cols..(first + y.len()) * cols];
            let most = P::rows(y.len());
            let mut row = 0;
            while row < w.rows() {
                if most == 4 && row + 4 <= w.rows() {
                    let part: [_; 4] = std::array::from_fn(|r| rows.row(row + r));
                    P::dot(&part, x, y, row);
                    row += 4;
                } else if most == 2 && row + 2 <= w.rows() {
                    P::dot(&[rows.row(row), rows.row(row + 1)], x, y, row);
                    row += 2;
                } else {
                    P::dot(&[rows.row(row)], x, y, row);
                    row += 1;
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

    fn add_rows(&self, w: Matrix<'_>, a: &[f32], y: &mut [f32]) {
        assert_eq!((a.len(), y.len()), (w.rows(), w.cols()));
        if y.is_empty() {
            return;
        }
        let rows = Rows::new::<C>(w);
        let mut arranged = vec![0.0; w.cols().next_multiple_of(BLOCK)];
        scatter::<C>(y, &mut arranged);
        let mut row = 0;
        while row < w.rows() {
            if row + AXPY_ROWS <= w.rows() {
                let part: [_; AXPY_ROWS] = std::array::from_fn(|r| rows.row(row + r));
                P::axpy(&part, &a[row..row + AXPY_ROWS], &mut arranged);
                row += AXPY_ROWS;
            } else {
                P::axpy(&[rows.row(row)], &a[row..=row], &mut arranged);
                row += 1;
            }
        }
        gather::<C>(&arranged, y);
    }
}

/// Copies the columns `x` into the order of positions.
fn scatter<C: Code>(x: &[f32], arranged: &mut [f32]) {
    if !C::INTERLEAVED {
        return arranged[..x.len()].copy_from_slice(x);
    }
    for (x, arranged) in x.chunks(BLOCK).zip(arranged.chunks_exact_mut(BLOCK)) {
        for (i, x) in x.chunks(4).enumerate() {
            for (k, x) in x.iter().enumerate() {
                arranged[QUARTER * k + i] = *x;
            }
        }
    }
}

/// The inverse of [`scatter`].
fn gather<C: Code>(arranged: &[f32], y: &mut [f32]) {
    if !C::INTERLEAVED {
        return y.copy_from_slice(&arranged[..y.len()]);
    }
    for (y, arranged) in y.chunks_mut(BLOCK).zip(arranged.chunks_exact(BLOCK)) {
        for (i, y) in y.chunks_mut(4).enumerate() {
            for (k, y) in y.iter_mut().enumerate() {
                *y = arranged[QUARTER * k + i];
            }
        }
    }
}
