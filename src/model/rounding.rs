//! Rounds experts each time they are computed (`--expert-bits`).
//!
//! Previews the output of a converted model, bit for bit, before hours are spent on the conversion. It saves neither reads nor slabs, and
//! rounding takes longer than the product.

use std::convert::Infallible;
use std::sync::Mutex;

use crate::arch::Architecture;
use crate::pool::Pool;
use crate::quant::Matrix;
use crate::quant::encode::{NotFinite, Packing};
use crate::weight::{Block, Piece, Quantised, Rows, RowsError, quantise};

/// The packing of float and FP8 matrices, and the buffers for it.
#[derive(Debug)]
pub struct Rounding {
    packing: Packing,
    blocks: Mutex<Vec<Block>>,
    /// Gate and up are in use at the same time; down takes the place of gate.
    made: [Quantised; 2],
}

impl Rounding {
    /// Empty buffers.
    pub fn new(packing: Packing) -> Rounding {
        Rounding {
            packing,
            blocks: Mutex::default(),
            made: Default::default(),
        }
    }

    /// Bytes that the buffers of `threads` threads will take.
    pub fn bytes(arch: &Architecture, threads: usize) -> u64 {
        let weights = (arch.hidden_size as u64).saturating_mul(arch.experts.width as u64);
        // Two matrices of at most a byte a weight and a scale for 16; a block has 8 bytes a weight and one more for codes, twice
        // while its buffers grow.
        let block = Rows::BLOCK_WEIGHTS.min(weights).saturating_mul(18);
        (weights.saturating_mul(5) / 2).saturating_add(block.saturating_mul(threads as u64))
    }

    /// `matrices` (one or two) rounded. Packed ones stay as they are.
    ///
    /// # Errors
    /// Which of them has a weight that is infinite or NaN.
    pub fn round<'a, const N: usize>(
        &'a mut self,
        pool: &Pool,
        matrices: [Matrix<'a>; N],
    ) -> Result<[Matrix<'a>; N], (usize, NotFinite)> {
        let Rounding {
            packing,
            blocks,
            made,
        } = self;
        for (i, (matrix, made)) in matrices.iter().zip(&mut *made).enumerate() {
            if matrix.format().is_floating() {
                round_one(pool, *packing, matrix, blocks, made).map_err(|e| (i, e))?;
            }
        }
        let mut rounded = matrices;
        for (matrix, made) in rounded.iter_mut().zip(&*made) {
            if matrix.format().is_floating() {
                let (rows, cols) = (matrix.rows(), matrix.cols());
                let format = packing.format(cols);
                *matrix = Matrix::with_scales(format, rows, cols, &made.bytes, &made.scales)
                    .expect("rounded to this format")
                    .with_activations(matrix.activations());
            }
        }
        Ok(rounded)
    }
}

fn round_one(
    pool: &Pool,
    packing: Packing,
    matrix: &Matrix<'_>,
    blocks: &Mutex<Vec<Block>>,
    made: &mut Quantised,
) -> Result<(), NotFinite> {
    let rows = Rows {
        format: matrix.format(),
        rows: matrix.rows(),
        cols: matrix.cols(),
    };
    let (bytes, scales) = (matrix.bytes(), matrix.scales());
    let copy = |piece, at: u64, buf: &mut [u8]| {
        let from = match piece {
            Piece::Weights => bytes,
            Piece::Scales => scales,
        };
        buf.copy_from_slice(&from[at as usize..][..buf.len()]);
        Ok::<_, Infallible>(())
    };
    quantise(pool, rows, packing, copy, blocks, made).map_err(|e| match e {
        RowsError::Read(never) => match never {},
        RowsError::NotFinite(found) => found,
    })
}
