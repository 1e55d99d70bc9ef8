//! Ctrl-C: the first one asks to stop, the second one kills.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// A flag that becomes true at the first SIGINT or SIGTERM. A second one ends the process as it would have done without us.
pub fn install() -> io::Result<Arc<AtomicBool>> {
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag still false, and only then sets it.
        flag::register_conditional_default(signal, Arc::clone(&asked))?;
        flag::register(signal, Arc::clone(&asked))?;
    }
    Ok(asked)
}

/// What a shell reports of a program that SIGINT ended.
pub fn exit_code() -> ExitCode {
    ExitCode::from(130)
}
