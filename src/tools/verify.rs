//! Compares the content of mirrors with the primaries, at the speed of the drives.
//!
//! The same block of all copies of a file is read at once, each copy into its own slab, and compared when all are complete.

use std::path::PathBuf;
use std::sync::Arc;

use colibri_ring::{
    DirectMode, DirectRefused, EngineError, File, Files, Options, Range, ReadError, Replica,
};

use super::ordered_reads::{OrderedReads, ReadGroup, StartError};
use crate::shards::{MirrorFile, Shards};

/// Bytes that are compared at a time.
const BLOCK: u64 = 4 << 20;

/// Blocks of each copy that are read at once, to keep its drive busy while others are behind.
const AHEAD: usize = 12;

/// Why mirrors could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// O_DIRECT was required and refused.
    #[error(transparent)]
    Direct(#[from] DirectRefused),
    /// The engine has stopped, or a primary cannot be read.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine does not run, or there is no memory to read into.
    #[error(transparent)]
    Start(#[from] StartError),
}

/// How one mirror compares with the primaries.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Bytes that were compared and are the same.
    pub bytes: u64,
    /// The first difference, in the order of the files and of the bytes in them. Nothing after it was compared.
    pub difference: Option<Difference>,
}

/// Where a mirror differs.
#[derive(Debug)]
pub struct Difference {
    /// Index of the file.
    pub file: usize,
    /// First byte that differs, or cannot be read.
    pub offset: u64,
    /// The tensor that the byte belongs to; `None` in the header.
    pub tensor: Option<String>,
    /// Why it could not be read, if that is the difference.
    pub unreadable: Option<ReadError>,
}

/// A block of one file, and the mirrors whose copies are compared with the primary's.
struct Block {
    file: usize,
    offset: u64,
    len: u64,
    mirrors: Vec<usize>,
}

/// A file and its supposed copies.
#[derive(Clone, Debug)]
pub struct Copies {
    /// The original.
    pub primary: Arc<File>,
    /// The copies, at most one of each mirror.
    pub copies: Vec<MirrorFile>,
}

/// Compares every file that a mirror serves, byte for byte. `progress` is told the bytes of each compared block.
///
/// # Errors
/// When the engine does not run, or a primary cannot be read. A mirror that cannot be read is a difference.
pub fn verify(
    shards: &Shards,
    direct: DirectMode,
    options: Options,
    mut progress: impl FnMut(u64),
) -> Result<Vec<Verdict>, VerifyError> {
    let of_file = |(i, primary): (usize, &Arc<File>)| Copies {
        primary: primary.clone(),
        copies: shards.copies(i).to_vec(),
    };
    let all: Vec<Copies> = shards.files().iter().enumerate().map(of_file).collect();
    let mirrors = shards.mirrors().len();
    let mut verdicts = compare(&all, mirrors, direct, options, || true, &mut progress)?;
    for difference in verdicts.iter_mut().filter_map(|v| v.difference.as_mut()) {
        difference.tensor = tensor_at(shards, difference.file, difference.offset);
    }
    Ok(verdicts)
}

/// Compares files with their copies, which belong to `mirrors` mirrors, while `go_on` returns true. Names no tensors.
///
/// # Errors
/// Those of [`verify`].
pub fn compare(
    all: &[Copies],
    mirrors: usize,
    direct: DirectMode,
    options: Options,
    go_on: impl Fn() -> bool,
    progress: &mut impl FnMut(u64),
) -> Result<Vec<Verdict>, VerifyError> {
    let mut verdicts: Vec<Verdict> = Vec::new();
    verdicts.resize_with(mirrors, Verdict::default);
    // Each copy is a separate file here: no copy may stand in for another.
    let mut list = Vec::new();
    let mut first = Vec::new();
    for Copies { primary, copies } in all {
        first.push(list.len() as u32);
        let copies = copies.iter().map(|copy| &copy.file);
        for (source, file) in std::iter::once(primary).chain(copies).enumerate() {
            let file = file.clone();
            list.push(vec![Replica::new(file, source)]);
        }
    }
    let files = Files::new(list, direct)?;
    let copies = 1 + mirrors;
    let mut reads = OrderedReads::new(files, BLOCK, (AHEAD * copies, copies), options)?;
    let mut blocks = blocks(all).peekable();
    while go_on() {
        while let Some(&(file, offset, len)) = blocks.peek() {
            let (copies, mirrors): (Vec<u32>, Vec<usize>) = (all[file].copies.iter().zip(1..))
                .filter(|(copy, _)| verdicts[copy.mirror].difference.is_none())
                .map(|(copy, at)| (at, copy.mirror))
                .unzip();
            if !mirrors.is_empty() {
                if reads.free() <= mirrors.len() {
                    break;
                }
                let range = |at: u32| Range {
                    file: first[file] + at,
                    offset,
                    len,
                    part: 0,
                };
                let ranges: Vec<Range> = std::iter::once(0).chain(copies).map(range).collect();
                let block = Block {
                    file,
                    offset,
                    len,
                    mirrors,
                };
                reads.push(block, &ranges);
            }
            blocks.next();
        }
        let Some(group) = reads.next()? else {
            return Ok(verdicts);
        };
        progress(group.tag.len * group.tag.mirrors.len() as u64);
        compare_block(&mut reads, group, &mut verdicts)?;
    }
    Ok(verdicts)
}

/// Bytes that [`verify`] compares, each mirror counted.
pub fn bytes_to_compare(shards: &Shards) -> u64 {
    let of_file = |i: usize| shards.files()[i].size() * shards.copies(i).len() as u64;
    (0..shards.files().len()).map(of_file).sum()
}

/// All blocks of all files: file, offset, length.
fn blocks(all: &[Copies]) -> impl Iterator<Item = (usize, u64, u64)> {
    (all.iter().enumerate()).flat_map(|(i, copies)| {
        let size = copies.primary.size();
        (0..size.div_ceil(BLOCK)).map(move |b| (i, b * BLOCK, BLOCK.min(size - b * BLOCK)))
    })
}

/// Compares a block with its copies and releases its slabs.
fn compare_block(
    reads: &mut OrderedReads<Block>,
    ReadGroup { tag: block, blocks }: ReadGroup<Block>,
    verdicts: &mut [Verdict],
) -> Result<(), EngineError> {
    let mut blocks = blocks.into_iter();
    let primary = blocks.next().expect("a block has a primary")?;
    for (&mirror, copy) in block.mirrors.iter().zip(blocks) {
        let verdict = &mut verdicts[mirror];
        let (same, unreadable) = match copy {
            Ok(slab) => {
                let (bytes, copy) = (reads.bytes(primary), reads.bytes(slab));
                let differs = || bytes.iter().zip(copy).position(|(a, b)| a != b);
                let same = match bytes == copy {
                    true => block.len,
                    false => differs().unwrap_or(0) as u64,
                };
                reads.release(slab);
                (same, None)
            }
            Err(error) => (0, Some(error)),
        };
        // An earlier block may have differed after this one was queued.
        if verdict.difference.is_some() {
            continue;
        }
        verdict.bytes += same;
        if same < block.len {
            verdict.difference = Some(Difference {
                file: block.file,
                offset: block.offset + same,
                tensor: None,
                unreadable,
            });
        }
    }
    reads.release(primary);
    Ok(())
}

/// The tensor that a byte of a file belongs to.
fn tensor_at(shards: &Shards, file: usize, offset: u64) -> Option<String> {
    let holds = |t: &crate::shards::Tensor<'_>| {
        t.file == file && t.offset <= offset && offset - t.offset < t.bytes
    };
    shards.iter().find(holds).map(|t| t.name.to_owned())
}

/// The path of a file in a mirror, for messages.
pub fn path_in_mirror(shards: &Shards, mirror: usize, file: usize) -> PathBuf {
    let name = shards.files()[file].path().file_name().unwrap_or_default();
    shards.mirrors()[mirror].join(name)
}
