//! Slabs: fixed pieces of memory on huge pages that drives write into.
//!
//! One [`Class`] of equal slabs for each footprint, counts fixed at the start, no sub-allocation. The memory
//! lies in regions of at most 1 GiB (the most that io_uring registers as one buffer); no slab crosses one.
//! Regions are 2 MiB-aligned multiples of 2 MiB with MADV_HUGEPAGE set before the first touch: on huge pages a
//! large read is one request to the drive instead of several, and registration is much cheaper.

use std::io;
use std::ptr::NonNull;

use rustix::mm::{self, Advice, MapFlags, ProtFlags};

/// Size of a huge page in bytes.
pub const HUGE_PAGE: usize = 2 << 20;
/// The most that io_uring registers as one buffer, in bytes.
pub const MAX_REGION: usize = 1 << 30;
/// Slabs begin at multiples of this, which suits every O_DIRECT alignment seen.
pub const SLAB_ALIGN: usize = 4096;

/// A number of equal slabs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// Bytes of each slab; rounded up to [`SLAB_ALIGN`].
    pub bytes: usize,
    /// How many.
    pub count: usize,
}

/// Names a slab of an [`Arena`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlabId(pub u32);

impl SlabId {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Why the slabs could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// One slab is larger than the largest registered buffer.
    #[error(
        "a slab of {bytes} bytes is larger than the {MAX_REGION} bytes that io_uring registers as one buffer"
    )]
    SlabTooLarge {
        /// Wanted bytes.
        bytes: usize,
    },
    /// The kernel gave no memory.
    #[error("cannot allocate {bytes} bytes for slabs: {source}")]
    Map {
        /// Wanted bytes.
        bytes: usize,
        /// The operating system's answer.
        source: io::Error,
    },
}

/// Where a slab is.
#[derive(Clone, Copy, Debug)]
struct Place {
    region: u32,
    offset: u32,
    bytes: u32,
}

/// The memory of all slabs. It owns no state of them: which slab is being written is known to the
/// [`crate::engine::Engine`].
#[derive(Debug)]
pub struct Arena {
    regions: Vec<Region>,
    slabs: Vec<Place>,
}

impl Arena {
    /// Maps the memory of all classes. Pages are touched only when they are used or registered.
    ///
    /// # Errors
    /// [`ArenaError`] when a slab is too large or the kernel gives no memory.
    pub fn new(classes: &[Class]) -> Result<Arena, ArenaError> {
        let mut regions = Vec::new();
        let mut slabs = Vec::new();
        for class in classes {
            let bytes = class.bytes.max(1).next_multiple_of(SLAB_ALIGN);
            if bytes > MAX_REGION {
                return Err(ArenaError::SlabTooLarge { bytes });
            }
            let mut left = class.count;
            while left > 0 {
                let here = left.min(MAX_REGION / bytes);
                for i in 0..here {
                    slabs.push(Place {
                        region: regions.len() as u32,
                        offset: (i * bytes) as u32,
                        bytes: bytes as u32,
                    });
                }
                regions.push(Region::map(here * bytes)?);
                left -= here;
            }
        }
        Ok(Arena { regions, slabs })
    }

    /// Number of slabs. They are numbered from 0, class after class.
    pub fn slabs(&self) -> usize {
        self.slabs.len()
    }

    /// Size of a slab in bytes.
    pub fn slab_bytes(&self, slab: SlabId) -> usize {
        self.slabs[slab.index()].bytes as usize
    }

    /// Bytes of memory, when all of it has been touched.
    pub fn bytes(&self) -> usize {
        self.regions.iter().map(|r| r.bytes).sum()
    }

    /// Touches all of it, so that no read pays for it later. Only a hint: kernels before 5.14 do not do it.
    pub fn populate(&self) {
        for region in &self.regions {
            let (start, bytes) = (region.start.as_ptr().cast(), region.bytes);
            // SAFETY: the range is the region's own mapping; the advice makes its pages present and changes no byte.
            let _ = unsafe { mm::madvise(start, bytes, Advice::LinuxPopulateWrite) };
        }
    }

    /// Address and length of each region, for registration.
    pub fn regions(&self) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        self.regions.iter().map(|r| (r.start.as_ptr(), r.bytes))
    }

    /// The region that a slab lies in.
    pub fn region_of(&self, slab: SlabId) -> usize {
        self.slabs[slab.index()].region as usize
    }

    /// The address of `len` bytes at `at` in a slab. To write through it, the slab must be in the state
    /// "filling" and the bytes must belong to a chunk that was scheduled and is not complete.
    ///
    /// # Panics
    /// When the bytes are not all inside the slab.
    pub fn address(&self, slab: SlabId, at: u64, len: u64) -> *mut u8 {
        let place = self.slabs[slab.index()];
        assert!(
            at.checked_add(len)
                .is_some_and(|end| end <= u64::from(place.bytes)),
            "{len} bytes at {at} leave the slab"
        );
        self.regions[place.region as usize]
            .start
            .as_ptr()
            .wrapping_add(place.offset as usize + at as usize)
    }

    /// Borrows `len` bytes at `at` of a slab.
    ///
    /// # Safety
    /// No one writes these bytes while the borrow lives.
    ///
    /// # Panics
    /// When the bytes are not all inside the slab.
    pub(crate) unsafe fn borrow(&self, slab: SlabId, at: u64, len: u64) -> &[u8] {
        // SAFETY: `address` has checked the bounds, mapped memory is initialised (to zero), and the caller
        // promises that it does not change.
        unsafe { std::slice::from_raw_parts(self.address(slab, at, len), len as usize) }
    }
}

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
    /// Maps `bytes`, rounded up to a multiple of [`HUGE_PAGE`]. Pages are touched only when they are used.
    ///
    /// # Errors
    /// [`ArenaError::Map`] when the kernel gives no memory.
    pub fn map(bytes: usize) -> Result<Region, ArenaError> {
        let wanted = bytes;
        let failed = |e: rustix::io::Errno| ArenaError::Map {
            bytes: wanted,
            source: e.into(),
        };
        let too_large = failed(rustix::io::Errno::NOMEM);
        let Some(bytes) = (wanted.max(1).checked_next_multiple_of(HUGE_PAGE))
            .filter(|bytes| *bytes <= isize::MAX as usize - HUGE_PAGE)
        else {
            return Err(too_large);
        };
        let (prot, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        // One huge page more than needed, so that an aligned start can be cut out of it.
        let mapped = bytes + HUGE_PAGE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), mapped, prot, flags) }
            .map_err(failed)?;
        let head = base.cast::<u8>().align_offset(HUGE_PAGE);
        let start = base.cast::<u8>().wrapping_add(head);
        // SAFETY: both cuts lie inside the mapping made above, outside the part that is kept.
        unsafe {
            if head > 0 {
                mm::munmap(base, head).map_err(failed)?;
            }
            mm::munmap(start.wrapping_add(bytes).cast(), HUGE_PAGE - head).map_err(failed)?;
        }
        // A kernel without transparent huge pages refuses: then small pages have to do.
        // SAFETY: the range is the mapping that is kept; the advice does not change its contents.
        let _ = unsafe { mm::madvise(start.cast(), bytes, Advice::LinuxHugepage) };
        // A dump of the slabs would be as large as the cache.
        // SAFETY: as above.
        let _ = unsafe { mm::madvise(start.cast(), bytes, Advice::LinuxDontDump) };
        let start = NonNull::new(start).expect("mmap never returns null");
        Ok(Region { start, bytes })
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
        // SAFETY: as in `deref`; the mapping is ours alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever wrote into it or borrowed from it has ended: devices drain before they
        // drop their reference to the arena, and borrows cannot outlive it.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_are_aligned_and_apart() {
        let classes = [
            Class {
                bytes: 5000,
                count: 3,
            },
            Class {
                bytes: 3 << 20,
                count: 2,
            },
        ];
        let arena = Arena::new(&classes).unwrap();
        assert_eq!(arena.slabs(), 5);
        let mut ends = 0;
        let mut places: Vec<(usize, usize)> = (0..5)
            .map(|i| {
                (
                    arena.address(SlabId(i), 0, 1) as usize,
                    arena.slab_bytes(SlabId(i)),
                )
            })
            .collect();
        assert_eq!(places[0].1, 8192);
        places.sort_unstable();
        for (start, bytes) in places {
            assert_eq!(start % SLAB_ALIGN, 0);
            assert!(start >= ends);
            ends = start + bytes;
        }
        for (address, bytes) in arena.regions() {
            assert_eq!((address as usize % HUGE_PAGE, bytes % HUGE_PAGE), (0, 0));
        }
        assert_eq!(arena.bytes(), HUGE_PAGE + 3 * HUGE_PAGE);
    }

    #[test]
    fn no_slab_crosses_a_region() {
        // 3 slabs of 400 MiB: two fit into the first GiB. Nothing is touched, so this costs no memory.
        let arena = Arena::new(&[Class {
            bytes: 400 << 20,
            count: 3,
        }])
        .unwrap();
        assert_eq!(
            (0..3)
                .map(|i| arena.region_of(SlabId(i)))
                .collect::<Vec<_>>(),
            [0, 0, 1]
        );
        assert!(matches!(
            Arena::new(&[Class {
                bytes: (1 << 30) + 1,
                count: 1
            }]),
            Err(ArenaError::SlabTooLarge { .. })
        ));
    }

    #[test]
    #[should_panic(expected = "leave the slab")]
    fn addresses_outside_the_slab_panic() {
        let arena = Arena::new(&[Class {
            bytes: 4096,
            count: 2,
        }])
        .unwrap();
        arena.address(SlabId(0), 4000, 97);
    }
}
