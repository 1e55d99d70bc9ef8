//! `profile`: what a drive gives, read as experts are read.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum};
use colibri_ring::file::File;
use colibri_ring::replica::DirectMode;
use colibri_uring::config::Config;
use colibri_uring::measure::mib_per_s;
use colibri_uring::profile::{Blocks, Outcome, Reader, Run, Target};
use colibri_uring::shards::Shards;
use colibri_uring::stream::{Catalog, ExpertFiles};
use serde::Serialize;

use super::args::{DirectArg, seconds};
use super::progress;
use super::size::{Size, human};

/// Measure a drive with random reads of expert-sized blocks
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    colibri-uring profile --model /ssd/GLM-5.2\n  \
    colibri-uring profile --file /ssd/large --block-size 19MiB --queue-depth 8 --engine uring --json")]
pub struct ProfileArgs {
    /// Directory of a model, whose experts are read; several times for a model split over drives
    #[arg(long, value_name = "DIR", num_args = 1.., required_unless_present = "file", env = "COLIBRI_MODEL")]
    model: Vec<PathBuf>,
    /// Any large file
    #[arg(long, value_name = "F", conflicts_with = "model", env = "COLIBRI_FILE")]
    file: Option<PathBuf>,
    /// Bytes of a read [default: the model's experts as they lie; of a file 1MiB, 4MiB and 19MiB]
    #[arg(long, value_name = "SIZE", env = "COLIBRI_BLOCK_SIZE")]
    block_size: Option<Size>,
    /// Reads at once [default: 1, 4, 8 and 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), env = "COLIBRI_QUEUE_DEPTH")]
    queue_depth: Option<u16>,
    /// What reads
    #[arg(long, value_enum, default_value = "all", env = "COLIBRI_ENGINE")]
    engine: ReaderArg,
    /// Whether to read around the page cache (O_DIRECT); auto does where that is possible
    #[arg(long, value_enum, default_value = "auto", env = "COLIBRI_DIRECT")]
    direct: DirectArg,
    /// How long each measurement takes
    #[arg(long, value_name = "S", default_value_t = 2.0, value_parser = seconds, env = "COLIBRI_SECONDS")]
    seconds: f64,
    /// Print one JSON object
    #[arg(long, env = "COLIBRI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

/// `--engine` of this command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ReaderArg {
    /// One after the other, and pread through the page cache beside them
    All,
    /// The ring: registered files, and slabs on huge pages
    Uring,
    /// Threads
    Pread,
    /// tokio-uring
    TokioUring,
}

/// The JSON object.
#[derive(Debug, Serialize)]
struct Report {
    runs: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    engine: &'static str,
    direct: bool,
    /// Of the longest block.
    block_size: u64,
    queue_depth: usize,
    bytes: u64,
    seconds: f64,
    mib_per_s: f64,
    iops: f64,
    cpu_seconds: f64,
    cpu_seconds_per_gib: f64,
    latency_us: Latency,
}

#[derive(Debug, Serialize)]
struct Latency {
    p50: u64,
    p90: u64,
    p99: u64,
    p999: u64,
    max: u64,
}

/// What is read, and what a token of the model needs of it.
struct Subject {
    target: Target,
    blocks: Vec<Blocks>,
    /// Bytes that a token reads when no expert is in memory.
    token_bytes: Option<u64>,
}

/// Measures and prints.
pub fn run(args: &ProfileArgs) -> anyhow::Result<ExitCode> {
    let subject = match &args.file {
        Some(path) => of_file(args, path)?,
        None => of_model(args)?,
    };
    let refused = subject.target.direct_refused();
    let modes = modes(args, refused.is_none());
    if let (DirectArg::Auto, Some(reason)) = (args.direct, &refused) {
        tracing::warn!("reads go through the page cache: {reason}");
    }
    let depths: Vec<usize> = match args.queue_depth {
        Some(n) => vec![n.into()],
        None => vec![1, 4, 8, 16],
    };
    warn_of_holes(&subject.target);
    let mut runs = Vec::new();
    for blocks in &subject.blocks {
        for &(reader, direct) in &modes {
            for &queue_depth in &depths {
                runs.push(Run {
                    reader,
                    direct,
                    blocks: blocks.clone(),
                    queue_depth,
                    time: Duration::from_secs_f64(args.seconds),
                });
            }
        }
    }
    let bar = progress::steps(runs.len() as u64);
    let mut report = Report { runs: Vec::new() };
    let mut failed = None;
    for run in &runs {
        bar.set_message(format!(
            "{} of {}, {} at once",
            run.reader.name(),
            human(run.blocks.longest()),
            run.queue_depth
        ));
        match subject.target.measure(run) {
            Ok(outcome) => report.runs.push(row(run, &outcome)),
            // One of many that does not work here, as where io_uring is denied.
            Err(error) if args.engine == ReaderArg::All => {
                tracing::warn!("{} is left out: {error}", run.reader.name());
                failed = Some(error);
            }
            Err(error) => return Err(error.into()),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    if let (true, Some(error)) = (report.runs.is_empty(), failed) {
        return Err(error.into());
    }
    if args.json {
        super::print_json(&report)?;
    } else {
        print(&report, &modes, subject.token_bytes)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn of_file(args: &ProfileArgs, path: &PathBuf) -> anyhow::Result<Subject> {
    let file = Arc::new(File::open(path)?);
    let sizes = match args.block_size {
        Some(size) => vec![size.0],
        None => vec![1 << 20, 4 << 20, 19 << 20],
    };
    Ok(Subject {
        target: Target::new(vec![file]),
        blocks: sizes.into_iter().map(Blocks::Anywhere).collect(),
        token_bytes: None,
    })
}

fn of_model(args: &ProfileArgs) -> anyhow::Result<Subject> {
    let config = Config::load(&args.model[0])?;
    let shards = Shards::open(&args.model)?;
    let catalog = Catalog::new(&shards, &config)?;
    // How it is read is decided for each run; here only where experts lie matters.
    let experts = ExpertFiles::new(&shards, catalog, DirectMode::Off)?;
    let layouts = experts.layouts()?;
    ensure!(!layouts.is_empty(), "the model has no routed experts");
    let bytes: u64 = layouts.iter().map(|layout| layout.footprint).sum();
    let token = bytes as f64 / layouts.len() as f64
        * (experts.moe_layers() * config.num_experts_per_tok) as f64;
    // Only the files that hold experts are dropped from the page cache.
    let used: BTreeSet<u32> = layouts
        .iter()
        .flat_map(|l| &l.spans)
        .map(|s| s.file)
        .collect();
    let used: Vec<u32> = used.into_iter().collect();
    let blocks = match args.block_size {
        Some(size) => Blocks::Anywhere(size.0),
        None => {
            let spans = layouts.iter().flat_map(|layout| &layout.spans);
            let mut extents: Vec<_> = spans
                .filter_map(|span| {
                    let file = used.binary_search(&span.file).ok()? as u32;
                    Some((file, span.offset, span.len))
                })
                .collect();
            // An expert of several pieces may have small ones, its scales: what is measured is the large ones.
            let longest = extents.iter().map(|(.., len)| *len).max().unwrap_or(0);
            extents.retain(|(.., len)| *len > longest / 2);
            Blocks::Extents(extents)
        }
    };
    let files = used
        .iter()
        .map(|&file| shards.files()[file as usize].clone());
    Ok(Subject {
        target: Target::new(files.collect()),
        blocks: vec![blocks],
        token_bytes: Some(token as u64),
    })
}

/// Which readers, and whether each reads around the page cache.
fn modes(args: &ProfileArgs, possible: bool) -> Vec<(Reader, bool)> {
    let direct = match args.direct {
        DirectArg::On => true,
        DirectArg::Off => false,
        DirectArg::Auto => possible,
    };
    match args.engine {
        ReaderArg::Uring => vec![(Reader::Uring, direct)],
        ReaderArg::Pread => vec![(Reader::Pread, direct)],
        ReaderArg::TokioUring => vec![(Reader::TokioUring, direct)],
        ReaderArg::All => {
            let all = [Reader::Uring, Reader::TokioUring, Reader::Pread];
            let mut modes: Vec<_> = all.into_iter().map(|reader| (reader, direct)).collect();
            if direct && args.direct == DirectArg::Auto {
                modes.push((Reader::Pread, false));
            }
            modes
        }
    }
}

/// A hole is read without the drive.
fn warn_of_holes(target: &Target) {
    for file in target.files() {
        let allocated = std::fs::metadata(file.path()).map(|meta| meta.blocks() * 512);
        if allocated.is_ok_and(|bytes| bytes < file.size() / 100 * 95) {
            tracing::warn!(
                "{} has holes, which are read without asking the drive: this is not its speed",
                file.path().display()
            );
        }
    }
}

fn row(run: &Run, outcome: &Outcome) -> Row {
    let seconds = outcome.elapsed.as_secs_f64();
    let cpu = outcome.cpu.as_secs_f64();
    let gib = outcome.bytes as f64 / f64::from(1 << 30);
    let latency = &outcome.latency_us;
    Row {
        engine: run.reader.name(),
        direct: run.direct,
        block_size: run.blocks.longest(),
        queue_depth: run.queue_depth,
        bytes: outcome.bytes,
        seconds,
        mib_per_s: mib_per_s(outcome.bytes, outcome.elapsed),
        iops: latency.len() as f64 / seconds.max(f64::MIN_POSITIVE),
        cpu_seconds: cpu,
        cpu_seconds_per_gib: if gib > 0.0 { cpu / gib } else { 0.0 },
        latency_us: Latency {
            p50: latency.value_at_quantile(0.5),
            p90: latency.value_at_quantile(0.9),
            p99: latency.value_at_quantile(0.99),
            p999: latency.value_at_quantile(0.999),
            max: latency.max(),
        },
    }
}

/// A table for people, and what it means for the model.
fn print(
    report: &Report,
    modes: &[(Reader, bool)],
    token_bytes: Option<u64>,
) -> anyhow::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    for row in header().into_iter().chain(report.runs.iter().map(cells)) {
        let line: Vec<String> = (row.iter().zip(WIDTHS))
            .map(|(cell, width)| format!("{cell:>width$}"))
            .collect();
        writeln!(out, "{}", line.join("  "))?;
    }
    writeln!(
        out,
        "\nLatency in milliseconds, from submission to completion."
    )?;
    if modes.iter().any(|(_, direct)| *direct) {
        writeln!(out, "O_DIRECT reads go around the page cache.")?;
    }
    if modes.iter().any(|(_, direct)| !direct) {
        writeln!(
            out,
            "Buffered: the files were dropped from the page cache and checked before each run, and what was read was dropped at once."
        )?;
    }
    let best = report
        .runs
        .iter()
        .map(|row| row.mib_per_s)
        .fold(0.0, f64::max);
    if let Some(bytes) = token_bytes {
        let seconds = bytes as f64 / f64::from(1 << 20) / best.max(f64::MIN_POSITIVE);
        writeln!(
            out,
            "At {best:.0} MiB/s the experts of a token ({}), none of them in memory, take {seconds:.3} s: at most {:.2} tokens a second.",
            human(bytes),
            1.0 / seconds
        )?;
    }
    out.flush().context("cannot print")
}

const WIDTHS: [usize; 11] = [11, 8, 9, 5, 8, 8, 9, 7, 7, 7, 7];

fn header() -> Option<[String; 11]> {
    let names = [
        "engine",
        "cache",
        "block",
        "depth",
        "MiB/s",
        "IOPS",
        "CPU s/GiB",
        "p50",
        "p99",
        "p99.9",
        "max",
    ];
    Some(names.map(str::to_owned))
}

fn cells(row: &Row) -> [String; 11] {
    let ms = |us: u64| format!("{:.2}", us as f64 / 1000.0);
    [
        row.engine.to_owned(),
        if row.direct { "direct" } else { "buffered" }.to_owned(),
        human(row.block_size),
        row.queue_depth.to_string(),
        format!("{:.0}", row.mib_per_s),
        format!("{:.0}", row.iops),
        format!("{:.4}", row.cpu_seconds_per_gib),
        ms(row.latency_us.p50),
        ms(row.latency_us.p99),
        ms(row.latency_us.p999),
        ms(row.latency_us.max),
    ]
}
