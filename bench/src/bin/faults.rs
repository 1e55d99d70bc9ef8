//! Makes every system call of the program fail once, with each error that it may give, and checks how the program ends.
//! Needs strace: `cargo run --release -p colibri-bench --bin faults`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use colibri_bench::binary;

/// Makes every system call of decode, convert and mirror stage fail once, and checks how the program ends
#[derive(Debug, Parser)]
#[command(
    after_help = "Needs strace and the fixtures of the repository. It takes about ten minutes on two cores.\n\n\
    A run must print what it prints without the fault, or end with one line of error and exit code 1. The model must not change, and the \
    same command without a fault must then give the right result.\n\n\
    Example:\n  cargo build --release --workspace && target/release/faults --only decode --call pread64"
)]
struct Args {
    /// Only this command
    #[arg(long, value_parser = ["decode", "pread", "convert", "stage"])]
    only: Option<String>,
    /// Only this system call
    #[arg(long)]
    call: Option<String>,
    /// Most calls of one kind and thread to make fail
    #[arg(long, default_value_t = 48)]
    most: usize,
    /// Seconds after which a run hangs
    #[arg(long, default_value_t = 60)]
    patience: u64,
}

/// A command that is run again and again.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    /// Arguments, in which MODEL and OUT stand for directories.
    arguments: &'static str,
}

const CASES: [Case; 4] = [
    Case {
        name: "decode",
        arguments: "decode --model MODEL --prompt-ids 1,2,3 -n 8 --cache-slots 4 --kv OUT/kv",
    },
    Case {
        name: "pread",
        arguments: "decode --model MODEL --prompt-ids 1,2,3 -n 8 --cache-slots 4 --engine pread --no-usage",
    },
    Case {
        name: "convert",
        arguments: "convert MODEL OUT/out --experts int4",
    },
    Case {
        name: "stage",
        arguments: "mirror stage --model MODEL --to OUT/out --force",
    },
];

/// Errors that a call may give.
fn errors(call: &str) -> &'static [&'static str] {
    match call {
        "read" | "pread64" | "preadv2" => &["EIO", "EINTR", "EAGAIN", "EINVAL", "EOPNOTSUPP"],
        "write" | "pwrite64" | "fallocate" | "ftruncate" => &["EIO", "ENOSPC", "EINTR", "EFBIG"],
        "open" | "openat" => &["ENOENT", "EACCES", "EMFILE", "EINTR"],
        "fsync" | "fdatasync" => &["EIO", "ENOSPC"],
        "mmap" | "brk" | "mprotect" | "madvise" => &["ENOMEM"],
        "clone" | "clone3" => &["EAGAIN"],
        "io_uring_setup" => &["EPERM", "ENOSYS", "ENOMEM"],
        "io_uring_enter" => &["EINTR", "EAGAIN", "EBUSY", "EPERM"],
        "io_uring_register" => &["ENOMEM", "EPERM", "EINVAL"],
        "rename" | "renameat" | "renameat2" | "link" | "linkat" | "unlink" | "unlinkat"
        | "mkdir" | "mkdirat" => &["EIO", "ENOSPC", "EACCES", "EEXIST"],
        "flock" | "fcntl" => &["EINTR", "ENOLCK"],
        // The standard library takes no other error of a directory that was only read.
        "close" => &["EINTR"],
        // With valid arguments the kernel gives no error, or the process ends.
        "execve" | "exit" | "exit_group" | "rt_sigreturn" | "munmap" | "futex" | "poll"
        | "rt_sigaction" | "rt_sigprocmask" | "sigaltstack" | "getrandom" | "epoll_ctl"
        | "epoll_wait" | "recvfrom" => &[],
        _ => &["EPERM", "ENOSYS", "EIO"],
    }
}

/// A call to make fail.
#[derive(Clone, Debug)]
struct Fault {
    call: String,
    error: &'static str,
    /// Number of the call, in each thread.
    when: usize,
}

/// What a command makes: standard output, and the shards that it writes.
type Made = (Vec<u8>, Vec<(PathBuf, Vec<u8>)>);

/// How a run ended.
struct End {
    status: ExitStatus,
    made: Made,
    err: String,
    hung: bool,
}

struct Campaign {
    binary: PathBuf,
    /// Its shards, as they have to stay.
    shards: Vec<(PathBuf, Vec<u8>)>,
    patience: Duration,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/f32-all-experts");
    let campaign = Campaign {
        binary: binary::path()?,
        shards: contents(&fixture)?,
        patience: Duration::from_secs(args.patience),
    };
    let mut faults = 0;
    for case in CASES {
        if args.only.as_deref().is_none_or(|only| only == case.name) {
            faults += campaign.run(case, &args)?;
        }
    }
    ensure!(faults == 0, "{faults} runs ended wrongly");
    Ok(())
}

fn contents(dir: &Path) -> anyhow::Result<Vec<(PathBuf, Vec<u8>)>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_owned();
        files.push((name.into(), fs::read(&path)?));
    }
    files.sort();
    Ok(files)
}

impl Campaign {
    /// Runs a case with every fault, and returns how many runs ended wrongly.
    fn run(&self, case: Case, args: &Args) -> anyhow::Result<usize> {
        let (right, counts) = self.calls(case)?;
        let mut faults = Vec::new();
        for (call, count) in counts {
            if args.call.as_ref().is_some_and(|only| *only != call) {
                continue;
            }
            for &error in errors(&call) {
                faults.extend((1..=count.min(args.most)).map(|when| Fault {
                    call: call.clone(),
                    error,
                    when,
                }));
            }
        }
        println!("{}: {} runs", case.name, faults.len());
        let (next, wrong) = (AtomicUsize::new(0), Mutex::new(0));
        let ends = Mutex::new(BTreeMap::<String, usize>::new());
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    while let Some(fault) = faults.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let verdict = self.verdict(case, fault, &right);
                        let mut ends = ends.lock().expect("no thread panics");
                        match verdict {
                            Ok(end) => *ends.entry(end.to_owned()).or_default() += 1,
                            Err(e) => {
                                *wrong.lock().expect("no thread panics") += 1;
                                println!(
                                    "{} {} {} {}: {e:#}",
                                    case.name, fault.call, fault.error, fault.when
                                );
                            }
                        }
                    }
                });
            }
        });
        println!(
            "{}: {:?}",
            case.name,
            ends.into_inner().expect("no thread panics")
        );
        Ok(wrong.into_inner().expect("no thread panics"))
    }

    /// What the command prints, and how often a thread of it makes each call.
    fn calls(&self, case: Case) -> anyhow::Result<(Made, BTreeMap<String, usize>)> {
        let dir = tempfile::tempdir()?;
        let log = dir.path().join("strace");
        let end = self.spawn(case, dir.path(), &["-o", &log.to_string_lossy()])?;
        ensure!(
            end.status.success(),
            "{} fails without a fault: {}",
            case.name,
            end.err.trim()
        );
        let mut counts = BTreeMap::<(String, String), usize>::new();
        for line in fs::read_to_string(&log)?.lines() {
            let Some((thread, rest)) = line.split_once(char::is_whitespace) else {
                continue;
            };
            let name = rest.trim_start().split('(').next().unwrap_or_default();
            if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                *counts
                    .entry((name.to_owned(), thread.to_owned()))
                    .or_default() += 1;
            }
        }
        let mut most = BTreeMap::new();
        for ((name, _), count) in counts {
            let known: &mut usize = most.entry(name).or_default();
            *known = count.max(*known);
        }
        Ok((end.made, most))
    }

    fn spawn(&self, case: Case, dir: &Path, strace: &[&str]) -> anyhow::Result<End> {
        let model = dir.join("model");
        if !model.exists() {
            fs::create_dir(&model)?;
            for (name, bytes) in &self.shards {
                fs::write(model.join(name), bytes)?;
            }
        }
        let mut command = match strace {
            [] => Command::new(&self.binary),
            given => {
                let mut command = Command::new("strace");
                command.args(["-f", "-qq"]).args(given).arg(&self.binary);
                command
            }
        };
        for argument in case.arguments.split(' ') {
            command.arg(
                argument
                    .replace("MODEL", &model.to_string_lossy())
                    .replace("OUT", &dir.to_string_lossy()),
            );
        }
        let (out, err) = (dir.join("stdout"), dir.join("stderr"));
        let mut child = command
            .env_remove("RUST_BACKTRACE")
            .stdin(Stdio::null())
            .stdout(fs::File::create(&out)?)
            .stderr(fs::File::create(&err)?)
            .spawn()
            .context("cannot start strace: install it")?;
        let start = Instant::now();
        let (status, hung) = loop {
            if let Some(status) = child.try_wait()? {
                break (status, false);
            }
            if start.elapsed() > self.patience {
                child.kill()?;
                break (child.wait()?, true);
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let made = dir.join("out");
        let made = match made.exists() {
            // Standard output has times, and the notes of a conversion have paths.
            true => (
                Vec::new(),
                contents(&made)?
                    .into_iter()
                    .filter(|(name, _)| name.extension().is_some_and(|e| e == "safetensors"))
                    .collect(),
            ),
            false => (fs::read(out)?, Vec::new()),
        };
        Ok(End {
            status,
            hung,
            made,
            err: String::from_utf8_lossy(&fs::read(err)?).into_owned(),
        })
    }

    /// How a run with a fault ended.
    ///
    /// # Errors
    /// What is wrong with that.
    fn verdict(&self, case: Case, fault: &Fault, right: &Made) -> anyhow::Result<&'static str> {
        let dir = tempfile::tempdir()?;
        let inject = format!(
            "inject={}:error={}:when={}",
            fault.call, fault.error, fault.when
        );
        let log = dir.path().join("strace");
        let trace = format!("trace={}", fault.call);
        let end = self.spawn(
            case,
            dir.path(),
            &["-e", &trace, "-e", &inject, "-o", &log.to_string_lossy()],
        )?;
        ensure!(!end.hung, "hangs: {}", end.err.trim());
        // The standard library cannot protect the stack of a new thread without memory, and says so in its own words.
        let no_memory = fault.error == "ENOMEM" && end.err.contains("stack_overflow.rs");
        ensure!(
            no_memory || !end.err.contains("panicked"),
            "panics: {}",
            end.err.trim()
        );
        let kind = match (end.status.code(), end.status.signal()) {
            _ if no_memory => "no memory",
            (Some(0), _) => {
                ensure!(
                    end.made == *right,
                    "the result is another: {}",
                    String::from_utf8_lossy(&end.made.0)
                );
                "right"
            }
            // The loader of the system, before the program.
            (Some(127), _) if !end.err.contains("error: ") || end.err.contains("shared librar") => {
                "did not start"
            }
            (Some(1), _) => {
                let errors = end
                    .err
                    .lines()
                    .filter(|line| line.starts_with("error: "))
                    .count();
                ensure!(errors == 1, "{errors} lines of error: {}", end.err.trim());
                "error"
            }
            // The allocator has no memory for a small block; the runtime of the language says so.
            _ if fault.error == "ENOMEM" && end.err.contains("memory allocation of") => "no memory",
            _ if fault.call == "mmap" || fault.call == "mprotect" || fault.call == "brk" => {
                "no memory"
            }
            (code, signal) => anyhow::bail!("code {code:?}, signal {signal:?}: {}", end.err.trim()),
        };
        for (name, bytes) in &self.shards {
            let path = dir.path().join("model").join(name);
            ensure!(
                fs::read(&path).is_ok_and(|now| now == *bytes),
                "{} has changed",
                path.display()
            );
        }
        // Nothing is lost: the same command goes on.
        let again = self.spawn(case, dir.path(), &[])?;
        ensure!(
            again.status.success() && again.made == *right,
            "and then, without a fault: {}",
            again.err.trim()
        );
        Ok(kind)
    }
}
