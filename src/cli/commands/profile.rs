//! `profile`: measures a drive with the reads that decoding does.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use colibri_ring::{DirectMode, File, Layout, Options};
use colibri_uring::arch::Architecture;
use colibri_uring::runtime::plan::{self, PlanError, PlanRequest, Roots};
use colibri_uring::shards::Shards;
use colibri_uring::stream::{Catalog, ExpertFiles};
use colibri_uring::tools::profile::{
    Blocks, ExpertTraffic, Measurement, ProfileError, ProfileOutcome, ProfileRun, Reader, Target,
};
use colibri_uring::tools::report::hlog::Interval;
use colibri_uring::tools::report::machine;
use colibri_uring::tools::report::profile::{About, page};

use crate::cli::args::files::ReportArgs;
use crate::cli::args::size::Size;
use crate::cli::args::values::{DirectArg, seconds};
use crate::cli::interrupt;
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::printer::{print_json, to_stdout};
use crate::cli::output::progress;
use crate::cli::output::report_files::Reports;
use crate::cli::output::size::human;

mod table;
use table::{Report, cache_lines, mode, print};

/// Measure a drive with random reads of expert-sized blocks
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    colibri-uring profile --model /ssd/GLM-5.2 --report profile.html\n  \
    colibri-uring profile --file /ssd/large --block-size 1MiB 19MiB --queue-depth 4 8 --engine uring --json\n  \
    colibri-uring profile --model /ssd/GLM-5.2 --seconds 5\n\n\
    Without --seconds all runs together take about half a minute.")]
pub struct ProfileArgs {
    /// Directory of a model whose experts to read; repeat it for a split model [default: the demo model]
    #[arg(long, value_name = "DIR", num_args = 1.., env = "COLIBRI_MODEL", help_heading = "Model")]
    pub model: Vec<PathBuf>,
    /// Large file to read instead of a model
    #[arg(
        long,
        value_name = "F",
        conflicts_with = "model",
        help_heading = "Model"
    )]
    pub file: Option<PathBuf>,
    /// Bytes per read, one size or several [default: those of the model's reads]
    ///
    /// A model is read in whole experts, and in the pieces that decoding reads. The defaults for a file are 1MiB, 4MiB and
    /// 19MiB.
    #[arg(long, value_name = "SIZE", num_args = 1.., value_delimiter = ',', help_heading = "Reads")]
    block_size: Vec<Size>,
    /// Concurrent reads, one number or several [default: 1, 2, 4, 8 and 16]
    #[arg(long, value_name = "N", num_args = 1.., value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Reads")]
    queue_depth: Vec<u16>,
    /// I/O engine: all, uring, pread or tokio-uring
    #[arg(long, value_enum, default_value = "all", help_heading = "Reads")]
    engine: ReaderArg,
    /// Bypass the page cache with O_DIRECT: auto, on or off
    #[arg(long, value_enum, default_value = "auto", help_heading = "Reads")]
    direct: DirectArg,
    /// Seconds of each measurement [default: 2, or less for many of them]
    ///
    /// By default all measurements together take at most half a minute.
    #[arg(long, value_name = "S", value_parser = seconds, help_heading = "Reads")]
    seconds: Option<f64>,
    #[command(flatten)]
    reports: ReportArgs,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// `--engine` of this command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ReaderArg {
    /// All of them, and pread through the page cache
    All,
    /// io_uring with registered files, and slabs on huge pages
    Uring,
    /// pread on worker threads
    Pread,
    /// The tokio-uring crate, for comparison
    TokioUring,
}

/// What to read, and how much of it a token of the model needs.
struct Subject {
    name: String,
    target: Target,
    blocks: Vec<Blocks>,
    demand: Option<ExpertTraffic>,
}

pub fn run(args: &ProfileArgs) -> anyhow::Result<ExitCode> {
    let reports = Reports::create(args.reports.report.as_deref(), args.reports.hlog.as_deref())?;
    let looking = progress::spinner("opening the files".into());
    let subject = match &args.file {
        Some(path) => of_file(args, path)?,
        None => of_model(args)?,
    };
    looking.finish_and_clear();
    let refused = subject.target.direct_refused();
    let modes = modes(args, refused.is_none());
    if let (DirectArg::Auto, Some(reason)) = (args.direct, &refused) {
        tracing::warn!("reads go through the page cache: {reason}");
    }
    let holes = warn_of_holes(&subject.target);
    let runs = plan_runs(args, &subject, &modes);
    let planned = runs.len();
    let (runs, interrupted) = measure(args, &subject.target, runs)?;
    if interrupted && runs.is_empty() {
        // A closed stderr is not an error.
        let _ = writeln!(io::stderr(), "interrupted: nothing was measured yet");
        return Ok(interrupt::exit_code());
    }
    let cache = cache_lines(&runs);
    let best = runs.iter().map(Measurement::mib_per_s).fold(0.0, f64::max);
    // Reads of holes do not reach the drive.
    let demand = subject.demand.as_ref().filter(|_| !holes);
    let mut verdict = match demand {
        _ if holes => vec!["Holes were read, so none of this says how fast the drive is.".into()],
        Some(demand) => demand.sentences(best * f64::from(1 << 20)),
        None => vec![format!("At its best it reads {best:.0} MiB/s.")],
    };
    if interrupted {
        verdict.push(format!(
            "Interrupted: {} of {} made.",
            runs.len(),
            pluralize(planned, "run")
        ));
    }
    let report = Report::new(&runs, &cache, demand, best, interrupted);
    let html = || {
        let about = About {
            subject: &subject.name,
            verdict: &verdict,
            facts: &machine::facts(subject.target.files()),
            cache: &cache,
            table: report.table(),
        };
        page(about, &runs).html()
    };
    let interval = |m: &'_ Measurement| -> String {
        let (run, block) = (&m.run, m.run.blocks.longest());
        let cache = mode(run.direct);
        format!(
            "{}:{cache}:block={block}:depth={}",
            run.reader.name(),
            run.queue_depth
        )
    };
    let intervals: Vec<Interval<'_>> = (runs.iter())
        .map(|m| Interval {
            tag: interval(m),
            start: m.start,
            duration: m.outcome.elapsed,
            latency_us: &m.outcome.latency_us,
        })
        .collect();
    let written = reports.write(
        html,
        "profile; values are nanoseconds from submission to completion of a read",
        &intervals,
    );
    if args.json {
        print_json(&report)?;
    } else {
        to_stdout(|out| print(out, &report, &verdict))?;
    }
    written?;
    Ok(match interrupted {
        true => interrupt::exit_code(),
        false => ExitCode::SUCCESS,
    })
}

/// Seconds of all runs without --seconds, warm-up included.
const TOGETHER: f64 = 30.0;
/// Bounds of the seconds of one run.
const EACH: (f64, f64) = (0.05, 2.0);

fn plan_runs(args: &ProfileArgs, subject: &Subject, modes: &[(Reader, bool)]) -> Vec<ProfileRun> {
    let depths: Vec<usize> = match args.queue_depth.as_slice() {
        [] => vec![1, 2, 4, 8, 16],
        given => given.iter().map(|n| usize::from(*n)).collect(),
    };
    let count = subject.blocks.len() * modes.len() * depths.len();
    // The warm-up takes another quarter of each.
    let fair = TOGETHER / 1.25 / count.max(1) as f64;
    let seconds = args.seconds.unwrap_or(fair.clamp(EACH.0, EACH.1));
    let mut runs = Vec::with_capacity(count);
    for blocks in &subject.blocks {
        for &(reader, direct) in modes {
            for &queue_depth in &depths {
                runs.push(ProfileRun {
                    reader,
                    direct,
                    blocks: blocks.clone(),
                    queue_depth,
                    time: Duration::from_secs_f64(seconds),
                });
            }
        }
    }
    runs
}

/// Makes the runs. The second value is true if a signal stopped them. With all engines, one that the machine does not
/// support is skipped with one warning.
fn measure(
    args: &ProfileArgs,
    target: &Target,
    runs: Vec<ProfileRun>,
) -> anyhow::Result<(Vec<Measurement>, bool)> {
    let stop = interrupt::install().context("cannot handle Ctrl-C")?;
    let bar = progress::steps(runs.len() as u64);
    if let Some(run) = runs.first() {
        let all = (run.time + run.warm_up()).as_secs_f64() * runs.len() as f64;
        let text = format!(
            "{} of {:.2} s, some {all:.0} s in all (--seconds for longer or shorter ones)",
            pluralize(runs.len(), "run"),
            run.time.as_secs_f64()
        );
        match bar.is_hidden() {
            false => bar.println(text),
            // A closed stderr is not an error.
            true => drop(writeln!(io::stderr(), "{text}")),
        }
    }
    let mut measured = Vec::new();
    let mut left_out: Vec<(Reader, bool)> = Vec::new();
    let mut failed = None;
    // Where --direct is auto, and such reads have been refused.
    let mut refused = false;
    for mut run in runs {
        run.direct &= !refused;
        let kind = (run.reader, run.direct);
        if left_out.contains(&kind) {
            bar.inc(1);
            continue;
        }
        let what = described(&run);
        bar.set_message(match run.direct {
            true => what.clone(),
            false => format!("the files leave the page cache; {what}"),
        });
        let start = SystemTime::now();
        let mut outcome = unless_stopped(target, &run, &stop);
        if let (Some(Err(error @ ProfileError::Direct(_))), DirectArg::Auto) =
            (&outcome, args.direct)
        {
            tracing::warn!("reads go through the page cache: {error}");
            (refused, run.direct) = (true, false);
            outcome = unless_stopped(target, &run, &stop);
        }
        let Some(outcome) = outcome else {
            bar.finish_and_clear();
            return Ok((measured, true));
        };
        match outcome {
            Ok(outcome) => {
                let made = Measurement {
                    run,
                    outcome,
                    start,
                };
                tracing::info!("{what}: {:.0} MiB/s", made.mib_per_s());
                measured.push(made);
            }
            Err(error) if args.engine == ReaderArg::All && error.is_lasting() => {
                let (how, reader) = (mode(run.direct), run.reader.name());
                tracing::warn!("{how} {reader} is left out: {error}");
                left_out.push(kind);
                failed = Some(error);
            }
            Err(error) => return Err(error.into()),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    match failed {
        Some(error) if measured.is_empty() => Err(error.into()),
        _ => Ok((measured, false)),
    }
}

/// Makes a run on another thread. `None` if a signal asks to stop before its end: the run then goes on, and the caller
/// must end the program.
fn unless_stopped(
    target: &Target,
    run: &ProfileRun,
    stop: &AtomicBool,
) -> Option<Result<ProfileOutcome, ProfileError>> {
    const POLL: Duration = Duration::from_millis(20);
    let (send, receive) = channel();
    let (target, run) = (target.clone(), run.clone());
    let measuring = thread::spawn(move || drop(send.send(target.measure(&run))));
    loop {
        match receive.recv_timeout(POLL) {
            Ok(outcome) => return Some(outcome),
            Err(RecvTimeoutError::Timeout) if stop.load(Ordering::SeqCst) => return None,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => match measuring.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => unreachable!("it sends before it ends"),
            },
        }
    }
}

fn described(run: &ProfileRun) -> String {
    let (reader, block) = (run.reader.name(), human(run.blocks.longest()));
    format!("{reader} of {block}, {} at once", run.queue_depth)
}

fn of_file(args: &ProfileArgs, path: &PathBuf) -> anyhow::Result<Subject> {
    let file = Arc::new(File::open(path)?);
    let sizes = match args.block_size.as_slice() {
        [] => vec![1 << 20, 4 << 20, 19 << 20],
        given => given.iter().map(|size| size.0).collect(),
    };
    Ok(Subject {
        name: path.display().to_string(),
        target: Target::new(vec![file]),
        blocks: sizes.into_iter().map(Blocks::Anywhere).collect(),
        demand: None,
    })
}

fn of_model(args: &ProfileArgs) -> anyhow::Result<Subject> {
    let config = Architecture::load(&args.model[0])?;
    let shards = Shards::open(&args.model)?;
    let catalog = Catalog::new(&shards, &config)?;
    // Only the positions of the experts matter here. Each run opens the files in its own mode.
    let experts = ExpertFiles::new(&shards, catalog, DirectMode::Off)?;
    let layouts = experts.layouts()?;
    ensure!(!layouts.is_empty(), "the model has no routed experts");
    let bytes: u64 = layouts.iter().map(|layout| layout.footprint()).sum();
    let top_k = config.router.top_k;
    let token = bytes as f64 / layouts.len() as f64 * (experts.moe_layers() * top_k) as f64;
    let count = layouts.len() as u64;
    // Slabs of reads in flight cache nothing.
    let working = top_k as u64 + 1;
    let kept = slabs(&shards, &config, &experts)
        .map(|slabs| match slabs < count {
            true => slabs.saturating_sub(working),
            false => count,
        })
        .map_err(|error| error.to_string());
    // Only files with experts are dropped from the page cache.
    let spans = layouts.iter().flat_map(|layout| layout.spans());
    let used: BTreeSet<u32> = spans.map(|span| span.file).collect();
    let used: Vec<u32> = used.into_iter().collect();
    let blocks = match args.block_size.as_slice() {
        [] => as_they_lie(&layouts, &used),
        given => given.iter().map(|size| Blocks::Anywhere(size.0)).collect(),
    };
    let files = (used.iter()).map(|&file| shards.files()[file as usize].clone());
    Ok(Subject {
        name: machine::listed(&args.model),
        target: Target::new(files.collect()),
        blocks,
        demand: Some(ExpertTraffic {
            token_bytes: token as u64,
            experts: count,
            kept,
        }),
    })
}

/// How many slabs decoding would have with the memory that is available now.
fn slabs(shards: &Shards, config: &Architecture, experts: &ExpertFiles) -> Result<u64, PlanError> {
    /// Tokens: a short conversation.
    const TOKENS: usize = 4096;
    let ask = PlanRequest {
        prompt: TOKENS,
        ..PlanRequest::usual(TOKENS)
    };
    let plan = plan::survey(shards, config, experts, ask, &Roots::default()).plan()?;
    Ok(plan
        .slots
        .classes
        .iter()
        .map(|class| class.count as u64)
        .sum())
}

/// Whole experts, and the pieces that decoding reads. `used` has the files in ascending order.
fn as_they_lie(layouts: &[Layout], used: &[u32]) -> Vec<Blocks> {
    let chunk = Options::default().chunk_bytes;
    let extent = |(file, offset, len): (u32, u64, u64)| {
        let file = used.binary_search(&file).ok()? as u32;
        Some((file, offset, len))
    };
    let spans = layouts.iter().flat_map(|layout| layout.spans());
    let whole = spans.map(|s| (s.file, s.offset, s.len)).filter_map(extent);
    let chunks = layouts.iter().flat_map(|layout| layout.chunks(chunk));
    let pieces = chunks.map(|c| (c.file, c.offset, c.len)).filter_map(extent);
    let mut blocks = vec![large(whole.collect()), large(pieces.collect())];
    blocks.dedup_by_key(|blocks| blocks.longest());
    blocks
}

/// Keeps the large extents: those of an expert's scales are small.
fn large(mut extents: Vec<(u32, u64, u64)>) -> Blocks {
    let longest = extents.iter().map(|(.., len)| *len).max().unwrap_or(0);
    extents.retain(|(.., len)| *len > longest / 2);
    Blocks::Extents(extents)
}

/// The readers, and whether each bypasses the page cache.
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

/// Warns of holes, whose reads do not reach the drive. True if a file has some.
fn warn_of_holes(target: &Target) -> bool {
    let mut holes = false;
    for file in target.files() {
        let allocated = std::fs::metadata(file.path()).map(|meta| meta.blocks() * 512);
        if allocated.is_ok_and(|bytes| bytes < file.size() / 100 * 95) {
            holes = true;
            tracing::warn!(
                "{} has holes, whose reads do not reach the drive: this is not its speed",
                file.path().display()
            );
        }
    }
    holes
}
