//! Prepares the binary as a child process whose environment and signal actions do not depend on the caller's.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The binary, without COLIBRI_ variables and with default signal actions.
pub fn colibri() -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("colibri-uring"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("COLIBRI_")) {
        command.env_remove(name);
    }
    command.env_remove("RUST_LOG");
    default_signals(&mut command);
    command
}

/// Resets the signals that end a process. A child inherits ignored ones: SIGHUP under nohup, SIGINT and SIGQUIT in the background
/// of a script.
pub fn default_signals(command: &mut Command) {
    let reset = || {
        let signals = [
            libc::SIGHUP,
            libc::SIGINT,
            libc::SIGQUIT,
            libc::SIGPIPE,
            libc::SIGTERM,
        ];
        for signal in signals {
            // SAFETY: a system call on integers; the default action runs no code of this process.
            if unsafe { libc::signal(signal, libc::SIG_DFL) } == libc::SIG_ERR {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only, and allocates nothing.
    unsafe { command.pre_exec(reset) };
}
