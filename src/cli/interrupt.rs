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

/// Signals to a conversation.
#[derive(Clone, Debug)]
pub struct Interrupts {
    /// The answer is to stop. To be cleared before the next one.
    pub asked: Arc<AtomicBool>,
    /// The program is to end after it.
    pub terminated: Arc<AtomicBool>,
    /// Nothing is being answered: then signals do what they do without us.
    pub idle: Arc<AtomicBool>,
}

impl Interrupts {
    /// Prepares for SIGINT and SIGTERM. The first one of either stops an answer; a second one before it has stopped ends the process.
    pub fn install() -> io::Result<Interrupts> {
        let interrupts = Interrupts {
            asked: Arc::new(AtomicBool::new(false)),
            terminated: Arc::new(AtomicBool::new(false)),
            idle: Arc::new(AtomicBool::new(true)),
        };
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_default(signal, Arc::clone(&interrupts.idle))?;
            flag::register_conditional_default(signal, Arc::clone(&interrupts.asked))?;
            flag::register(signal, Arc::clone(&interrupts.asked))?;
        }
        flag::register(SIGTERM, Arc::clone(&interrupts.terminated))?;
        Ok(interrupts)
    }
}

/// What a shell reports of a program that SIGINT ended.
pub fn exit_code() -> ExitCode {
    ExitCode::from(130)
}
