//! Makes system calls fail on a thread, for tests.

/// Makes the system call `number` fail with `errno` on this thread, as the seccomp profile of a container does. It stays so until the thread
/// ends.
pub(crate) fn deny(number: libc::c_long, errno: i32) {
    let op = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let ret = libc::BPF_RET | libc::BPF_K;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let mut filter = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(equal, 0, 1, number as u32),
        op(ret, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        op(ret, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the program and its filter outlive the calls, which copy them.
    let denied = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
        )
    };
    assert_eq!(denied, 0);
}
