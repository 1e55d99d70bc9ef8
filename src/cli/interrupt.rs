//! Handles signals: the first one asks the run to stop, the second one ends the process.
//!
//! A thread receives them. Before a signal ends the process, the thread removes temporary files and restores the terminal.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use colibri_uring::atomic_file;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::emulate_default_handler;

/// Flags that the signal thread and the run share.
#[derive(Clone, Debug)]
pub struct Interrupts {
    /// A signal asked the run to stop. `chat` clears it before the next answer.
    pub asked: Arc<AtomicBool>,
    /// The signal was SIGTERM: the program ends after the run.
    pub terminated: Arc<AtomicBool>,
    /// Nothing runs: signals have their default action.
    pub idle: Arc<AtomicBool>,
}

static INTERRUPTS: LazyLock<Interrupts> = LazyLock::new(|| Interrupts {
    asked: Arc::new(AtomicBool::new(false)),
    terminated: Arc::new(AtomicBool::new(false)),
    idle: Arc::new(AtomicBool::new(true)),
});
/// The signal thread is ending the process.
static ENDING: AtomicBool = AtomicBool::new(false);
/// A model is being loaded.
static LOADING: AtomicBool = AtomicBool::new(false);
/// Directories to remove when the process ends.
static TEMPORARY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
/// The terminal's mode to restore.
static MODE: Mutex<Option<Termios>> = Mutex::new(None);
/// The signal thread, once started.
static WAITING: Mutex<Option<Handle>> = Mutex::new(None);

/// The exit code that shells report for SIGINT.
const INTERRUPTED: u8 = 130;

/// While it exists, SIGINT and SIGTERM end the process: loading does not poll for a stop, and has nothing to save.
#[derive(Debug)]
pub struct Loading(());

impl Loading {
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

/// Returns a flag that the first SIGINT or SIGTERM sets. A second one has its default action.
pub fn install() -> io::Result<Arc<AtomicBool>> {
    // In this order: once signals are caught, the flag works.
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
    /// Prepares for SIGINT and SIGTERM in a conversation, which starts idle. The first one stops an answer. A second one before
    /// the answer stops ends the process.
    pub fn install() -> io::Result<Interrupts> {
        tidy_at_end()?;
        Ok(INTERRUPTS.clone())
    }
}

/// Makes signals remove `dir` before they end the process.
pub fn remove_at_end(dir: &Path) -> io::Result<()> {
    lock(&TEMPORARY).push(dir.to_owned());
    tidy_at_end()
}

/// Makes signals restore the current terminal mode of the standard input before they end the process.
pub fn restore_mode_at_end() -> io::Result<()> {
    *lock(&MODE) = tcgetattr(io::stdin()).ok();
    tidy_at_end()
}

/// Makes signals remove unfinished files before they end the process.
pub fn tidy_at_end() -> io::Result<()> {
    // Under nohup SIGHUP stays ignored.
    match ignores(SIGHUP) {
        true => catch(&[SIGINT, SIGTERM]),
        false => catch(&[SIGHUP, SIGINT, SIGTERM]),
    }
}

/// Removes temporary files and restores the terminal. Call it before the process ends without returning from `main`.
fn tidy() {
    if let Some(mode) = lock(&MODE).take() {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &mode);
    }
    atomic_file::remove_all();
    for dir in lock(&TEMPORARY).drain(..) {
        // Try again while another thread creates files in it. Errors cannot be reported any more.
        let mut tries = 0..100;
        while tries.next().is_some() && dir.exists() {
            let _ = fs::remove_dir_all(&dir);
        }
    }
}

/// Blocks for ever if a signal is ending the process, so that the main thread reports no error about removed files.
pub fn leave_the_end_to_signals() {
    while ENDING.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

/// Makes a write past the limit on the length of files (`ulimit -f`) an error, which names the file. By default SIGXFSZ kills the process.
pub fn fail_oversized_writes() {
    // Fails for no valid signal. Then the default stays.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// The exit code of an interrupted run.
pub fn exit_code() -> ExitCode {
    ExitCode::from(INTERRUPTED)
}

/// Routes these signals to the signal thread, which it starts if needed.
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
        // A closed stderr is not an error.
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
    // In this order: a run that sees `asked` then reads `terminated`.
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

/// Whether this process inherited a signal as ignored.
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
