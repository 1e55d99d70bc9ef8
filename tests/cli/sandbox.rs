//! Takes privileges and resources from a child process before it becomes the binary.

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

/// Drops capabilities from the bounding set, so that exec does not give them to root.
fn without_capabilities(command: &mut Command, capabilities: &'static [c_ulong]) {
    let drop = move || {
        for &capability in capabilities {
            // SAFETY: a system call on integers.
            let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
            // EPERM: the process has no capabilities to drop.
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

/// Makes file permissions hold for root too.
pub fn obey_permissions(command: &mut Command) {
    without_capabilities(command, &[CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH]);
}

/// Limits locked memory, for root too.
pub fn limit_memlock(command: &mut Command, bytes: u64) {
    without_capabilities(command, &[CAP_IPC_LOCK]);
    limit(command, libc::RLIMIT_MEMLOCK, bytes);
}

/// Limits file descriptors.
pub fn limit_files(command: &mut Command, files: u64) {
    limit(command, libc::RLIMIT_NOFILE, files);
}

/// Limits the length of files, like a full disk: writes fail with EFBIG.
pub fn limit_file_size(command: &mut Command, bytes: u64) {
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

/// Makes a system call fail with `errno`, as seccomp profiles of containers do.
pub fn deny(command: &mut Command, call: libc::c_long, errno: c_int) {
    let op = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    // The filter's input begins with the number of the system call.
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

/// Whether io_uring works on this machine. Prints a note if not, because the test then checks less.
pub fn io_uring() -> bool {
    match colibri_ring::probe::uring() {
        Ok(_) => true,
        Err(why) => {
            println!("skipped what needs io_uring: {why}");
            false
        }
    }
}
