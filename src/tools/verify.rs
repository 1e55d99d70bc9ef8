//! Compares the content of mirrors with the primaries, as fast as the drives give it.
//!
//! The same block of all copies of a file is read at once, each into its own slab; when all are in they are compared.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use colibri_ring::{
    Class, DirectMode, DirectRefused, Engine, EngineError, Event, File, Files, Options, Priority,
    Range, ReadError, Replica, SlabId,
};

use crate::memory::{self, MemoryError};
use crate::shards::{MirrorFile, Shards};

/// Bytes that are compared at a time.
const BLOCK: u64 = 4 << 20;

/// Blocks of each copy that are read at once, to keep its drive busy while others are behind.
const AHEAD: usize = 12;

/// Why mirrors could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// O_DIRECT was insisted on.
    #[error(transparent)]
    Direct(#[from] DirectRefused),
    /// The engine does not run, or a primary cannot be read.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// There is no memory to read into.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// What was found out about one mirror.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Bytes that were compared and are the same.
    pub bytes: u64,
    /// The first difference, in the order of the files and of the bytes in them. Nothing after it was compared.
    pub difference: Option<Difference>,
}

/// Where a mirror is no copy.
#[derive(Debug)]
pub struct Difference {
    /// Index of the file.
    pub file: usize,
    /// First byte that differs, or cannot be read.
    pub offset: u64,
    /// The tensor that the byte belongs to; `None` in the header.
    pub tensor: Option<String>,
    /// Why it could not be read, if that is what is wrong.
    pub unreadable: Option<ReadError>,
}

/// A block of one file and the slabs that its copies are read into.
struct Group {
    file: usize,
    offset: u64,
    len: u64,
    /// The primary's slab, then (mirror, slab).
    primary: SlabId,
    mirrors: Vec<(usize, SlabId)>,
    missing: usize,
    failed: Vec<(usize, ReadError)>,
}

/// A file and what should be copies of it.
#[derive(Clone, Debug)]
pub struct Copies {
    /// What they are compared with.
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

/// Compares files with their copies, which belong to `mirrors` mirrors, as long as `go_on` says so. Names no tensors.
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
    // Each copy is a file of its own here: no copy may stand in for another.
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
    let slab_bytes = BLOCK + 2 * files.align();
    let class = Class {
        bytes: slab_bytes as usize,
        count: memory::slabs_that_fit(AHEAD * copies, copies, slab_bytes)?,
    };
    let mut engine = Engine::new(&files, &[class], options)?;
    let mut free: Vec<SlabId> = (0..engine.slabs() as u32).map(SlabId).collect();
    let mut groups: VecDeque<Group> = VecDeque::new();
    let mut blocks = blocks(all).peekable();
    while go_on() {
        while let Some(&(file, offset, len)) = blocks.peek() {
            let mirrors: Vec<(usize, usize)> = (all[file].copies.iter().enumerate())
                .filter(|(_, copy)| verdicts[copy.mirror].difference.is_none())
                .map(|(at, copy)| (copy.mirror, at + 1))
                .collect();
            if !mirrors.is_empty() {
                if free.len() <= mirrors.len() {
                    break;
                }
                let mut read = |at: usize| {
                    let slab = free.pop().expect("counted before");
                    let range = Range {
                        file: first[file] + at as u32,
                        offset,
                        len,
                        part: 0,
                    };
                    let layout = files.layout(&[range]).expect("inside a file");
                    engine.read(slab, Priority::Demand, layout);
                    slab
                };
                groups.push_back(Group {
                    file,
                    offset,
                    len,
                    primary: read(0),
                    missing: 1 + mirrors.len(),
                    mirrors: mirrors
                        .into_iter()
                        .map(|(mirror, at)| (mirror, read(at)))
                        .collect(),
                    failed: Vec::new(),
                });
            }
            blocks.next();
        }
        engine.flush();
        if groups.is_empty() {
            return Ok(verdicts);
        }
        match engine.wait()? {
            Event::Full(slab) => group_of(&mut groups, slab).missing -= 1,
            Event::Failed(slab, error) => {
                let group = group_of(&mut groups, slab);
                group.missing -= 1;
                let mirror = group.mirrors.iter().find(|(_, s)| *s == slab);
                match mirror {
                    None => return Err(EngineError::Read(error).into()),
                    Some(&(mirror, _)) => group.failed.push((mirror, error)),
                }
            }
            Event::Part(..) | Event::Dropped(_) => {}
        }
        // In order, so that the first difference is the first.
        while groups.front().is_some_and(|group| group.missing == 0) {
            let group = groups.pop_front().expect("there is one");
            progress(group.len * group.mirrors.len() as u64);
            compare_group(&engine, &group, &mut verdicts);
            free.push(group.primary);
            engine.release(group.primary);
            for (mirror, slab) in &group.mirrors {
                free.push(*slab);
                if group.failed.iter().all(|(failed, _)| failed != mirror) {
                    engine.release(*slab);
                }
            }
            note_failures(group, &mut verdicts);
        }
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

fn group_of(groups: &mut VecDeque<Group>, slab: SlabId) -> &mut Group {
    let holds = |g: &&mut Group| g.primary == slab || g.mirrors.iter().any(|(_, s)| *s == slab);
    groups
        .iter_mut()
        .find(holds)
        .expect("every read belongs to a group")
}

fn compare_group(engine: &Engine, group: &Group, verdicts: &mut [Verdict]) {
    let primary = engine.payload(group.primary, 0);
    for &(mirror, slab) in &group.mirrors {
        let verdict = &mut verdicts[mirror];
        if verdict.difference.is_some() || group.failed.iter().any(|(failed, _)| *failed == mirror)
        {
            continue;
        }
        let copy = engine.payload(slab, 0);
        if primary == copy {
            verdict.bytes += group.len;
            continue;
        }
        let at = primary
            .iter()
            .zip(copy)
            .position(|(a, b)| a != b)
            .unwrap_or(0);
        let offset = group.offset + at as u64;
        verdict.bytes += at as u64;
        verdict.difference = Some(Difference {
            file: group.file,
            offset,
            tensor: None,
            unreadable: None,
        });
    }
}

fn note_failures(group: Group, verdicts: &mut [Verdict]) {
    for (mirror, error) in group.failed {
        let difference = &mut verdicts[mirror].difference;
        if difference.is_none() {
            *difference = Some(Difference {
                file: group.file,
                offset: group.offset,
                tensor: None,
                unreadable: Some(error),
            });
        }
    }
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
