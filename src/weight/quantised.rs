//! Quantises resident matrices while they are read, so that their floats are never in memory as a whole.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::damage::{Zeros, check_read};
use super::error::WeightError;
use super::role::{Role, role};
use super::rows::{Block, Piece, Rows, RowsError};
use super::seen::{Digest, Seen};
use super::stored::Stored;
use crate::arch::{Architecture, TensorId};
use crate::pool::Pool;
use crate::quant::Format;
use crate::quant::encode::Packing;
use crate::shards::{Cache, Dtype, ShardError, Shards, Tensor};

/// What a resident matrix becomes when dense weights become `dense`; `None` where it stays as it is stored.
///
/// The embedding and the head are int8 whatever the others are, as in containers: a token is one row of the one, and
/// the other is read in full for no more than the logits.
pub fn packing_of(id: TensorId, dense: Packing) -> Option<Packing> {
    match role(id) {
        Role::Router => None,
        Role::Embedding => Some(Packing::Int8),
        Role::Dense => Some(dense),
    }
}

/// Bytes that the resident tensor takes when dense weights become `dense`; `None` where it stays as it is stored. Scales of FP8
/// matrices take none then.
pub(super) fn packed_bytes(
    shards: &Shards,
    arch: &Architecture,
    tensor: &Tensor<'_>,
    dense: Packing,
) -> Option<u64> {
    if let Some(owner) = tensor.name.strip_suffix("_scale_inv")
        && let Some(owner) = shards.find(owner)
        && owner.dtype == Dtype::F8E4M3
    {
        return packed_bytes(shards, arch, &owner, dense).map(|_| 0);
    }
    let float = matches!(
        tensor.dtype,
        Dtype::Bf16 | Dtype::F16 | Dtype::F32 | Dtype::F8E4M3
    );
    let &[rows, cols] = tensor.shape else {
        return None;
    };
    let packing = packing_of(arch.names.parse(tensor.name)?, dense).filter(|_| float)?;
    let (rows, cols) = (usize::try_from(rows).ok()?, usize::try_from(cols).ok()?);
    let (row, scale_row) = row_bytes(packing.format(cols), cols);
    let bytes = row.checked_add(scale_row)?.checked_mul(rows)?;
    // Two allocations of whole pages.
    (bytes as u64).checked_add(2 * 4096)
}

/// Bytes of codes and of scales of a row.
fn row_bytes(format: Format, cols: usize) -> (usize, usize) {
    let codes = format.row_bytes(cols).unwrap_or(usize::MAX);
    (codes, 4 * format.row_scales(cols))
}

/// A matrix that was quantised.
#[derive(Debug, Default)]
pub struct Quantised {
    /// Its codes.
    pub bytes: Vec<u8>,
    /// Its scales.
    pub scales: Vec<u8>,
}

/// A matrix that is going to be.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    stored: Stored<'a>,
    rows: Rows,
    packing: Packing,
    result: Arc<OnceLock<Quantised>>,
    zeros: Zeros,
    /// Whether it counts for the digest.
    counts: bool,
}

impl<'a> Plan<'a> {
    /// `None` for what stays as it is: routers, and what is packed already.
    pub fn new(
        id: TensorId,
        stored: Stored<'a>,
        rows: usize,
        cols: usize,
        dense: Packing,
        (zeros, counts): (Zeros, bool),
    ) -> Option<Plan<'a>> {
        let floating = stored.format.is_floating();
        Some(Plan {
            packing: packing_of(id, dense).filter(|_| floating)?,
            rows: Rows {
                format: stored.format,
                rows,
                cols,
            },
            stored,
            result: Arc::default(),
            zeros,
            counts,
        })
    }

    /// What it becomes.
    pub fn format(&self) -> Format {
        self.packing.format(self.rows.cols)
    }

    /// Bytes of codes and scales.
    pub fn bytes(&self) -> u64 {
        let (row, scale_row) = row_bytes(self.format(), self.rows.cols);
        (self.rows.rows as u64).saturating_mul((row + scale_row) as u64)
    }

    /// Bytes that are read for it.
    pub fn bytes_to_read(&self) -> u64 {
        self.stored.tensor.bytes + self.stored.scales.map_or(0, |scales| scales.bytes)
    }

    /// Where it will be.
    pub fn result(&self) -> Arc<OnceLock<Quantised>> {
        self.result.clone()
    }
}

/// Reads and quantises matrices, one after the other, in blocks of rows, a block a thread at a time. `heard` is told the bytes
/// that were read, and `digest`, if given, the sums of what is stored.
///
/// # Errors
/// A failing read, a weight that is infinite or NaN, and more zeros than a model has.
pub(super) fn read(
    shards: &Shards,
    pool: &Pool,
    plans: &[Plan<'_>],
    heard: &(dyn Fn(u64) + Sync),
    mut digest: Option<&mut Digest>,
) -> Result<(), WeightError> {
    let blocks: Mutex<Vec<Block>> = Mutex::new(Vec::new());
    for plan in plans {
        // Set once: a loader finishes once.
        let _ = plan.result.set(read_one(
            shards,
            pool,
            plan,
            &blocks,
            digest.as_deref_mut(),
        )?);
        heard(plan.bytes_to_read());
    }
    Ok(())
}

fn read_one(
    shards: &Shards,
    pool: &Pool,
    plan: &Plan<'_>,
    blocks: &Mutex<Vec<Block>>,
    mut digest: Option<&mut Digest>,
) -> Result<Quantised, WeightError> {
    let stored = &plan.stored;
    let seen = || Seen::new(digest.is_some());
    let weights = (&stored.tensor, Some(stored.format), seen());
    let scales = (stored.scales.as_ref()).map(|scales| {
        let format = stored.format_of_scales();
        (scales, format, seen())
    });
    let read = |piece, at, buf: &mut [u8]| {
        let (tensor, format, seen) = match (piece, &scales) {
            (Piece::Scales, Some(scales)) => scales,
            _ => &weights,
        };
        shards.read_part(tensor, at, buf, Cache::Drop)?;
        seen.look(*format, at, buf);
        Ok::<_, ShardError>(())
    };
    let mut made = Quantised::default();
    let done = quantise(pool, plan.rows, plan.packing, read, blocks, &mut made);
    done.map_err(|e| match e {
        RowsError::Read(e) => WeightError::from(e),
        RowsError::NotFinite(source) => {
            let name = stored.tensor.name.into();
            WeightError::NotFinite { name, source }.in_file(shards, stored.tensor.file)
        }
    })?;
    for (tensor, format, seen) in std::iter::once(weights).chain(scales) {
        if seen.is_suspicious() {
            read_again(shards, tensor, format, plan.zeros)?;
        }
        if let Some(digest) = digest.as_mut().filter(|_| plan.counts) {
            digest.add(tensor.name, seen.total());
        }
    }
    Ok(made)
}

/// Checks the bytes of a tensor in order, a few at a time: blocks of rows came in any order, and were not kept.
fn read_again(
    shards: &Shards,
    tensor: &Tensor<'_>,
    format: Option<Format>,
    zeros: Zeros,
) -> Result<(), WeightError> {
    let damaged = |found| {
        let name = tensor.name.into();
        WeightError::Damaged { name, found }.in_file(shards, tensor.file)
    };
    let read = |at, piece: &mut [u8]| Ok(shards.read_part(tensor, at, piece, Cache::Drop)?);
    check_read(format, zeros, tensor.bytes, read, damaged)
}

/// Quantises the matrix that `read` gives into `made`, in blocks of rows, a block a thread at a time. `blocks` keeps the buffers of
/// the threads.
///
/// # Errors
/// The first error of `read`, and a weight that is infinite or NaN.
pub fn quantise<E: Send>(
    pool: &Pool,
    source: Rows,
    packing: Packing,
    read: impl Fn(Piece, u64, &mut [u8]) -> Result<(), E> + Sync,
    blocks: &Mutex<Vec<Block>>,
    made: &mut Quantised,
) -> Result<(), RowsError<E>> {
    let (row, scale_row) = row_bytes(packing.format(source.cols), source.cols);
    // No larger than a tensor that the index has found in a file.
    made.bytes.resize(source.rows * row, 0);
    made.scales.resize(source.rows * scale_row, 0);
    let per_block = source.block_rows();
    let codes = made.bytes.chunks_mut((per_block * row).max(1));
    let scales = made.scales.chunks_mut((per_block * scale_row).max(1));
    let mut parts: Vec<_> = codes.zip(scales).collect();
    let (failed, error) = (AtomicBool::new(false), Mutex::new(None));
    pool.run_chunks(&mut parts, 1, &|i, part| {
        if failed.load(Ordering::Relaxed) {
            return;
        }
        let lock = || blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut block = lock().pop().unwrap_or_default();
        match source.convert(source.block(i), Some(packing), &read, &mut block) {
            Ok(()) => {
                let (codes, scales) = &mut part[0];
                codes.copy_from_slice(&block.codes);
                scales.copy_from_slice(&block.scales);
            }
            Err(e) => {
                failed.store(true, Ordering::Relaxed);
                let mut first = error.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(e);
            }
        }
        lock().push(block);
    });
    match error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
