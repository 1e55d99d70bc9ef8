//! Tries transparent huge pages: a read into one is one request to the drive, a read into 4 KiB pages is several.

use std::fs;
use std::io;

use crate::region::{HUGE_PAGE, Region};

/// Transparent huge pages of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HugePages {
    /// The selected word of `transparent_hugepage/enabled`: `always`, `madvise` or `never`; `None` where
    /// the kernel has no such file.
    pub setting: Option<String>,
    /// Bytes of a test allocation, all of them written to.
    pub tested: u64,
    /// How many of them the kernel backs with huge pages; the error when it does not say.
    pub backed: Result<u64, String>,
}

impl HugePages {
    /// Whether the whole test allocation is on huge pages.
    pub fn granted(&self) -> bool {
        self.backed == Ok(self.tested)
    }
}

/// Allocates the memory of two huge pages as the slabs are allocated, writes to it, and reads what backs it.
pub fn huge_pages() -> HugePages {
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .ok()
        .and_then(|text| selected(&text).map(str::to_owned));
    HugePages {
        setting,
        tested: 2 * HUGE_PAGE as u64,
        backed: backed_by_huge_pages(2 * HUGE_PAGE).map_err(|error| error.to_string()),
    }
}

/// The word in brackets of a sysfs setting such as `always [madvise] never`.
fn selected(setting: &str) -> Option<&str> {
    let (_, rest) = setting.split_once('[')?;
    Some(rest.split_once(']')?.0)
}

fn backed_by_huge_pages(len: usize) -> io::Result<u64> {
    let mut region = Region::map(len).map_err(io::Error::other)?;
    region.fill(1);
    let smaps = fs::read_to_string("/proc/self/smaps")?;
    let address = region.as_ptr() as u64;
    // The kernel may have joined the mapping with a neighbour, so it may be larger than the region.
    anon_huge_bytes(&smaps, address)
        .map(|bytes| bytes.min(len as u64))
        .ok_or_else(|| io::Error::other("the allocation is not in /proc/self/smaps"))
}

/// `AnonHugePages` in bytes of the mapping in `smaps` that holds `address`.
fn anon_huge_bytes(smaps: &str, address: u64) -> Option<u64> {
    let mut inside = false;
    for line in smaps.lines() {
        if let Some((from, to)) = mapping(line) {
            inside = (from..to).contains(&address);
        } else if inside && let Some(rest) = line.strip_prefix("AnonHugePages:") {
            let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
            return kib.checked_mul(1024);
        }
    }
    None
}

/// The address range of a line that starts a mapping: `7f00-7f80 rw-p ...`.
fn mapping(line: &str) -> Option<(u64, u64)> {
    let (from, to) = line.split(' ').next()?.split_once('-')?;
    Some((
        u64::from_str_radix(from, 16).ok()?,
        u64::from_str_radix(to, 16).ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c0000000-55d0c0200000 rw-p 00000000 00:00 0                          [heap]
Size:               2048 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac
7f2000000000-7f2000400000 rw-p 00000000 00:00 0 
Size:               4096 kB
AnonHugePages:      4096 kB
THPeligible:           1
";

    #[test]
    fn finds_the_mapping_that_holds_an_address() {
        assert_eq!(anon_huge_bytes(SMAPS, 0x7f20_0000_0000), Some(4 << 20));
        assert_eq!(anon_huge_bytes(SMAPS, 0x7f20_003f_ffff), Some(4 << 20));
        assert_eq!(anon_huge_bytes(SMAPS, 0x55d0_c000_1000), Some(0));
        assert_eq!(anon_huge_bytes(SMAPS, 0x7f20_0040_0000), None);
    }

    #[test]
    fn reads_the_selected_setting() {
        assert_eq!(selected("always [madvise] never\n"), Some("madvise"));
        assert_eq!(selected("always madvise never\n"), None);
    }

    #[test]
    fn the_test_allocation_is_found() {
        let huge = huge_pages();
        assert!(huge.backed.is_ok(), "{huge:?}");
    }
}
