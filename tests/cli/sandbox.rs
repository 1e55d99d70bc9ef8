//! Takes rights and resources from a child process before it becomes the binary.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use libc::{c_int, c_ulong, rlim_t};

const CAP_DAC_OVERRIDE: c_ulong = 1;
const CAP_DAC_READ_SEARCH: c_ulong = 2;
const CAP_IPC_LOCK: c_ulong = 14;

fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Without these, root is like anybody: exec gives it only what is in the bounding set.
fn without_capabilities(command: &mut Command, capabilities: &'static [c_ulong]) {
    let drop = move || {
        for &capability in capabilities {
            // SAFETY: a system call on integers.
            let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
            // Only who has no capabilities at all may not drop one.
            match check(result) {
                Err(e) if e.raw_os_error() != Some(libc::EPERM) => return Err(e),
                _ => {}
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only, and allocates nothing.
    unsafe { command.pre_exec(drop) };
}

/// A file's permissions hold for root too.
pub fn obey_permissions(command: &mut Command) {
    without_capabilities(command, &[CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH]);
}

/// At most this much memory may be locked, whoever runs it.
pub fn limit_memlock(command: &mut Command, bytes: u64) {
    without_capabilities(command, &[CAP_IPC_LOCK]);
    limit(command, libc::RLIMIT_MEMLOCK, bytes);
}

/// At most this many descriptors.
pub fn limit_files(command: &mut Command, files: u64) {
    limit(command, libc::RLIMIT_NOFILE, files);
}

/// No file may become longer than this, as on a disk that is full: writing fails with EFBIG.
pub fn limit_file_size(command: &mut Command, bytes: u64) {
    // SAFETY: a system call on integers; what is ignored stays so through exec.
    let ignore = || match unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    };
    // SAFETY: the closure makes one system call, and allocates nothing.
    unsafe { command.pre_exec(ignore) };
    limit(command, libc::RLIMIT_FSIZE, bytes);
}

fn limit(command: &mut Command, resource: libc::__rlimit_resource_t, value: u64) {
    let limit = libc::rlimit {
        rlim_cur: value as rlim_t,
        rlim_max: value as rlim_t,
    };
    // SAFETY: setrlimit reads the struct, which the closure owns.
    let set = move || check(unsafe { libc::setrlimit(resource, &raw const limit) });
    // SAFETY: the closure makes one system call, and allocates nothing.
    unsafe { command.pre_exec(set) };
}

/// A system call (of io_uring, say) fails with `errno`, as seccomp profiles of containers make it.
pub fn deny(command: &mut Command, call: libc::c_long, errno: c_int) {
    let op = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    // The number of the system call is the first word of what the filter is shown.
    let load = op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0);
    let is_it = op(
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        0,
        1,
        call as u32,
    );
    let ret = libc::BPF_RET | libc::BPF_K;
    let refuse = op(ret, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32);
    let allow = op(ret, 0, 0, libc::SECCOMP_RET_ALLOW);
    let mut filter = [load, is_it, refuse, allow];
    let install = move || {
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: the program and its filter outlive the calls, which copy them.
        unsafe {
            check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
            let (mode, program) = (libc::SECCOMP_MODE_FILTER, &raw const program);
            check(libc::prctl(libc::PR_SET_SECCOMP, mode, program))
        }
    };
    // SAFETY: the closure makes system calls only, and allocates nothing.
    unsafe { command.pre_exec(install) };
}

/// Whether io_uring works here when nobody forbids it; says so if not, because the test is then about less.
pub fn io_uring() -> bool {
    match colibri_ring::probe::uring() {
        Ok(_) => true,
        Err(why) => {
            println!("skipped what needs io_uring: {why}");
            false
        }
    }
}
