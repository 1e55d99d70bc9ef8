//! Writes one shard: all threads read, convert and write blocks of rows.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use colibri_ring::Advice;

use super::checksums::Checksums;
use super::files::Sources;
use super::header::tensors;
use super::plan::{Item, Output, Shard, Span};
use super::{ConvertError, shard_path};
use crate::pool::Pool;
use crate::quant::Format;
use crate::quant::encode::NotFinite;
use crate::shards::{Pieces, ShardWriter};
use crate::weight::{Block, Piece, RowsError, Seen, Zeros, check_read};

/// Bytes of a piece that is only copied.
const COPY: u64 = 4 << 20;

/// One block of an item.
#[derive(Clone, Copy)]
struct Job<'a> {
    item: &'a Item,
    /// Where its scales and weights begin in the data section.
    scales_at: u64,
    weights_at: u64,
    step: Step,
    seen: &'a Watched,
}

/// What has been seen of the weights and of the scales of an item.
#[derive(Default)]
struct Watched([Seen; 2]);

impl Watched {
    fn of(&self, piece: Piece) -> &Seen {
        match piece {
            Piece::Weights => &self.0[0],
            Piece::Scales => &self.0[1],
        }
    }
}

/// How a piece of an item is stored, for [`check_read`]; `None` for what may be anything.
fn kind(item: &Item, piece: Piece) -> Option<Option<Format>> {
    match piece {
        Piece::Weights => item.source_format().map(Some),
        Piece::Scales => Some(None),
    }
}

/// Refuses items whose source has zeros where weights should be: zeros are converted to zeros, after which their cause cannot be seen.
fn check(shard: &Shard, seen: &[Watched], sources: &Sources) -> Result<(), ConvertError> {
    if shard.synthetic {
        return Ok(());
    }
    for (item, seen) in shard.items.iter().zip(seen) {
        let zeros = match item.padded {
            true => Zeros::Rows,
            false => Zeros::Few,
        };
        for (piece, span) in [
            (Piece::Scales, item.from_scales),
            (Piece::Weights, Some(item.from)),
        ] {
            let (Some(span), Some(format)) = (span, kind(item, piece)) else {
                continue;
            };
            if !seen.of(piece).is_suspicious() {
                continue;
            }
            let damaged = |found| ConvertError::Zeros {
                file: sources.path(span.file).to_path_buf(),
                name: item.weights.name.clone(),
                found,
            };
            let read = |at, block: &mut [u8]| read(sources, Some(span), at, block);
            check_read(format, zeros, span.bytes, read, damaged)?;
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Step {
    /// Bytes of the scales or the weights from `start` on.
    Copy { piece: Piece, start: u64, len: u64 },
    /// A block of rows.
    Rows(usize),
}

/// Writes one shard: it has its final name when it is complete and on the disk, or not at all.
///
/// # Errors
/// A failing read or write, a weight that cannot be quantised, zeros where weights should be, or a wish to stop.
pub fn shard(
    out: &Path,
    shard: &Shard,
    sources: &Sources,
    sums: &mut Checksums,
    pool: &Pool,
    stop: &AtomicBool,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), ConvertError> {
    let (planned, metadata) = tensors(shard);
    let writer = ShardWriter::create(&shard_path(out, &shard.name), &planned, &metadata)?;
    writer.reserve()?;
    let target = Target {
        writer: &writer,
        pieces: Pieces::default(),
    };
    let seen: Vec<Watched> = shard.items.iter().map(|_| Watched::default()).collect();
    let jobs = jobs(shard, &seen);
    // A block for each thread, which keeps its buffers from one job to the next.
    let blocks: Mutex<Vec<Block>> = Mutex::new(Vec::new());
    let failed = AtomicBool::new(false);
    let error = Mutex::new(None);
    pool.run(jobs.len(), &|i| {
        if failed.load(Ordering::Relaxed) {
            return;
        }
        let lock = || blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut block = lock().pop().unwrap_or_default();
        let done = if stop.load(Ordering::Relaxed) {
            Err(ConvertError::Stopped)
        } else {
            run(&jobs[i], sources, &target, &mut block)
        };
        lock().push(block);
        match done {
            Ok(read) => progress(read),
            Err(e) => {
                failed.store(true, Ordering::Relaxed);
                let mut first = error.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(e);
            }
        }
    });
    match error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => {
            check(shard, &seen, sources)?;
            sums.note(out, shard, target.pieces.total())?;
            Ok(writer.finish()?)
        }
    }
}

/// A shard that is being written, and the sum of what was written.
struct Target<'a> {
    writer: &'a ShardWriter,
    pieces: Pieces,
}

impl Target<'_> {
    fn write(&self, data: &[u8], at: u64) -> Result<(), ConvertError> {
        self.pieces.add(data, at);
        Ok(self.writer.write_at(data, at)?)
    }
}

/// Floats that are kept are as bad with an infinity or a NaN as those that are converted. `start` is the offset in the tensor.
fn check_copied(item: &Item, start: u64, bytes: &[u8]) -> Result<(), NotFinite> {
    if item.format != Some(Format::F32) {
        return Ok(());
    }
    let cols = item.weights.shape.last().map_or(1, |n| *n as usize).max(1);
    for (i, value) in bytes.chunks_exact(4).enumerate() {
        let value = f32::from_le_bytes(value.try_into().unwrap_or_default());
        if !value.is_finite() {
            let at = start as usize / 4 + i;
            return Err(NotFinite {
                row: at / cols,
                column: at % cols,
                value,
            });
        }
    }
    Ok(())
}

/// Cuts the items of a shard into jobs, in the order of the file.
fn jobs<'a>(shard: &'a Shard, seen: &'a [Watched]) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    let mut at = 0;
    for (item, seen) in shard.items.iter().zip(seen) {
        let len = |output: &Output| output.planned().and_then(|p| p.bytes()).unwrap_or(0);
        let scales_at = at;
        let weights_at = at + item.scales.as_ref().map_or(0, len);
        at = weights_at + len(&item.weights);
        let mut push = |step| {
            jobs.push(Job {
                item,
                scales_at,
                weights_at,
                step,
                seen,
            });
        };
        if let Some((rows, _)) = item.work.rows() {
            (0..rows.blocks()).for_each(|block| push(Step::Rows(block)));
            continue;
        }
        for (piece, span) in [
            (Piece::Scales, item.from_scales),
            (Piece::Weights, Some(item.from)),
        ] {
            let bytes = span.map_or(0, |span| span.bytes);
            for start in (0..bytes).step_by(COPY as usize) {
                let len = COPY.min(bytes - start);
                push(Step::Copy { piece, start, len });
            }
        }
    }
    jobs
}

/// Does one job with the buffers of `block`, and returns how many bytes it read.
fn run(
    job: &Job<'_>,
    sources: &Sources,
    target: &Target<'_>,
    block: &mut Block,
) -> Result<u64, ConvertError> {
    let Job { item, step, .. } = *job;
    let mut total = 0;
    let not_finite = |source| ConvertError::NotFinite {
        file: sources.path(item.from.file).to_path_buf(),
        name: item.weights.name.clone(),
        source,
    };
    let mut read = |piece, offset: u64, buf: &mut [u8]| {
        let span = match piece {
            Piece::Weights => Some(item.from),
            Piece::Scales => item.from_scales,
        };
        total += buf.len() as u64;
        read(sources, span, offset, buf)?;
        if let Some(format) = kind(item, piece) {
            job.seen.of(piece).look(format, offset, buf);
        }
        Ok(())
    };
    match (step, item.work.rows()) {
        (Step::Copy { piece, start, len }, _) => {
            block.codes.resize(len as usize, 0);
            read(piece, start, &mut block.codes)?;
            check_copied(item, start, &block.codes).map_err(not_finite)?;
            let base = match piece {
                Piece::Weights => job.weights_at,
                Piece::Scales => job.scales_at,
            };
            target.write(&block.codes, base + start)?;
        }
        (Step::Rows(index), Some((rows, packing))) => {
            let range = rows.block(index);
            rows.convert(range.clone(), packing, &mut read, block)
                .map_err(|e| match e {
                    RowsError::Read(e) => e,
                    RowsError::NotFinite(source) => not_finite(source),
                })?;
            // Every row of a format takes the same bytes.
            let offset = |len: usize| (len / range.len().max(1) * range.start) as u64;
            target.write(&block.codes, job.weights_at + offset(block.codes.len()))?;
            target.write(&block.scales, job.scales_at + offset(block.scales.len()))?;
        }
        (Step::Rows(_), None) => {}
    }
    Ok(total)
}

/// Reads bytes of the source, and lets the page cache forget them.
fn read(
    sources: &Sources,
    span: Option<Span>,
    offset: u64,
    buf: &mut [u8],
) -> Result<(), ConvertError> {
    const PAGE: u64 = 4096;
    let Some((span, file)) = span.and_then(|span| Some((span, sources.file(span.file)?))) else {
        return Ok(());
    };
    let start = span.offset + offset;
    file.read_at(buf, start)?;
    let first = start - start % PAGE;
    let end = (start + buf.len() as u64).next_multiple_of(PAGE);
    file.advise(first, end - first, Advice::DontNeed);
    Ok(())
}
