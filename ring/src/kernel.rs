//! Names what an error of the kernel means and what to do about it, call by call.

use std::fmt;
use std::io;

/// What was asked of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelCall {
    /// io_uring_setup(2), and the eventfd that wakes a ring.
    Setup,
    /// io_uring_enter(2).
    Enter,
    /// io_uring_register(2) of files.
    RegisterFiles,
    /// io_uring_register(2) of the memory of slabs.
    RegisterBuffers,
    /// A read, through io_uring or pread(2).
    Read,
    /// The start of a thread.
    Spawn,
}

/// A call that the kernel refused, with cause and remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelError {
    /// What was asked.
    pub call: KernelCall,
    /// The kernel's answer, as in errno(3).
    pub errno: i32,
}

/// Why a device cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The kernel refuses to work for it.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Its thread panicked.
    #[error("its thread panicked; this is a bug in colibri-ring")]
    Panicked,
}

impl KernelError {
    pub(crate) fn new(call: KernelCall, error: &io::Error) -> KernelError {
        KernelError {
            call,
            errno: error.raw_os_error().unwrap_or(0),
        }
    }

    /// What probably led to it.
    pub fn cause(&self) -> &'static str {
        self.explanation().0
    }

    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        self.explanation().1
    }

    /// Whether reading with [`EngineKind::Pread`](crate::EngineKind::Pread) avoids the call.
    pub fn is_of_uring(&self) -> bool {
        !matches!(self.call, KernelCall::Read | KernelCall::Spawn)
    }

    fn explanation(&self) -> (&'static str, &'static str) {
        let table = match self.call {
            KernelCall::Setup => SETUP,
            KernelCall::Enter => ENTER,
            KernelCall::RegisterFiles => REGISTER_FILES,
            KernelCall::RegisterBuffers => REGISTER_BUFFERS,
            KernelCall::Read => READ,
            KernelCall::Spawn => SPAWN,
        };
        let case = table.iter().find(|(errno, ..)| *errno == self.errno);
        match case {
            Some((_, cause, remedy)) => (cause, remedy),
            None if self.is_of_uring() => ("no cause is known", PREAD),
            None => (
                "no cause is known",
                "look for messages of the kernel: dmesg",
            ),
        }
    }
}

impl std::error::Error for KernelError {}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let call = match self.call {
            KernelCall::Setup => "io_uring_setup",
            KernelCall::Enter => "io_uring_enter",
            KernelCall::RegisterFiles => "io_uring_register of files",
            KernelCall::RegisterBuffers => "io_uring_register of slabs",
            KernelCall::Read => "read",
            KernelCall::Spawn => "starting a thread",
        };
        let answer = io::Error::from_raw_os_error(self.errno);
        let (cause, remedy) = self.explanation();
        write!(f, "{call} fails: {answer}: {cause}; {remedy}")
    }
}

/// Whether the error of a read means that the file system refuses the way of reading, as it may with O_DIRECT, not that the drive fails.
pub fn is_refusal(error: &io::Error) -> bool {
    /// The kernel's internal ENOTSUP, which some drivers let out. The public one is EOPNOTSUPP.
    const ENOTSUPP: i32 = 524;
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::EOPNOTSUPP | ENOTSUPP)
    )
}

/// The end of a message about a failed read: cause and remedy, where the kernel gave the error.
pub(crate) fn explained(source: &io::Error) -> String {
    let Some(errno) = source.raw_os_error() else {
        return String::new();
    };
    let error = KernelError {
        call: KernelCall::Read,
        errno,
    };
    format!(": {}; {}", error.cause(), error.remedy())
}

/// Errno, cause, remedy.
type Case = (i32, &'static str, &'static str);

const PREAD: &str = "read without io_uring (EngineKind::Pread)";
const BUG: &str =
    "report it as a bug in colibri-ring, and read without io_uring (EngineKind::Pread) meanwhile";
const ALLOW: &str = "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile of the container, \
    or read without io_uring (EngineKind::Pread)";
const SECURITY: &str = "allow io_uring in the security module of this machine (SELinux, AppArmor, BPF LSM), \
    or read without io_uring (EngineKind::Pread)";
const MEMLOCK: &str =
    "raise the limit: ulimit -l unlimited, or LimitMEMLOCK=infinity in a systemd unit";
const DESCRIPTORS: &str = "raise the limit: ulimit -n 65536, or LimitNOFILE= in a systemd unit";

#[rustfmt::skip]
const SETUP: &[Case] = &[
    (libc::EPERM, "io_uring is disabled by the sysctl kernel.io_uring_disabled or denied by a seccomp filter, as in most containers",
        ALLOW),
    (libc::EACCES, "io_uring is denied by a security policy", SECURITY),
    (libc::ENOSYS, "this kernel has no io_uring, or a seccomp filter hides it",
        "use Linux 5.6 or later, built with CONFIG_IO_URING, or read without io_uring (EngineKind::Pread)"),
    (libc::ENOMEM, "no memory for a ring; before Linux 5.12 it counts against the limit on locked memory (memlock)", MEMLOCK),
    (libc::EMFILE, "this process has no file descriptor left for a ring", DESCRIPTORS),
    (libc::ENFILE, "the system has no file descriptor left for a ring", "raise the sysctl fs.file-max"),
    (libc::EINVAL, "the kernel does not know a flag, or the ring has too many entries", "give each drive a window of fewer reads"),
];

#[rustfmt::skip]
const ENTER: &[Case] = &[
    (libc::EAGAIN, "the kernel has no memory for requests", "free memory, or read without io_uring (EngineKind::Pread)"),
    (libc::EBUSY, "completions overflow and the kernel has no memory to keep them",
        "free memory, or read without io_uring (EngineKind::Pread)"),
    (libc::EPERM, "a seccomp filter allows rings to be made and forbids their use", ALLOW),
    (libc::EACCES, "a security policy forbids the use of the ring", SECURITY),
    (libc::ENOSYS, "a seccomp filter allows rings to be made and hides their use", ALLOW),
    (libc::EBADR, "the kernel had no memory for completions and lost some",
        "free memory, or read without io_uring (EngineKind::Pread)"),
    (libc::EEXIST, "another thread than the ring's owner has entered it", BUG),
    (libc::EBADFD, "the ring is not enabled", BUG),
    (libc::EBADF, "the descriptor of the ring was closed by other code",
        "look for code that closes descriptors that it does not own"),
    (libc::EOPNOTSUPP, "the descriptor of the ring was replaced by other code",
        "look for code that closes descriptors that it does not own"),
    (libc::ENXIO, "the ring is being torn down", BUG),
    (libc::EFAULT, "memory of the ring is not mapped", BUG),
    (libc::EINVAL, "an argument or an entry is invalid", BUG),
];

#[rustfmt::skip]
const REGISTER_FILES: &[Case] = &[
    (libc::EMFILE, "more files than this process may have open", DESCRIPTORS),
    (libc::ENOMEM, "no memory for the table of files", "free memory"),
    (libc::EPERM, "denied by a seccomp filter", ALLOW),
    (libc::EACCES, "denied by a security policy", SECURITY),
    (libc::EBADF, "a descriptor was closed by other code", "look for code that closes descriptors that it does not own"),
    (libc::EINVAL, "this kernel does not register empty places, or not as many", "use Linux 5.12 or later"),
];

#[rustfmt::skip]
const REGISTER_BUFFERS: &[Case] = &[
    (libc::ENOMEM, "registered slabs count against the limit on locked memory", MEMLOCK),
    (libc::EPERM, "denied by a seccomp filter", ALLOW),
    (libc::EACCES, "denied by a security policy", SECURITY),
    (libc::EFAULT, "the memory of a slab cannot be pinned", BUG),
    (libc::EOPNOTSUPP, "the memory of a slab is backed by a file", BUG),
    (libc::EINVAL, "more regions than this kernel registers", "use Linux 5.13 or later"),
];

#[rustfmt::skip]
const READ: &[Case] = &[
    (libc::EIO, "the drive failed", "see dmesg and smartctl -a; read from another copy"),
    (libc::ENODATA, "the drive cannot read the medium", "see dmesg and smartctl -a; read from another copy"),
    (libc::EREMOTEIO, "the drive reports a fault", "see dmesg and smartctl -a; read from another copy"),
    (libc::EILSEQ, "the data does not match its checksum", "copy the file again"),
    (libc::EUCLEAN, "the file system is damaged", "unmount and check it (fsck, btrfs scrub, xfs_repair)"),
    (libc::ENXIO, "the drive is gone", "connect it again, and open the file again"),
    (libc::ENODEV, "the drive is gone", "connect it again, and open the file again"),
    (libc::ESTALE, "the network mount has replaced or removed the file", "open the file again"),
    (libc::ETIMEDOUT, "the drive or network mount did not answer in time", "check the connection"),
    (libc::ENOTCONN, "the network mount has lost its server", "mount it again"),
    (libc::EHOSTDOWN, "the server of the network mount is down", "start it again"),
    (libc::EHOSTUNREACH, "the server of the network mount is unreachable", "check the network"),
    (libc::ENOKEY, "the key of the encrypted file is not loaded", "unlock the directory"),
    (libc::EOPNOTSUPP, "the file system cannot read this way", "read through the page cache (DirectMode::Off)"),
    (libc::EINVAL, "the file system refuses the alignment of the read", "read through the page cache (DirectMode::Off)"),
    (libc::ENOMEM, "the kernel has no memory for the read", "free memory"),
    (libc::EAGAIN, "the kernel had no resources for the read a hundred times", "free memory, or give the drive a smaller window"),
    (libc::EINTR, "the read was interrupted a hundred times", "look for the sender of the signals"),
    (libc::ECANCELED, "the kernel cancelled the read", "look for a process that is ending"),
    (libc::EPERM, "a security policy forbids the read", "allow it in the security module of this machine"),
    (libc::EACCES, "a security policy or the server forbids the read", "check the permissions of the file"),
    (libc::EBADF, "the descriptor was closed by other code", "look for code that closes descriptors that it does not own"),
    (libc::EFAULT, "the memory of the slab is not mapped", "report it as a bug in colibri-ring"),
    (libc::EISDIR, "it is a directory", "name a file"),
];

#[rustfmt::skip]
const SPAWN: &[Case] = &[
    (libc::EAGAIN, "the limit on threads is reached, or no memory is left",
        "raise the limit: ulimit -u, TasksMax= of a systemd unit, --pids-limit of a container"),
    (libc::ENOMEM, "no memory for the stack of the thread", "free memory"),
    (libc::EPERM, "a security policy forbids the scheduling of the thread", "allow it in the security module of this machine"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_named_once_with_cause_and_remedy() {
        for table in [SETUP, ENTER, REGISTER_FILES, REGISTER_BUFFERS, READ, SPAWN] {
            for (i, (errno, cause, remedy)) in table.iter().enumerate() {
                assert!(
                    table[..i].iter().all(|(other, ..)| other != errno),
                    "{errno}"
                );
                assert!(!cause.is_empty() && !remedy.is_empty());
            }
        }
    }

    #[test]
    fn a_refused_ring_names_the_device_that_needs_none() {
        for errno in [libc::EAGAIN, libc::EBUSY, libc::EPERM, libc::ENOSYS, 9999] {
            let error = KernelError {
                call: KernelCall::Enter,
                errno,
            };
            let text = error.to_string();
            assert!(
                error.is_of_uring() && text.contains("EngineKind::Pread"),
                "{text}"
            );
        }
    }
}
