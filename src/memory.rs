//! Finds out how much memory this process may use: `MemAvailable`, bounded by the cgroups it is in.

use std::fs;
use std::path::{Path, PathBuf};

use bytesize::ByteSize;

use crate::cgroup::{self, Version};

/// Why memory cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// Not even the fewest slabs with which something can be read fit.
    #[error(
        "{slabs} slabs of {} for reading do not fit into the {} of memory that are available",
        ByteSize::b(*slab_bytes).display().iec(), ByteSize::b(*available).display().iec()
    )]
    NoSlabs {
        /// The fewest slabs that work.
        slabs: usize,
        /// Bytes of a slab.
        slab_bytes: u64,
        /// Bytes of memory that are available.
        available: u64,
    },
    /// `/proc/meminfo` cannot be read or understood.
    #[error("cannot tell how much memory is available: {0}")]
    Unknown(String),
}

/// Where the kernel's files are; other directories than `/` in tests.
#[derive(Clone, Debug)]
pub struct Roots {
    /// `/proc`.
    pub proc: PathBuf,
    /// What paths in `mountinfo` start from.
    pub root: PathBuf,
}

#[cfg(test)]
impl Roots {
    /// A tree of files under a temporary directory that stands for `/`.
    pub(crate) fn fake(files: &[(&str, &str)]) -> (tempfile::TempDir, Roots) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let roots = Roots {
            proc: dir.path().join("proc"),
            root: dir.path().to_owned(),
        };
        (dir, roots)
    }
}

impl Default for Roots {
    fn default() -> Roots {
        Roots {
            proc: PathBuf::from("/proc"),
            root: PathBuf::from("/"),
        }
    }
}

/// The tightest memory limit of the process's cgroup and its ancestors. In bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupBound {
    /// The cgroup's directory.
    pub path: PathBuf,
    /// Its limit.
    pub limit: u64,
    /// Bytes left of the limit. Page cache counts as free, because the kernel reclaims it first.
    pub left: u64,
}

/// Memory of the machine and of the process's cgroup. In bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Available {
    /// `MemTotal`.
    pub mem_total: u64,
    /// `MemAvailable`.
    pub mem_available: u64,
    /// The cgroup with the least memory left, if any limits memory.
    pub cgroup: Option<CgroupBound>,
    /// Left to other processes.
    pub reserve: u64,
}

impl Available {
    /// Bytes that the process may use.
    pub fn budget(&self) -> u64 {
        self.bound().saturating_sub(self.reserve)
    }

    fn bound(&self) -> u64 {
        let left = self.cgroup.as_ref().map_or(u64::MAX, |c| c.left);
        self.mem_available.min(left)
    }
}

/// Reads what is available now.
///
/// # Errors
/// [`MemoryError::Unknown`] when `/proc/meminfo` cannot be read. A cgroup that cannot be read bounds nothing.
pub fn available(roots: &Roots) -> Result<Available, MemoryError> {
    let path = roots.proc.join("meminfo");
    let meminfo = fs::read_to_string(&path)
        .map_err(|error| MemoryError::Unknown(format!("{}: {error}", path.display())))?;
    let field = |name: &str| {
        kib_field(&meminfo, name)
            .ok_or_else(|| MemoryError::Unknown(format!("no {name} in {}", path.display())))
    };
    let mem_available = field("MemAvailable:")?;
    if mem_available == 0 {
        // This process runs, so it is the probe that is broken.
        let text = format!("MemAvailable is 0 in {}", path.display());
        return Err(MemoryError::Unknown(text));
    }
    let mut available = Available {
        mem_total: field("MemTotal:")?,
        mem_available,
        cgroup: tightest_cgroup(roots),
        reserve: 0,
    };
    // A sixteenth for page tables, the allocator's slack, and other processes that grow.
    available.reserve = (available.bound() / 16).clamp(64 << 20, 2 << 30);
    Ok(available)
}

/// How many slabs of `slab_bytes` bytes to read into, for commands that only read: `wanted`, or as many as memory has room for.
///
/// # Errors
/// [`MemoryError::NoSlabs`] when that is fewer than `least`.
pub fn slabs_that_fit(wanted: usize, least: usize, slab_bytes: u64) -> Result<usize, MemoryError> {
    // Unknown memory is no bound.
    let budget = available(&Roots::default()).map_or(u64::MAX, |available| available.budget());
    bounded(wanted, least, slab_bytes, budget)
}

fn bounded(
    wanted: usize,
    least: usize,
    slab_bytes: u64,
    available: u64,
) -> Result<usize, MemoryError> {
    let fit = usize::try_from(available / slab_bytes.max(1)).unwrap_or(usize::MAX);
    if fit < least {
        return Err(MemoryError::NoSlabs {
            slabs: least,
            slab_bytes,
            available,
        });
    }
    Ok(wanted.min(fit).max(least))
}

fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn tightest_cgroup(roots: &Roots) -> Option<CgroupBound> {
    let directories = cgroup::directories(roots, "memory").into_iter();
    let bounds = directories.filter_map(|(version, dir)| bound(&dir, version));
    bounds.min_by_key(|bound| bound.left)
}

/// The limit of one cgroup, if it has one.
fn bound(dir: &Path, version: Version) -> Option<CgroupBound> {
    let number = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(dir.join(name)).ok()?;
        text.trim().parse().ok() // "max" is no number: no limit
    };
    let (limit, used, cache) = match version {
        // Above `high` the process is slowed down until it is below again, so `high` bounds as well.
        Version::V2 => (
            [number("memory.max"), number("memory.high")]
                .into_iter()
                .flatten()
                .min(),
            number("memory.current"),
            ["inactive_file ", "active_file "],
        ),
        Version::V1 => (
            // Unlimited is written as the largest multiple of a page that fits in 63 bits.
            number("memory.limit_in_bytes").filter(|limit| *limit < (1 << 62)),
            number("memory.usage_in_bytes"),
            ["total_inactive_file ", "total_active_file "],
        ),
    };
    let limit = limit?;
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let reclaimable: u64 = stat
        .lines()
        .filter_map(|line| cache.iter().find_map(|name| line.strip_prefix(name)))
        .filter_map(|value| value.trim().parse::<u64>().ok())
        .fold(0, u64::saturating_add);
    let in_use = used.unwrap_or(0).saturating_sub(reclaimable);
    Some(CgroupBound {
        path: dir.to_owned(),
        limit,
        left: limit.saturating_sub(in_use),
    })
}

/// Resident memory of this process in bytes; 0 when it cannot be read.
pub(crate) fn process_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse::<u64>().ok());
    pages
        .unwrap_or(0)
        .saturating_mul(rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    const MEMINFO: (&str, &str) = (
        "proc/meminfo",
        "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n",
    );
    const V2_MOUNT: (&str, &str) = (
        "proc/self/mountinfo",
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
    );

    #[test]
    fn without_cgroups_the_machine_is_the_bound() {
        let (_dir, roots) = Roots::fake(&[MEMINFO]);
        let available = available(&roots).unwrap();
        assert_eq!(available.mem_available, 8 << 30);
        assert_eq!(available.cgroup, None);
        assert_eq!(available.budget(), (8 << 30) - (512 << 20));
    }

    #[test]
    fn no_memory_at_all_is_a_broken_probe() {
        let zero = "MemTotal: 16777216 kB\nMemAvailable:        0 kB\n";
        for text in [zero, "MemTotal: 16777216 kB\n", ""] {
            let (_dir, roots) = Roots::fake(&[("proc/meminfo", text)]);
            let error = available(&roots).unwrap_err().to_string();
            assert!(error.contains("MemAvailable"), "{error}");
        }
    }

    #[test]
    fn an_ancestor_may_be_the_tightest() {
        let (dir, roots) = Roots::fake(&[
            MEMINFO,
            V2_MOUNT,
            ("proc/self/cgroup", "0::/user.slice/app\n"),
            ("sys/fs/cgroup/user.slice/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/user.slice/memory.high", "max\n"),
            ("sys/fs/cgroup/user.slice/memory.current", "209715200\n"),
            (
                "sys/fs/cgroup/user.slice/memory.stat",
                "anon 1\ninactive_file 52428800\nactive_file 52428800\n",
            ),
            ("sys/fs/cgroup/user.slice/app/memory.max", "2147483648\n"),
            ("sys/fs/cgroup/user.slice/app/memory.current", "0\n"),
        ]);
        let bound = available(&roots).unwrap().cgroup.unwrap();
        assert_eq!(bound.path, dir.path().join("sys/fs/cgroup/user.slice"));
        assert_eq!(bound.limit, 1024 * MIB);
        assert_eq!(bound.left, (1024 - 200 + 100) * MIB);
    }

    #[test]
    fn memory_high_bounds_too() {
        let (_dir, roots) = Roots::fake(&[
            MEMINFO,
            V2_MOUNT,
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "max\n"),
            ("sys/fs/cgroup/memory.high", "524288000\n"),
            ("sys/fs/cgroup/memory.current", "104857600\n"),
        ]);
        let available = available(&roots).unwrap();
        assert_eq!(available.cgroup.as_ref().unwrap().left, 400 * MIB);
        assert_eq!(available.budget(), 336 * MIB);
    }

    #[test]
    fn version_1_in_a_container_that_sees_its_part_of_the_tree() {
        let (_dir, roots) = Roots::fake(&[
            MEMINFO,
            (
                "proc/self/mountinfo",
                "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            ),
            (
                "proc/self/cgroup",
                "5:cpu:/docker/abc\n4:hugetlb,memory:/docker/abc/job\n0::/\n",
            ),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            (
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes",
                "1073741824\n",
            ),
            (
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes",
                "1073741824\n",
            ),
            (
                "sys/fs/cgroup/memory/job/memory.stat",
                "total_inactive_file 1048576\ntotal_active_file 0\n",
            ),
        ]);
        let available = available(&roots).unwrap();
        assert_eq!(available.cgroup.as_ref().unwrap().left, MIB);
        assert_eq!(available.budget(), 0);
    }

    #[test]
    fn slabs_for_reading_are_bounded_by_memory() {
        const GIB: u64 = 1 << 30;
        assert_eq!(bounded(10, 2, MIB, GIB).unwrap(), 10);
        assert_eq!(bounded(10, 2, MIB, 5 * MIB).unwrap(), 5);
        let error = bounded(10, 6, MIB, 5 * MIB).unwrap_err().to_string();
        assert!(error.contains("6 slabs of 1.0 MiB"), "{error}");
    }

    #[test]
    fn a_machine_without_meminfo_is_an_error() {
        let (_dir, roots) = Roots::fake(&[]);
        let error = available(&roots).unwrap_err().to_string();
        assert!(error.contains("meminfo"));
    }
}
