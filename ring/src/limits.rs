//! Limits of the process that a model of many files runs into.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open descriptors to the hard one, and returns the soft limit afterwards
/// (`None`: unlimited).
///
/// The usual soft limit is 1024, while a model of 156 files with a primary and four mirrors, each file
/// with an O_DIRECT twin, holds 1560 descriptors.
///
/// # Errors
/// The operating system's answer when the limit cannot be raised. The old limit then still stands, so a
/// caller may go on: a file that cannot be opened says so itself.
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
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
        assert_eq!(raised, limit.maximum);
    }
}
