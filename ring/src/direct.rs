//! Opens a file with O_DIRECT, and probes whether its reads bypass the page cache.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags};

use crate::kernel::is_refusal;

/// Alignment that O_DIRECT reads of a file need, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlign {
    /// Of the file offset and the length.
    pub offset: u32,
    /// Of the memory address.
    pub memory: u32,
}

impl DirectAlign {
    /// What nearly all file systems and drives accept; used where the file system reports none.
    pub const DEFAULT: DirectAlign = DirectAlign {
        offset: 4096,
        memory: 4096,
    };
}

/// A descriptor with O_DIRECT.
#[derive(Debug)]
pub(crate) struct Direct {
    pub(crate) file: File,
    pub(crate) align: DirectAlign,
}

/// `f_type` of tmpfs, which accepts O_DIRECT and ignores it.
const TMPFS_MAGIC: u64 = 0x0102_1994;

impl Direct {
    /// Opens the O_DIRECT descriptor of the file that is open as `buffered`, or says in words why its reads would go through the page
    /// cache anyway. Reads at most four blocks.
    pub(crate) fn open(path: &Path, buffered: &File) -> Result<Direct, String> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT | libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(path)
            .map_err(|e| format!("O_DIRECT is refused: {e}"))?;
        // A file that was replaced since then has other bytes than those that were examined.
        let id = |file: &File| file.metadata().map(|meta| (meta.dev(), meta.ino()));
        if !matches!((id(&file), id(buffered)), (Ok(a), Ok(b)) if a == b) {
            return Err("it was replaced after it was opened".into());
        }
        let fs = rustix::fs::fstatfs(&file).map_err(|e| format!("statfs failed: {e}"))?;
        if fs.f_type as u64 == TMPFS_MAGIC {
            return Err("tmpfs ignores O_DIRECT".into());
        }
        let align = direct_align(&file)?;
        probe(&file, buffered, align)?;
        Ok(Direct { file, align })
    }
}

/// What `statx(STATX_DIOALIGN)` reports, [`DirectAlign::DEFAULT`] where the kernel or the file system
/// reports nothing; an error where it reports that direct reads are not possible (ext4 with data=journal
/// opens with O_DIRECT and then silently buffers).
fn direct_align(file: &File) -> Result<DirectAlign, String> {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    let Ok(stat) = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Ok(DirectAlign::DEFAULT);
    };
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(DirectAlign::DEFAULT);
    }
    if stat.stx_dio_offset_align == 0 || stat.stx_dio_mem_align == 0 {
        return Err("the file system reports that it does not support direct reads".into());
    }
    Ok(DirectAlign {
        offset: stat.stx_dio_offset_align,
        memory: stat.stx_dio_mem_align,
    })
}

/// Reads blocks until one bypasses the page cache, at most four: some file systems open with O_DIRECT and refuse the read, others serve it
/// through the page cache (btrfs, where it has compressed). Parts of a file may be compressed and others not, so the blocks lie all over it.
fn probe(direct: &File, buffered: &File, align: DirectAlign) -> Result<(), String> {
    const BLOCKS: u64 = 4;
    /// Larger alignments are reported by no file system, and are not used.
    const MOST: usize = 64 << 10;
    /// Other processes that probe the file at this moment put blocks into the cache, too: of a smaller file perhaps all.
    const CONCLUSIVE: u64 = 4 << 20;
    let block = (align.offset.max(align.memory) as usize).max(4096);
    let size = buffered.metadata().map_or(0, |meta| meta.len());
    let blocks = size / block as u64;
    if block > MOST || blocks == 0 {
        return Ok(());
    }
    let mut memory = vec![0; 2 * block];
    let start = memory.as_ptr().align_offset(block);
    let Some(memory) = memory.get_mut(start..start + block) else {
        return Ok(());
    };
    let probed = BLOCKS.min(blocks);
    for i in 0..probed {
        let offset = (2 * i + 1) * blocks / (2 * probed) * block as u64;
        drop_range(buffered, offset, block);
        match rustix::io::pread(direct, &mut *memory, offset) {
            // A drive that fails is no matter of O_DIRECT: the reads that need the block meet it again.
            Err(e) if is_refusal(&e.into()) => {
                return Err(format!("O_DIRECT reads fail: {}", io::Error::from(e)));
            }
            _ => {}
        }
        let mut cached = is_cached(buffered, offset) == Some(true);
        if cached {
            drop_range(buffered, offset, block);
            // What cannot be dropped was there before: another process has mapped it, or it is being written.
            cached = is_cached(buffered, offset) == Some(false);
        }
        // Asking may have started a read.
        drop_range(buffered, offset, block);
        if !cached || size < CONCLUSIVE {
            return Ok(());
        }
    }
    Err("the file system serves O_DIRECT reads of it from the page cache".into())
}

fn drop_range(file: &File, offset: u64, len: usize) {
    let _ = fadvise(
        file,
        offset,
        std::num::NonZeroU64::new(len as u64),
        Advice::DontNeed,
    );
}

/// Whether the byte at `offset` is in the page cache: reads it on condition that no drive is used. The kernel may begin to read it for later.
/// `None` where the file system cannot tell.
pub(crate) fn is_cached(buffered: &File, offset: u64) -> Option<bool> {
    let mut byte = [0];
    let bufs = &mut [io::IoSliceMut::new(&mut byte)];
    match rustix::io::preadv2(buffered, bufs, offset, ReadWriteFlags::NOWAIT) {
        Ok(n) => Some(n > 0),
        Err(Errno::AGAIN) => Some(false),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::denied::deny;

    /// On the disk: a tmpfs has no O_DIRECT.
    fn file(bytes: usize) -> tempfile::NamedTempFile {
        let test = std::env::current_exe().unwrap();
        let file = tempfile::NamedTempFile::new_in(test.parent().unwrap()).unwrap();
        std::fs::write(file.path(), vec![7; bytes]).unwrap();
        file
    }

    #[test]
    fn a_file_system_that_refuses_the_read_refuses_o_direct() {
        for errno in [libc::EINVAL, libc::EOPNOTSUPP, libc::ENOTSUP] {
            let file = file(64 << 10);
            let buffered = File::open(file.path()).unwrap();
            if let Err(reason) = Direct::open(file.path(), &buffered) {
                eprintln!("skipped: {reason}");
                return;
            }
            // The filter stays with its thread, and ends with it.
            let refused = thread::spawn(move || {
                deny(libc::SYS_pread64, errno);
                Direct::open(file.path(), &buffered).unwrap_err()
            });
            let reason = refused.join().unwrap();
            assert!(reason.contains("O_DIRECT reads fail"), "{reason}");
        }
    }

    #[test]
    fn a_file_in_the_page_cache_is_no_evidence() {
        // Just written, so that all of it is there.
        let file = file(1 << 20);
        let buffered = File::open(file.path()).unwrap();
        let fs = rustix::fs::fstatfs(&buffered).unwrap();
        if fs.f_type as u64 != TMPFS_MAGIC {
            let opened = Direct::open(file.path(), &buffered).map_err(|reason| {
                assert!(!reason.contains("page cache"), "{reason}");
            });
            drop(opened);
        }
    }
}
