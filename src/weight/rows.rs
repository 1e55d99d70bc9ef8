//! Rows of a stored matrix, brought into another format a block at a time.

use std::ops::Range;

use crate::quant::encode::{NotFinite, Packing, encode};
use crate::quant::{FP8_BLOCK, Format, Matrix};

/// A matrix to be read by rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// How it is stored.
    pub format: Format,
    /// Output size.
    pub rows: usize,
    /// Input size.
    pub cols: usize,
}

/// Which bytes of a matrix are to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Floats or codes.
    Weights,
    /// Scales.
    Scales,
}

/// Why rows could not be converted.
#[derive(Debug)]
pub enum RowsError<E> {
    /// They could not be read.
    Read(E),
    /// A weight is infinite or NaN; the row is one of the matrix.
    NotFinite(NotFinite),
}

/// Buffers of one thread, and the last block that it converted.
#[derive(Debug, Default)]
pub struct Block {
    bytes: Vec<u8>,
    stored_scales: Vec<u8>,
    values: Vec<f32>,
    /// The rows in the new format.
    pub codes: Vec<u8>,
    /// Their scales; empty for floats.
    pub scales: Vec<u8>,
}

impl Rows {
    /// Weights of a block, about. Eight bytes a weight are in use meanwhile: what was read, and f32.
    pub const BLOCK_WEIGHTS: u64 = 1 << 20;

    /// Rows of a block: the k-th block of a matrix starts at k times as many.
    pub fn block_rows(&self) -> usize {
        let rows = (Self::BLOCK_WEIGHTS as usize / self.cols.max(1)).max(1);
        match self.format {
            // A block of scales is not cut.
            format if format.is_fp8() => rows.next_multiple_of(FP8_BLOCK),
            _ => rows,
        }
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.rows.div_ceil(self.block_rows())
    }

    /// The rows of a block.
    pub fn block(&self, index: usize) -> Range<usize> {
        let start = index * self.block_rows();
        start..self.rows.min(start + self.block_rows())
    }

    /// Converts the rows `range`, which are one of [`Rows::block`], to `packing`, or to f32: `block` holds the result. `read` is
    /// given an offset in the bytes of the whole matrix or of its scales.
    ///
    /// # Errors
    /// A failing read, and a weight that is infinite or NaN.
    pub fn convert<E>(
        &self,
        range: Range<usize>,
        packing: Option<Packing>,
        mut read: impl FnMut(Piece, u64, &mut [u8]) -> Result<(), E>,
        block: &mut Block,
    ) -> Result<(), RowsError<E>> {
        let Rows { format, cols, .. } = *self;
        let part = |start: usize, end: usize, row: usize| (start * row) as u64..(end * row) as u64;
        let weights = part(
            range.start,
            range.end,
            format.row_bytes(cols).unwrap_or(usize::MAX),
        );
        let scales = match format {
            format if format.is_fp8() => range.start / FP8_BLOCK..range.end.div_ceil(FP8_BLOCK),
            _ => range.clone(),
        };
        let scales = part(
            scales.start,
            scales.end,
            format.scale_row_bytes(cols).unwrap_or(usize::MAX),
        );
        for (piece, wanted, buf) in [
            (Piece::Weights, &weights, &mut block.bytes),
            (Piece::Scales, &scales, &mut block.stored_scales),
        ] {
            buf.resize((wanted.end - wanted.start) as usize, 0);
            if !buf.is_empty() {
                read(piece, wanted.start, buf).map_err(RowsError::Read)?;
            }
        }
        let (bytes, scales) = (&block.bytes, &block.stored_scales);
        let matrix = Matrix::with_scales(format, range.len(), cols, bytes, scales)
            .expect("buffers of the size that the format takes");
        block.values.clear();
        block.values.resize(range.len() * cols, 0.0);
        if cols > 0 {
            for (row, values) in block.values.chunks_exact_mut(cols).enumerate() {
                matrix.add_row(row, 1.0, values);
            }
        }
        block.codes.clear();
        block.scales.clear();
        let Some(packing) = packing else {
            if let Some(at) = block.values.iter().position(|value| !value.is_finite()) {
                return Err(RowsError::NotFinite(NotFinite {
                    row: range.start + at / cols,
                    column: at % cols,
                    value: block.values[at],
                }));
            }
            block
                .codes
                .extend_from_slice(bytemuck::cast_slice(&block.values));
            return Ok(());
        };
        let (codes, scales) = (&mut block.codes, &mut block.scales);
        encode(packing, cols, &block.values, codes, scales).map_err(|found| {
            RowsError::NotFinite(NotFinite {
                row: range.start + found.row,
                ..found
            })
        })
    }
}
