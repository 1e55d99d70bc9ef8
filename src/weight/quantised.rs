//! Resident matrices that are quantised while they are read, so that their floats are never in memory as a whole.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::rows::{Block, Piece, Rows, RowsError};
use super::{Role, Stored, Weight, WeightError, role};
use crate::pool::Pool;
use crate::quant::Format;
use crate::quant::encode::Packing;
use crate::shards::{Cache, Dtype, Shards, Tensor};

/// What the resident matrix `name` becomes when dense weights become `dense`; `None` where it stays as it is stored.
///
/// The embedding and the head are int8 whatever the others are, as in containers: a token is one row of each, and
/// they are read in full for no more than the logits.
pub fn packing_of(name: &str, dense: Packing) -> Option<Packing> {
    match role(name) {
        Role::Router => None,
        Role::Embedding => Some(Packing::Int8),
        Role::Dense => Some(dense),
    }
}

/// Bytes that the resident tensor takes when dense weights become `dense`; `None` where it stays as it is stored. Scales of FP8
/// matrices take none then.
pub fn packed_bytes(shards: &Shards, tensor: &Tensor<'_>, dense: Packing) -> Option<u64> {
    if let Some(owner) = tensor.name.strip_suffix("_scale_inv")
        && let Some(owner) = shards.find(owner)
        && owner.dtype == Dtype::F8E4M3
    {
        return packed_bytes(shards, &owner, dense).map(|_| 0);
    }
    let float = matches!(
        tensor.dtype,
        Dtype::Bf16 | Dtype::F16 | Dtype::F32 | Dtype::F8E4M3
    );
    let &[rows, cols] = tensor.shape else {
        return None;
    };
    let packing = packing_of(tensor.name, dense).filter(|_| float)?;
    let (rows, cols) = (usize::try_from(rows).ok()?, usize::try_from(cols).ok()?);
    let format = packing.format(cols);
    let bytes = format.row_bytes(cols)?.checked_mul(rows)? as u64;
    bytes.checked_add(format.scale_bytes(rows, cols)? as u64)
}

/// Reads and quantises a matrix of floats or FP8 in blocks of rows, a block a thread at a time.
///
/// # Errors
/// A failing read, and a weight that is infinite or NaN.
pub fn read(
    shards: &Shards,
    pool: &Pool,
    stored: &Stored<'_>,
    (rows, cols): (usize, usize),
    packing: Packing,
) -> Result<Weight, WeightError> {
    let source = Rows {
        format: stored.format,
        rows,
        cols,
    };
    let format = packing.format(cols);
    let (row, scale_row) = (
        format.row_bytes(cols).unwrap_or(0),
        4 * format.row_scales(cols),
    );
    // As large as a tensor that the index has found, or smaller.
    let (mut bytes, mut scales) = (vec![0; rows * row], vec![0; rows * scale_row]);
    let per_block = source.block_rows();
    let mut parts: Vec<(&mut [u8], &mut [u8])> = bytes
        .chunks_mut((per_block * row).max(1))
        .zip(scales.chunks_mut((per_block * scale_row).max(1)))
        .collect();
    let blocks: Mutex<Vec<Block>> = Mutex::new(Vec::new());
    let (failed, error) = (AtomicBool::new(false), Mutex::new(None));
    pool.run_chunks(&mut parts, 1, &|i, part| {
        let lock = || blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.load(Ordering::Relaxed) {
            return;
        }
        let mut block = lock().pop().unwrap_or_default();
        let piece = |piece, at, buf: &mut [u8]| match (piece, &stored.scales) {
            (Piece::Scales, Some(scales)) => shards.read_part(scales, at, buf, Cache::Drop),
            _ => shards.read_part(&stored.tensor, at, buf, Cache::Drop),
        };
        match source.convert(source.block(i), Some(packing), piece, &mut block) {
            Ok(()) => {
                let (codes, scales) = &mut part[0];
                codes.copy_from_slice(&block.codes);
                scales.copy_from_slice(&block.scales);
            }
            Err(e) => {
                failed.store(true, Ordering::Relaxed);
                let e = match e {
                    RowsError::Read(e) => e.into(),
                    RowsError::NotFinite(source) => WeightError::NotFinite {
                        name: stored.tensor.name.into(),
                        source,
                    },
                };
                let mut first = error.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(e);
            }
        }
        lock().push(block);
    });
    match error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(Weight {
            format,
            rows,
            cols,
            bytes,
            scales,
        }),
    }
}

/// Whether a stored matrix can be quantised: packed ones stay.
pub fn is_float(format: Format) -> bool {
    matches!(
        format,
        Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8Block
    )
}
