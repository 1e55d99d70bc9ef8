//! Copies one file: reads it around the page cache, writes, syncs, compares and renames it.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;

use colibri_ring::{DirectMode, EngineError, File, Files, Options, Range, Replica};
use rustix::fs::{Advice, FlockOperation, RenameFlags};

use super::{Shard, StageError, failed, unfinished};
use crate::shards::{self, MirrorFile};
use crate::tools::ordered_reads::OrderedReads;
use crate::tools::verify::{Copies, compare};

/// Bytes of one read and one write.
const BLOCK: u64 = 4 << 20;

/// Blocks that are read ahead of the one that is written.
const AHEAD: usize = 12;

/// Bytes that are written before they are synced and dropped from the page cache.
const SYNC: u64 = 32 << 20;

/// How files are copied.
#[derive(Clone, Debug)]
pub struct Copying {
    /// What reads.
    pub engine: Options,
    /// Around the page cache.
    pub direct: DirectMode,
    /// Set when the user wants it to end.
    pub stop: Arc<AtomicBool>,
}

/// How a copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The copy is in its place.
    Complete,
    /// The user wanted to stop; the next run goes on.
    Stopped,
}

impl Copying {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Makes the copy of a shard. `progress` is told the bytes that were written or compared.
///
/// # Errors
/// [`StageError`]. What was written stays and is used by the next run.
pub fn copy_shard(
    shard: &Shard,
    copying: &Copying,
    mut progress: impl FnMut(u64),
) -> Result<Ended, StageError> {
    let part = unfinished(&shard.to);
    let out = open_part(&part)?;
    let mut begun = out.metadata().map_err(failed("look at", &part))?.len();
    if begun > shard.file.size() {
        out.set_len(0).map_err(failed("write", &part))?;
        begun = 0;
    }
    loop {
        // Blocks begin at multiples of their length; what is there of one is written again.
        let from = begun - begun % BLOCK;
        if write(shard, &out, &part, from, copying, &mut progress)? == Ended::Stopped {
            return Ok(Ended::Stopped);
        }
        let Some(offset) = first_difference(shard, &part, copying, &mut progress)? else {
            break;
        };
        // It cannot be told from where on it is wrong.
        out.set_len(0).map_err(failed("write", &part))?;
        if begun == 0 {
            return Err(StageError::Corrupt { path: part, offset });
        }
        // Left by an earlier run that was ended in the middle, or of another model.
        begun = 0;
    }
    if copying.stopped() {
        return Ok(Ended::Stopped);
    }
    put_in_place(&part, &shard.to)?;
    Ok(Ended::Complete)
}

/// The unfinished file, locked.
fn open_part(path: &Path) -> Result<fs::File, StageError> {
    let out = shards::open_part(path).map_err(failed("write", path))?;
    match rustix::fs::flock(&out, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(StageError::Busy {
            path: path.to_owned(),
        }),
        // A file system without locks.
        _ => Ok(out),
    }
}

/// Writes the original from byte `from` on, in order, so that the length of the file says how far it is.
fn write(
    shard: &Shard,
    out: &fs::File,
    part: &Path,
    from: u64,
    copying: &Copying,
    progress: &mut impl FnMut(u64),
) -> Result<Ended, StageError> {
    let size = shard.file.size();
    // Room in one piece, where the file system can; a drive that has none says so now.
    let reserved = rustix::fs::fallocate(out, rustix::fs::FallocateFlags::KEEP_SIZE, 0, size);
    if reserved == Err(rustix::io::Errno::NOSPC) {
        return Err(StageError::Full {
            to: part.to_owned(),
        });
    }
    let files = Files::new(
        vec![vec![Replica::new(shard.file.clone(), 0)]],
        copying.direct,
    )?;
    let mut reads = OrderedReads::new(files, BLOCK, (AHEAD, 2), copying.engine)?;
    let mut offsets = (from..size).step_by(BLOCK as usize);
    // Syncing takes as long as the drive does; meanwhile the next bytes are written.
    let (sender, receiver) = sync_channel::<(u64, u64)>(1);
    std::thread::scope(|scope| {
        let sync = move || -> io::Result<()> {
            for (from, to) in receiver {
                rustix::fs::fdatasync(out)?;
                drop_cached(out, from, to - from);
            }
            rustix::fs::fdatasync(out)?;
            drop_cached(out, 0, size);
            Ok(())
        };
        let syncing = std::thread::Builder::new()
            .name("sync".into())
            .spawn_scoped(scope, sync)
            .map_err(failed("start a thread that syncs", part))?;
        let written = move || -> Result<Ended, StageError> {
            // Moved in, so that its end ends the syncing thread.
            let (sender, mut synced) = (sender, from);
            loop {
                if copying.stopped() {
                    return Ok(Ended::Stopped);
                }
                while reads.free() > 0
                    && let Some(offset) = offsets.next()
                {
                    let range = Range {
                        file: 0,
                        offset,
                        len: BLOCK.min(size - offset),
                        part: 0,
                    };
                    reads.push(offset, &[range]);
                }
                let Some(group) = reads.next()? else {
                    return Ok(Ended::Complete);
                };
                let offset = group.tag;
                let mut len = 0;
                for block in group.blocks {
                    let slab = block.map_err(EngineError::Read)?;
                    let bytes = reads.bytes(slab);
                    out.write_all_at(bytes, offset)
                        .map_err(failed("write", part))?;
                    len += bytes.len() as u64;
                    reads.release(slab);
                }
                progress(len);
                let end = offset + len;
                if end - synced >= SYNC {
                    // The syncing thread ends early only on an error, which its join returns.
                    if sender.send((synced, end)).is_err() {
                        return Ok(Ended::Complete);
                    }
                    synced = end;
                }
            }
        };
        let ended = written();
        let synced = syncing
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let ended = ended?;
        synced.map_err(failed("write", part))?;
        Ok(ended)
    })
}

fn drop_cached(file: &fs::File, offset: u64, len: u64) {
    if let Some(len) = std::num::NonZeroU64::new(len) {
        let _ = rustix::fs::fadvise(file, offset, Some(len), Advice::DontNeed);
    }
}

/// Compares what the drives give back.
fn first_difference(
    shard: &Shard,
    part: &Path,
    copying: &Copying,
    progress: &mut impl FnMut(u64),
) -> Result<Option<u64>, StageError> {
    let copies = Copies {
        primary: shard.file.clone(),
        copies: vec![MirrorFile {
            mirror: 0,
            file: Arc::new(File::open(part)?),
        }],
    };
    let go_on = || !copying.stopped();
    let verdicts = compare(
        &[copies],
        1,
        copying.direct,
        copying.engine,
        go_on,
        progress,
    )?;
    Ok(verdicts[0].difference.as_ref().map(|d| d.offset))
}

/// Gives a finished file its name, if nothing has it.
fn put_in_place(part: &Path, to: &Path) -> Result<(), StageError> {
    let cwd = rustix::fs::CWD;
    match rustix::fs::renameat_with(cwd, part, cwd, to, RenameFlags::NOREPLACE) {
        Ok(()) => {}
        // A file system that cannot promise not to replace.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            fs::hard_link(part, to).map_err(failed("make", to))?;
            fs::remove_file(part).map_err(failed("rename", part))?;
        }
        Err(e) => return Err(failed("make", to)(e.into())),
    }
    let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = dir.unwrap_or(Path::new("."));
    let synced = fs::File::open(dir).and_then(|dir| dir.sync_all());
    synced.map_err(failed("sync", dir))
}

/// Copies a small file, whole or not at all.
///
/// # Errors
/// [`StageError::Io`], [`StageError::Full`].
pub fn copy_small(from: &Path, to: &Path) -> Result<(), StageError> {
    let bytes = fs::read(from).map_err(failed("read", from))?;
    let part = unfinished(to);
    let mut out = open_part(&part)?;
    out.set_len(0)
        .and_then(|()| out.write_all(&bytes))
        .and_then(|()| out.sync_data())
        .map_err(failed("write", &part))?;
    put_in_place(&part, to)
}
