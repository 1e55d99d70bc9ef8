//! Signals: the first one asks to stop, the second one kills.
//!
//! A thread waits for them. Where a signal is to end the process, what is temporary is removed first, and the terminal is left as it was.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use colibri_uring::atomic_file;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::emulate_default_handler;

/// What signals have asked for, and what they may do.
#[derive(Clone, Debug)]
pub struct Interrupts {
    /// Somebody asks to stop. A conversation clears it before the next answer.
    pub asked: Arc<AtomicBool>,
    /// The program is to end after that.
    pub terminated: Arc<AtomicBool>,
    /// There is nothing to stop: then signals do what they do without us.
    pub idle: Arc<AtomicBool>,
}

static INTERRUPTS: LazyLock<Interrupts> = LazyLock::new(|| Interrupts {
    asked: Arc::new(AtomicBool::new(false)),
    terminated: Arc::new(AtomicBool::new(false)),
    idle: Arc::new(AtomicBool::new(true)),
});
/// A signal is ending the process.
static ENDING: AtomicBool = AtomicBool::new(false);
/// A model is being loaded.
static LOADING: AtomicBool = AtomicBool::new(false);
/// Directories that do not outlive the process.
static TEMPORARY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
/// The terminal's mode, while it may be another.
static MODE: Mutex<Option<Termios>> = Mutex::new(None);
/// The thread that waits, if there is one.
static WAITING: Mutex<Option<Handle>> = Mutex::new(None);

/// What a shell reports of a program that SIGINT ended.
const INTERRUPTED: u8 = 130;

/// A model is being loaded, and nobody asks whether to stop: SIGINT or SIGTERM says so and ends the process. There is nothing to keep yet.
#[derive(Debug)]
pub struct Loading(());

impl Loading {
    /// From now on, until it is dropped.
    pub fn begin() -> io::Result<Loading> {
        LOADING.store(true, Ordering::SeqCst);
        tidy_at_end()?;
        Ok(Loading(()))
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        LOADING.store(false, Ordering::SeqCst);
    }
}

/// A flag that becomes true at the first SIGINT or SIGTERM. A second one ends the process as it would have done without us.
pub fn install() -> io::Result<Arc<AtomicBool>> {
    // In this order: whoever sees that signals are caught can rely on the flag.
    INTERRUPTS.idle.store(false, Ordering::SeqCst);
    tidy_at_end()?;
    Ok(stop_flag())
}

/// The flag that [`install`] returns.
pub fn stop_flag() -> Arc<AtomicBool> {
    INTERRUPTS.asked.clone()
}

/// Ends [`Loading`]: from now on a signal asks to stop.
pub fn loaded() {
    // In this order: a signal in between would end the process without a word.
    INTERRUPTS.idle.store(false, Ordering::SeqCst);
    LOADING.store(false, Ordering::SeqCst);
}

impl Interrupts {
    /// Prepares for SIGINT and SIGTERM in a conversation, which is idle until it says otherwise. The first one of either stops an
    /// answer; a second one before it has stopped ends the process.
    pub fn install() -> io::Result<Interrupts> {
        tidy_at_end()?;
        Ok(INTERRUPTS.clone())
    }
}

/// From now on no signal ends the process before this directory is removed.
pub fn remove_at_end(dir: &Path) -> io::Result<()> {
    lock(&TEMPORARY).push(dir.to_owned());
    tidy_at_end()
}

/// From now on a signal that ends the process gives the terminal at the standard input back the mode that it has now.
pub fn restore_mode_at_end() -> io::Result<()> {
    *lock(&MODE) = tcgetattr(io::stdin()).ok();
    tidy_at_end()
}

/// From now on a signal that ends the process removes files that were begun and have no name yet.
pub fn tidy_at_end() -> io::Result<()> {
    // Whoever started us with nohup does not want that one to end us.
    match ignores(SIGHUP) {
        true => catch(&[SIGINT, SIGTERM]),
        false => catch(&[SIGHUP, SIGINT, SIGTERM]),
    }
}

/// Removes what is temporary: to be called where the process ends without returning from `main`.
fn tidy() {
    if let Some(mode) = lock(&MODE).take() {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &mode);
    }
    atomic_file::remove_all();
    for dir in lock(&TEMPORARY).drain(..) {
        // Again where somebody still puts files into it. It may be gone already, and there is nobody to tell.
        let mut tries = 0..100;
        while tries.next().is_some() && dir.exists() {
            let _ = fs::remove_dir_all(&dir);
        }
    }
}

/// Returns if no signal is ending the process. If one is, what the main thread comes upon, like files that are gone, is of no interest.
pub fn leave_the_end_to_signals() {
    while ENDING.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

/// What a shell reports of a program that SIGINT ended.
pub fn exit_code() -> ExitCode {
    ExitCode::from(INTERRUPTED)
}

/// Gives these signals to the thread.
fn catch(signals: &[i32]) -> io::Result<()> {
    let mut waiting = lock(&WAITING);
    if let Some(handle) = &*waiting {
        return signals.iter().try_for_each(|s| handle.add_signal(*s));
    }
    let mut caught = Signals::new(signals)?;
    *waiting = Some(caught.handle());
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || caught.forever().for_each(handle))?;
    Ok(())
}

fn handle(signal: i32) {
    if LOADING.load(Ordering::SeqCst) && signal != SIGHUP {
        // Nobody to tell if stderr is closed.
        let _ = writeln!(io::stderr(), "interrupted: the model was not loaded yet");
        ENDING.store(true, Ordering::SeqCst);
        tidy();
        process::exit(INTERRUPTED.into());
    }
    let Interrupts {
        asked,
        terminated,
        idle,
    } = &*INTERRUPTS;
    // In this order: who has been asked to stop wants to know whether to end.
    if signal == SIGTERM {
        terminated.store(true, Ordering::SeqCst);
    }
    let again = asked.swap(true, Ordering::SeqCst);
    if again || signal == SIGHUP || idle.load(Ordering::SeqCst) {
        ENDING.store(true, Ordering::SeqCst);
        tidy();
        let _ = emulate_default_handler(signal);
    }
}

/// Whether this process was started with a signal ignored.
fn ignores(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut lines = status.lines();
    let ignored = lines.find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    ignored.is_some_and(|bits| bits & 1 << (signal - 1) != 0)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
