//! Maps anonymous memory on huge pages.

use std::io;
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{self, Advice};
#[cfg(not(miri))]
use rustix::mm::{MapFlags, ProtFlags};

/// Size of a huge page in bytes.
pub const HUGE_PAGE: usize = 2 << 20;
/// Slabs and the spans of a [`Layout`](crate::Layout) begin at multiples of this, which suits O_DIRECT on usual drives.
pub const SLAB_ALIGN: usize = 4096;

/// Why there is no memory for the slabs.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// One slab is larger than the largest registered buffer.
    #[error(
        "a slab of {bytes} bytes is larger than the {MAX_REGION} bytes that io_uring registers as one buffer"
    )]
    SlabTooLarge {
        /// Requested bytes.
        bytes: usize,
    },
    /// The kernel refused to map it.
    #[error("cannot allocate {bytes} bytes for slabs: {source}")]
    Map {
        /// Requested bytes.
        bytes: usize,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The most bytes that io_uring registers as one buffer.
pub(crate) const MAX_REGION: usize = 1 << 30;

/// One anonymous mapping on huge pages, zeroed, unmapped on drop.
#[derive(Debug)]
pub struct Region {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a region is plain memory without thread affinity; who may touch which bytes is arranged by the engine.
unsafe impl Send for Region {}
// SAFETY: as above; shared references only hand out addresses.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `bytes`, rounded up to a multiple of [`HUGE_PAGE`] and zeroed. Pages are touched only when they are used.
    ///
    /// # Errors
    /// [`ArenaError::Map`] when the kernel refuses to map them.
    pub fn map(bytes: usize) -> Result<Region, ArenaError> {
        let start = (bytes.max(1))
            .checked_next_multiple_of(HUGE_PAGE)
            .filter(|bytes| *bytes <= isize::MAX as usize - HUGE_PAGE)
            .ok_or(Errno::NOMEM)
            .and_then(|bytes| Ok((pages::map(bytes)?, bytes)));
        match start {
            Ok((start, bytes)) => Ok(Region { start, bytes }),
            Err(errno) => Err(ArenaError::Map {
                bytes,
                source: errno.into(),
            }),
        }
    }

    /// Address and length. Writes through the address follow the rules of [`Arena::address`](crate::arena::Arena::address).
    pub(crate) fn raw(&self) -> (*mut u8, usize) {
        (self.start.as_ptr(), self.bytes)
    }

    /// Touches all pages. Kernels before 5.14 ignore it.
    pub(crate) fn populate(&self) {
        // SAFETY: the range is the region's own mapping; the advice makes its pages present and changes no byte.
        let _ = unsafe {
            mm::madvise(
                self.start.as_ptr().cast(),
                self.bytes,
                Advice::LinuxPopulateWrite,
            )
        };
    }
}

impl std::ops::Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is `bytes` long and initialised (to zero). Regions that devices write to are inside an Arena,
        // which never makes this reference.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl std::ops::DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and the caller has the only reference to the region.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `map` made this mapping. Devices have stopped writing when they drop their reference to the arena, and no
        // borrow outlives the region.
        unsafe { pages::unmap(self.start, self.bytes) }
    }
}

#[cfg(not(miri))]
mod pages {
    use super::*;

    pub(super) fn map(bytes: usize) -> Result<NonNull<u8>, Errno> {
        let (prot, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        // One huge page more than needed, so that an aligned start can be cut out of it.
        let mapped = bytes + HUGE_PAGE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), mapped, prot, flags)? };
        let head = base.cast::<u8>().align_offset(HUGE_PAGE);
        let start = base.cast::<u8>().wrapping_add(head);
        // SAFETY: both cuts lie inside the mapping made above, outside the part that is kept.
        unsafe {
            if head > 0 {
                mm::munmap(base, head)?;
            }
            mm::munmap(start.wrapping_add(bytes).cast(), HUGE_PAGE - head)?;
        }
        // Small pages serve where the kernel has no transparent huge pages. The second advice keeps the slabs out of core dumps.
        for advice in [Advice::LinuxHugepage, Advice::LinuxDontDump] {
            // SAFETY: the range is the mapping that is kept; the advice does not change its contents.
            let _ = unsafe { mm::madvise(start.cast(), bytes, advice) };
        }
        Ok(NonNull::new(start).expect("mmap never returns null"))
    }

    /// # Safety
    /// [`map`] returned this address for this length, and nothing uses the memory any more.
    pub(super) unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller owns the whole mapping.
        let _ = unsafe { mm::munmap(start.as_ptr().cast(), bytes) };
    }
}

/// Miri has no part of a mapping that can be unmapped.
#[cfg(miri)]
mod pages {
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    use super::*;

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, HUGE_PAGE).expect("not too large")
    }

    pub(super) fn map(bytes: usize) -> Result<NonNull<u8>, Errno> {
        // SAFETY: `bytes` is not 0.
        NonNull::new(unsafe { alloc_zeroed(layout(bytes)) }).ok_or(Errno::NOMEM)
    }

    /// # Safety
    /// [`map`] returned this address for this length, and nothing uses the memory any more.
    pub(super) unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
        // SAFETY: `map` allocated it with this layout.
        unsafe { dealloc(start.as_ptr(), layout(bytes)) }
    }
}
