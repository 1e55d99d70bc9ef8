//! Holds the slabs: fixed pieces of memory on huge pages that drives write into.
//!
//! One [`Class`] of equal slabs for each footprint, counts fixed at the start, no sub-allocation. The memory lies in regions of at
//! most 1 GiB (the most that io_uring registers as one buffer); no slab crosses one. Regions are 2 MiB-aligned multiples of 2 MiB
//! with MADV_HUGEPAGE set before the first touch: on huge pages a large read is one request to the drive instead of several,
//! and registration is much cheaper.

use crate::region::{ArenaError, MAX_REGION, Region, SLAB_ALIGN};

/// A number of equal slabs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// Bytes of each slab, which [`Engine::new`](crate::Engine::new) rounds up to a multiple of 4096.
    pub bytes: usize,
    /// Number of slabs.
    pub count: usize,
}

/// Names a slab of an [`Engine`](crate::Engine).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlabId(pub u32);

impl SlabId {
    /// The same number as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Clone, Copy, Debug)]
struct Place {
    region: u32,
    offset: u32,
    bytes: u32,
}

/// The memory of all slabs. The [`Engine`](crate::Engine) keeps their states.
#[derive(Debug)]
pub(crate) struct Arena {
    regions: Vec<Region>,
    slabs: Vec<Place>,
}

impl Arena {
    /// Maps the memory of all classes. Pages are touched only when they are used or registered.
    pub(crate) fn new(classes: &[Class]) -> Result<Arena, ArenaError> {
        let mut regions = Vec::new();
        let mut slabs = Vec::new();
        for class in classes {
            if class.bytes > MAX_REGION {
                return Err(ArenaError::SlabTooLarge { bytes: class.bytes });
            }
            let bytes = class.bytes.max(1).next_multiple_of(SLAB_ALIGN);
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

    /// Number of slabs, which are numbered from 0, class after class.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.slabs.len()
    }

    pub(crate) fn slab_bytes(&self, slab: SlabId) -> usize {
        self.slabs[slab.index()].bytes as usize
    }

    /// Touches all pages, so that no read pays for it later. Kernels before 5.14 ignore it.
    pub(crate) fn populate(&self) {
        self.regions.iter().for_each(Region::populate);
    }

    /// Address and length of each region, for registration.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        self.regions.iter().map(Region::raw)
    }

    /// Index of the region that holds a slab.
    pub(crate) fn region_of(&self, slab: SlabId) -> usize {
        self.slabs[slab.index()].region as usize
    }

    /// The address of `len` bytes at `slab_offset` in a slab. Only a device writes through it, and only the bytes of an
    /// [`Op`](crate::device::Op) that has not ended.
    ///
    /// # Panics
    /// When the bytes are not all inside the slab.
    pub(crate) fn address(&self, slab: SlabId, slab_offset: u64, len: u64) -> *mut u8 {
        let place = self.slabs[slab.index()];
        assert!(
            slab_offset
                .checked_add(len)
                .is_some_and(|end| end <= u64::from(place.bytes)),
            "{len} bytes at {slab_offset} leave the slab"
        );
        let (start, _) = self.regions[place.region as usize].raw();
        start.wrapping_add(place.offset as usize + slab_offset as usize)
    }

    /// Borrows `len` bytes at `slab_offset` of a slab.
    ///
    /// # Safety
    /// Nothing writes these bytes while the borrow lives.
    ///
    /// # Panics
    /// When the bytes are not all inside the slab.
    pub(crate) unsafe fn borrow(&self, slab: SlabId, slab_offset: u64, len: u64) -> &[u8] {
        // SAFETY: `address` has checked the bounds, mapped memory is initialised (to zero), and the caller
        // promises that it does not change.
        unsafe { std::slice::from_raw_parts(self.address(slab, slab_offset, len), len as usize) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::HUGE_PAGE;

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
        assert_eq!(arena.len(), 5);
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
        let bytes: usize = arena.regions().map(|(_, bytes)| bytes).sum();
        assert_eq!(bytes, HUGE_PAGE + 3 * HUGE_PAGE);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no lazily touched memory")]
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
        for bytes in [(1 << 30) + 1, usize::MAX] {
            assert!(matches!(
                Arena::new(&[Class { bytes, count: 1 }]),
                Err(ArenaError::SlabTooLarge { .. })
            ));
        }
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
