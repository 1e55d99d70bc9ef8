//! Resource limits that decide how much memory may be registered and how many files may be open.

use rustix::process::{Resource, getrlimit};

/// A soft and a hard limit; `None` is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What the kernel enforces now.
    pub soft: Option<u64>,
    /// How far the process may raise the soft limit by itself.
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

/// Whether registered memory is exempt from the memlock limit: CAP_IPC_LOCK in the initial user
/// namespace. io_uring asks for the capability there, so the root of a rootless container does not
/// have it, whatever its capability set says.
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

#[cfg(test)]
mod tests {
    use super::*;

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
