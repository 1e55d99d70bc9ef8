//! Counts the compute threads that the process's processors can run.

use std::fs;
use std::path::Path;

use crate::cgroup::{self, Version};
use crate::memory::Roots;

/// The default of `--threads`: one for each CPU that the process may run on, and not more than its control groups give it time for.
/// A fraction of a CPU counts as one: with a quota of 1.5 CPUs, two threads were faster than one.
pub fn default_threads() -> usize {
    let allowed = rustix::thread::sched_getaffinity(None).map(|set| set.count() as usize);
    let cpus = allowed.unwrap_or_else(|_| {
        // Rounds quotas down, and knows more than 1024 CPUs.
        std::thread::available_parallelism().map_or(1, usize::from)
    });
    threads_within(cpus, &Roots::default())
}

fn threads_within(cpus: usize, roots: &Roots) -> usize {
    let quotas = cgroup::directories(roots, "cpu");
    let quotas = quotas
        .iter()
        .filter_map(|(version, dir)| quota(*version, dir));
    let tightest = quotas.fold(f64::INFINITY, f64::min);
    // A cast saturates.
    cpus.min(tightest.ceil() as usize).max(1)
}

/// CPUs that a control group gives time for, if that is limited.
fn quota(version: Version, dir: &Path) -> Option<f64> {
    let text = |name: &str| fs::read_to_string(dir.join(name)).ok();
    let (quota, period) = match version {
        Version::V2 => {
            let max = text("cpu.max")?;
            let (quota, period) = max.trim().split_once(' ')?;
            (quota.to_owned(), period.to_owned())
        }
        Version::V1 => (text("cpu.cfs_quota_us")?, text("cpu.cfs_period_us")?),
    };
    // "max" and -1: no limit.
    let number = |text: &str| text.trim().parse::<u64>().ok().filter(|n| *n > 0);
    Some(number(&quota)? as f64 / number(&period)? as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads of a process in the group `/a/b` on a machine with `cpus` CPUs, where these files exist.
    fn threads(cpus: usize, mount: &str, files: &[(&str, &str)]) -> usize {
        let membership = ("proc/self/cgroup", "3:cpu,cpuacct:/a/b\n0::/a/b\n");
        let files = [&[("proc/self/mountinfo", mount), membership], files].concat();
        let (_dir, roots) = Roots::fake(&files);
        threads_within(cpus, &roots)
    }

    #[test]
    fn a_fraction_of_a_cpu_is_a_thread() {
        let mount = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let with = |max| threads(4, mount, &[("sys/fs/cgroup/a/b/cpu.max", max)]);
        assert_eq!(with("150000 100000\n"), 2);
        assert_eq!(with("250000 100000\n"), 3);
        assert_eq!(with("200000 100000\n"), 2);
        assert_eq!(with("20000 100000\n"), 1);
        assert_eq!(with("900000 100000\n"), 4, "no more than CPUs");
        assert_eq!(with("max 100000\n"), 4);
        assert_eq!(with("broken"), 4);
        assert_eq!(threads(4, mount, &[]), 4);
    }

    #[test]
    fn the_tightest_ancestor_counts() {
        let mount = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let files = [
            ("sys/fs/cgroup/a/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/a/b/cpu.max", "max 100000\n"),
        ];
        assert_eq!(threads(8, mount, &files), 2);
    }

    #[test]
    fn version_1_has_two_files() {
        let mount = "35 31 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n";
        let with = |quota| {
            let files = [
                ("sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", quota),
                ("sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000\n"),
            ];
            threads(4, mount, &files)
        };
        assert_eq!((with("150000\n"), with("-1\n")), (2, 4));
    }
}
