//! The ring against fio: the same file, block size and depth, in interleaved pairs, so that drift of the machine meets both.
//! fio is given everything that the ring has: io_uring, O_DIRECT, registered files, registered buffers on huge pages.
//! Needs root (for vm.nr_hugepages, which is restored) and fio 3.30 or later:
//!
//! ```text
//! cargo run --release -p colibri-bench --bin fio -- --file FILE
//! ```

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use bytesize::ByteSize;
use clap::Parser;
use colibri_bench::fio::{self, HugePages};
use colibri_bench::median;
use colibri_ring::File;
use colibri_uring::tools::profile::{Blocks, ProfileRun, Reader, Target};

/// Random reads by the ring and by fio in turn: bandwidth and processor time
#[derive(Debug, Parser)]
#[command(
    after_help = "Needs root (for vm.nr_hugepages, which is restored), fio 3.30 or later, and a file of some GiB without holes.\n\n\
    Example:\n  cargo build --release -p colibri-bench && target/release/fio --file /ssd/large"
)]
struct Args {
    /// A large file on the drive
    #[arg(long, value_name = "F")]
    file: PathBuf,
    /// Bytes of a read
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_values = ["1MiB", "4MiB", "19MiB"])]
    block_size: Vec<Size>,
    /// Reads at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    queue_depth: usize,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Pairs of measurements; medians are printed
    #[arg(long, default_value_t = 7)]
    rounds: usize,
}

#[derive(Clone, Copy, Debug)]
struct Size(u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        ByteSize::from_str(text).map(|size| Size(size.0))
    }
}

/// What one of the two did.
#[derive(Clone, Copy, Debug)]
struct Speed {
    mib_per_s: f64,
    cpu_per_gib: f64,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    ensure!(
        (0.1..=3600.0).contains(&args.seconds) && args.rounds > 0,
        "--seconds is a time from 0.1 to 3600, and --rounds at least 1"
    );
    if !rustix::process::geteuid().is_root() {
        bail!("the comparison sets vm.nr_hugepages: it needs root");
    }
    let version = fio::version().context("the comparison needs fio (apt install fio)")?;
    let target = Target::new(vec![Arc::new(File::open(&args.file)?)]);
    if let Some(reason) = target.direct_refused() {
        bail!("the file cannot be read around the page cache: {reason}");
    }
    let stop = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGINT, stop.clone())?;
    let largest = args.block_size.iter().map(|size| size.0).max().unwrap_or(0);
    let _pages = HugePages::reserve(largest.saturating_mul(args.queue_depth as u64))?;
    println!(
        "{version}, {} at once, medians of {} pairs of {} s",
        args.queue_depth, args.rounds, args.seconds
    );
    println!("load at the beginning: {}", fio::load());
    println!(
        "{:>8}  {:>9}  {:>9}  {:>6}  {:>12}  {:>12}  {:>6}",
        "block", "ring", "fio", "ratio", "ring", "fio", "ratio"
    );
    println!(
        "{:>8}  {:>9}  {:>9}  {:>6}  {:>12}  {:>12}  {:>6}",
        "", "MiB/s", "MiB/s", "", "CPU s/GiB", "CPU s/GiB", ""
    );
    for size in &args.block_size {
        let mut pairs = Vec::new();
        for round in 0..args.rounds {
            if stop.load(Ordering::Relaxed) {
                return Ok(ExitCode::from(130));
            }
            // Each goes first as often as the other.
            pairs.push(if round % 2 == 0 {
                let ring = ring(&args, &target, size.0)?;
                (ring, other(&args, size.0)?)
            } else {
                let other = other(&args, size.0)?;
                (ring(&args, &target, size.0)?, other)
            });
        }
        let of = |what: fn(&(Speed, Speed)) -> f64| median(pairs.iter().map(what).collect());
        println!(
            "{:>8}  {:>9.0}  {:>9.0}  {:>6.3}  {:>12.4}  {:>12.4}  {:>6.3}",
            ByteSize::b(size.0).display().iec().to_string(),
            of(|(ring, _)| ring.mib_per_s),
            of(|(_, fio)| fio.mib_per_s),
            of(|(ring, fio)| ring.mib_per_s / fio.mib_per_s),
            of(|(ring, _)| ring.cpu_per_gib),
            of(|(_, fio)| fio.cpu_per_gib),
            of(|(ring, fio)| ring.cpu_per_gib / fio.cpu_per_gib),
        );
    }
    println!("load at the end: {}", fio::load());
    Ok(ExitCode::SUCCESS)
}

fn ring(args: &Args, target: &Target, block: u64) -> anyhow::Result<Speed> {
    let outcome = target.measure(&run(args, block))?;
    Ok(result(outcome.bytes, outcome.elapsed, outcome.cpu))
}

fn run(args: &Args, block: u64) -> ProfileRun {
    ProfileRun {
        reader: Reader::Uring,
        direct: true,
        blocks: Blocks::Anywhere(block),
        queue_depth: args.queue_depth,
        time: Duration::from_secs_f64(args.seconds),
    }
}

fn other(args: &Args, block: u64) -> anyhow::Result<Speed> {
    let run = run(args, block);
    let reads = fio::read(&args.file, block, run.queue_depth, run.warm_up(), run.time)?;
    Ok(result(reads.bytes, reads.elapsed, reads.cpu))
}

fn result(bytes: u64, elapsed: Duration, cpu: Duration) -> Speed {
    let gib = (bytes as f64 / f64::from(1 << 30)).max(f64::MIN_POSITIVE);
    Speed {
        mib_per_s: 1024.0 * gib / elapsed.as_secs_f64().max(f64::MIN_POSITIVE),
        cpu_per_gib: cpu.as_secs_f64() / gib,
    }
}
