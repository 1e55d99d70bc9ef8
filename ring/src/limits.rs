//! Reads and raises the limits on registered memory and open files.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A soft and a hard limit; `None` is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What the kernel enforces now.
    pub soft: Option<u64>,
    /// How far the process may raise the soft limit.
    pub hard: Option<u64>,
}

impl Limit {
    fn get(resource: Resource) -> Limit {
        let limit = getrlimit(resource);
        Limit {
            soft: limit.current,
            hard: limit.maximum,
        }
    }
}

/// Bytes that may be locked; registered buffers count against it unless [`may_lock_any_memory`].
pub fn memlock() -> Limit {
    Limit::get(Resource::Memlock)
}

/// Open file descriptors.
pub fn descriptors() -> Limit {
    Limit::get(Resource::Nofile)
}

/// Whether registered memory is exempt from the memlock limit, which needs CAP_IPC_LOCK in the initial user namespace: the root of
/// a rootless container does not have it there.
pub fn may_lock_any_memory() -> bool {
    let capable = rustix::thread::capabilities(None).is_ok_and(|sets| {
        sets.effective
            .contains(rustix::thread::CapabilitySet::IPC_LOCK)
    });
    capable
        && std::fs::read_to_string("/proc/self/uid_map")
            .map_or(true, |map| is_initial_user_namespace(&map))
}

/// Whether a `uid_map` is the identity on all ids, which it is in the initial user namespace only.
fn is_initial_user_namespace(uid_map: &str) -> bool {
    let mut fields = uid_map.split_whitespace();
    fields.next() == Some("0") && fields.next() == Some("0") && fields.next() == Some("4294967295")
}

/// Raises the soft limit of open descriptors to the hard one, and returns the soft limit afterwards
/// (`None`: unlimited).
///
/// The usual soft limit is 1024; 156 files with five copies, each with a second descriptor for O_DIRECT, hold 1560.
///
/// # Errors
/// The kernel's error when the limit cannot be raised. The old limit then still holds, and a caller may go on.
pub fn raise_open_files() -> io::Result<Option<u64>> {
    raise(Resource::Nofile)
}

/// Raises the soft limit of locked memory, which registered slabs count against, to the hard one, and returns the
/// soft limit afterwards in bytes (`None`: unlimited).
///
/// # Errors
/// As [`raise_open_files`].
pub fn raise_locked_memory() -> io::Result<Option<u64>> {
    raise(Resource::Memlock)
}

fn raise(resource: Resource) -> io::Result<Option<u64>> {
    let limit = getrlimit(resource);
    if limit.current != limit.maximum {
        let raised = Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        };
        setrlimit(resource, raised)?;
    }
    Ok(limit.maximum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let raised = raise_open_files().unwrap();
        let limit = descriptors();
        assert_eq!(limit.soft, limit.hard);
        assert_eq!(raised, limit.hard);
    }

    #[test]
    fn only_the_identity_map_is_the_initial_namespace() {
        assert!(is_initial_user_namespace(
            "         0          0 4294967295\n"
        ));
        assert!(!is_initial_user_namespace(
            "         0       1000          1\n         1     100000      65536\n"
        ));
        assert!(!is_initial_user_namespace(""));
    }
}
