//! Tries what this kernel allows: io_uring and its features, huge pages, O_DIRECT.
//!
//! Containers, sysctls and seccomp filters restrict a kernel, so that its version number says little.

use std::io;

use io_uring::{IoUring, opcode, register};

use crate::kernel::{KernelCall, KernelError};
use crate::limits;

pub mod direct;
pub mod huge;

/// Release of the running kernel, as `uname -r` prints it.
pub fn kernel() -> String {
    rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned()
}

/// Features of rings, each tried on a separate ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UringFeatures {
    /// IORING_SETUP_SINGLE_ISSUER (Linux 6.0): one thread submits.
    pub single_issuer: bool,
    /// IORING_SETUP_DEFER_TASKRUN (Linux 6.1): completions run when that thread asks for them.
    pub defer_taskrun: bool,
    /// IORING_SETUP_COOP_TASKRUN (Linux 5.19): no interrupt to deliver a completion.
    pub coop_taskrun: bool,
    /// IORING_SETUP_TASKRUN_FLAG (Linux 5.19): the ring says when completions wait.
    pub taskrun_flag: bool,
    /// A table of buffers can be registered.
    pub registered_buffers: bool,
    /// A table of files can be registered.
    pub registered_files: bool,
    /// IORING_OP_READ_FIXED: reads into registered buffers.
    pub read_fixed: bool,
    /// IORING_OP_READ: reads into other memory.
    pub read: bool,
}

impl UringFeatures {
    /// Each feature by its usual name, in the order of the fields.
    pub fn named(&self) -> [(&'static str, bool); 8] {
        [
            ("SINGLE_ISSUER", self.single_issuer),
            ("DEFER_TASKRUN", self.defer_taskrun),
            ("COOP_TASKRUN", self.coop_taskrun),
            ("TASKRUN_FLAG", self.taskrun_flag),
            ("registered buffers", self.registered_buffers),
            ("registered files", self.registered_files),
            ("READ_FIXED", self.read_fixed),
            ("READ", self.read),
        ]
    }
}

/// Why there is no io_uring.
#[derive(Debug, thiserror::Error)]
#[error("{reason} ({source})")]
pub struct NoUring {
    /// The likely cause in words.
    pub reason: String,
    /// The remedy.
    pub advice: &'static str,
    /// The kernel's error.
    pub source: io::Error,
}

/// Makes a small ring and enters it: a seccomp filter may deny either.
///
/// # Errors
/// The kernel's error.
pub fn try_ring() -> io::Result<()> {
    IoUring::new(ENTRIES)?.submit()?;
    Ok(())
}

/// Makes rings and tries their features.
///
/// # Errors
/// [`NoUring`] when no ring can be made; it names the likely cause.
pub fn uring() -> Result<UringFeatures, NoUring> {
    let entered = IoUring::new(ENTRIES).and_then(|ring| ring.submit().map(|_| ring));
    let ring = entered.map_err(|source| {
        explain(
            source,
            sysctl_disabled(),
            seccomp_active(),
            limits::may_lock_any_memory(),
        )
    })?;
    let mut opcodes = register::Probe::new();
    let probed = ring.submitter().register_probe(&mut opcodes).is_ok();
    let supports = |code| probed && opcodes.is_supported(code);
    Ok(UringFeatures {
        single_issuer: can_set_up(|b| b.setup_single_issuer()),
        defer_taskrun: can_set_up(|b| b.setup_single_issuer().setup_defer_taskrun()),
        coop_taskrun: can_set_up(|b| b.setup_coop_taskrun()),
        taskrun_flag: can_set_up(|b| b.setup_coop_taskrun().setup_taskrun_flag()),
        registered_buffers: ring.submitter().register_buffers_sparse(1).is_ok(),
        registered_files: ring.submitter().register_files_sparse(1).is_ok(),
        read_fixed: supports(opcode::ReadFixed::CODE),
        read: supports(opcode::Read::CODE),
    })
}

/// Size of the test rings: small, because kernels before 5.12 charge it to RLIMIT_MEMLOCK.
const ENTRIES: u32 = 2;

fn can_set_up(flags: impl FnOnce(&mut io_uring::Builder) -> &mut io_uring::Builder) -> bool {
    let mut builder = IoUring::builder();
    flags(&mut builder).build(ENTRIES).is_ok()
}

/// `kernel.io_uring_disabled`: 0 allows io_uring, 1 only to privileged processes and one group, 2 to no process. `None` on kernels
/// without the sysctl (before 6.6).
fn sysctl_disabled() -> Option<u32> {
    let text = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok()?;
    text.trim().parse().ok()
}

/// Whether a seccomp filter is on this process.
fn seccomp_active() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        status
            .lines()
            .any(|line| line.strip_prefix("Seccomp:").map(str::trim) == Some("2"))
    })
}

/// The likely cause of a refused ring, from the kernel's error and the settings that lead to it.
fn explain(source: io::Error, sysctl: Option<u32>, seccomp: bool, may_lock: bool) -> NoUring {
    const SECCOMP: &str =
        "run the container with a seccomp profile that allows io_uring_setup, _enter and _register";
    let general = KernelError::new(KernelCall::Setup, &source);
    let (reason, advice) = match (source.raw_os_error(), sysctl) {
        (Some(libc::EPERM), Some(2)) => (
            "io_uring is disabled by sysctl: kernel.io_uring_disabled = 2",
            "sysctl -w kernel.io_uring_disabled=0",
        ),
        (Some(libc::EPERM), Some(1)) => (
            "io_uring is for privileged processes only: kernel.io_uring_disabled = 1",
            "sysctl -w kernel.io_uring_disabled=0, or join the group in kernel.io_uring_group",
        ),
        (Some(libc::EPERM | libc::EACCES), _) if seccomp => {
            ("io_uring is denied by a seccomp filter", SECCOMP)
        }
        (Some(libc::EPERM | libc::EACCES), _) => (
            "io_uring is denied by a security policy",
            "allow io_uring in the security module of this machine (SELinux, AppArmor, BPF LSM)",
        ),
        (Some(libc::ENOSYS), _) if seccomp => (
            "io_uring is hidden by a seccomp filter or missing from the kernel",
            SECCOMP,
        ),
        (Some(libc::ENOSYS), _) => (
            "this kernel has no io_uring",
            "use Linux 5.6 or later, built with CONFIG_IO_URING",
        ),
        (Some(libc::ENOMEM), _) if may_lock => ("no memory for a ring", "free memory"),
        _ => (general.cause(), general.remedy()),
    };
    NoUring {
        reason: reason.to_owned(),
        advice,
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(errno: i32, sysctl: Option<u32>, seccomp: bool) -> String {
        explain(io::Error::from_raw_os_error(errno), sysctl, seccomp, false).to_string()
    }

    #[test]
    fn a_refusal_names_its_likely_cause() {
        assert!(reason(libc::EPERM, Some(2), false).contains("kernel.io_uring_disabled = 2"));
        assert!(reason(libc::EPERM, Some(1), true).contains("kernel.io_uring_disabled = 1"));
        assert!(reason(libc::EPERM, Some(0), true).contains("denied by a seccomp filter"));
        assert!(reason(libc::EPERM, None, false).contains("security policy"));
        assert!(reason(libc::ENOSYS, None, true).contains("seccomp"));
        assert!(reason(libc::ENOSYS, None, false).contains("this kernel has no io_uring"));
        assert!(reason(libc::ENOMEM, Some(0), false).contains("memlock"));
        assert!(reason(libc::EMFILE, Some(0), false).contains("file descriptor"));
        assert!(reason(libc::EINVAL, Some(0), false).contains("Invalid argument"));
    }

    #[test]
    fn the_probe_answers_either_way() {
        match uring() {
            Ok(features) => assert!(!features.defer_taskrun || features.single_issuer),
            Err(denied) => assert!(!denied.advice.is_empty()),
        }
    }
}
