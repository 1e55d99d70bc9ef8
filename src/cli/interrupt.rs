//! Ctrl-C: the first one asks to stop, the second one kills.

use std::io::{self, Write};
use std::process::{self, ExitCode};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};

/// What a shell reports of a program that SIGINT ended.
const INTERRUPTED: u8 = 130;

/// A model is being loaded, and nobody asks whether to stop: a SIGINT or SIGTERM says so and ends the process. There is nothing to keep yet.
#[derive(Debug)]
pub struct Loading {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Loading {
    /// From now on, until it is dropped.
    pub fn begin() -> io::Result<Loading> {
        let (send, receive) = mpsc::channel();
        let wait = move || {
            let signals = Signals::new([SIGINT, SIGTERM]);
            let handle = signals.as_ref().map(Signals::handle);
            // Whoever has begun this waits for it.
            let _ = send.send(handle.map_err(|error| error.kind().into()));
            if signals.is_ok_and(|mut signals| signals.forever().next().is_some()) {
                // Nobody to tell if stderr is closed.
                let _ = writeln!(io::stderr(), "interrupted: the model was not loaded yet");
                process::exit(INTERRUPTED.into());
            }
        };
        let thread = thread::Builder::new().name("loading".into()).spawn(wait)?;
        let caught: io::Result<Handle> = receive.recv().map_err(io::Error::other)?;
        Ok(Loading {
            handle: caught?,
            thread: Some(thread),
        })
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            // It does not panic.
            let _ = thread.join();
        }
    }
}

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
    /// Prepares for SIGINT and SIGTERM, now that the model is loaded. The first one of either stops an answer; a second one before it has
    /// stopped ends the process.
    pub fn install(loading: Loading) -> io::Result<Interrupts> {
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
        // Not before: in between a signal would do nothing.
        drop(loading);
        Ok(interrupts)
    }
}

/// What a shell reports of a program that SIGINT ended.
pub fn exit_code() -> ExitCode {
    ExitCode::from(INTERRUPTED)
}
