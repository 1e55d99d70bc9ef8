//! `mirror bench`: measures each drive alone, then all together.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, ensure};
use clap::Args;
use colibri_ring::{Files, Layout, Options, Replicas};
use colibri_uring::arch::Architecture;
use colibri_uring::memory;
use colibri_uring::stream::{Catalog, ExpertFiles};
use colibri_uring::tools::measure::{self, Load, Measured, Rng};
use colibri_uring::tools::report::hlog::Interval;
use colibri_uring::tools::report::mirrors::Mirrors;
use colibri_uring::tools::report::{Page, machine};
use serde::Serialize;

use crate::cli::args::copies::CopiesArgs;
use crate::cli::args::drives::weights;
use crate::cli::args::files::ReportArgs;
use crate::cli::args::values::{Weights, seconds};
use crate::cli::output::printer::{print_json, to_stdout};
use crate::cli::output::progress::spinner;
use crate::cli::output::report_files::Reports;
use crate::cli::output::size::human;

/// Measure expert reads from each drive alone and from all together
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    colibri-uring mirror bench --model /ssd1/GLM-5.2 --mirror /ssd2/GLM-5.2\n  \
    colibri-uring mirror bench --model /ssd1/GLM-5.2 --mirror /ssd2/GLM-5.2 --report mirrors.html")]
pub struct BenchArgs {
    #[command(flatten)]
    copies: CopiesArgs,
    /// Ratio of reads from the model's drive and each mirror, like 2,1
    ///
    /// The model's drive comes first. By default each drive serves as much as it is fast.
    #[arg(long, value_name = "W,W,...", help_heading = "Drives")]
    mirror_weights: Option<Weights>,
    /// Seconds of each measurement
    #[arg(long, value_name = "S", default_value_t = 5.0, value_parser = seconds, help_heading = "Drives")]
    seconds: f64,
    #[command(flatten)]
    reports: ReportArgs,
}

/// The JSON object.
#[derive(Debug, Serialize)]
struct Report {
    single: Vec<Single>,
    combined: Combined,
}

/// One directory alone.
#[derive(Debug, Serialize)]
struct Single {
    dir: String,
    /// `null` if no expert lies wholly in this directory.
    mib_per_s: Option<f64>,
}

/// All directories together.
#[derive(Debug, Serialize)]
struct Combined {
    mib_per_s: f64,
    /// Speed over the sum of the single speeds; `null` if a drive served nothing or was not measured alone.
    scaling: Option<f64>,
    /// Fraction of the bytes from each directory, in the order of `single`.
    shares: Vec<f64>,
}

/// A measurement and when it began.
type Timed = (SystemTime, Measured);

pub fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let weights = weights(args.mirror_weights.as_ref(), &args.copies.mirror)?;
    let reports = Reports::create(args.reports.report.as_deref(), args.reports.hlog.as_deref())?;
    let shards = args.copies.open()?;
    let config = Architecture::load(&args.copies.model[0])?;
    // A mirror that serves nothing would falsify the measurement.
    for fault in shards.faults() {
        ensure!(
            fault.is_partial(),
            "{fault}; `mirror stage` makes copies, `mirror verify` finds files that are not copies"
        );
        tracing::warn!("{fault}");
    }
    let catalog = Catalog::new(&shards, &config)?;
    let direct = args.copies.direct.into();
    let mut experts = ExpertFiles::new(&shards, catalog, direct)?;
    if let Some(weights) = weights {
        experts.pin(&shards, weights);
    }
    let layouts = experts.layouts()?;
    ensure!(!layouts.is_empty(), "the model has no routed experts");
    let copies = shards.replicas();
    let dirs: Vec<&Path> = (shards.dirs().iter().chain(shards.mirrors()))
        .map(PathBuf::as_path)
        .collect();

    let mut alone: Vec<Option<Timed>> = Vec::new();
    for (source, dir) in dirs.iter().enumerate() {
        let files = only(&copies, source);
        let held =
            |layout: &&Layout| (layout.spans().iter()).all(|s| !files[s.file as usize].is_empty());
        let there: Vec<&Layout> = layouts.iter().filter(held).collect();
        alone.push(if there.is_empty() {
            None
        } else {
            let files = Files::new(files, direct)?;
            let what = format!("{} alone", dir.display());
            Some(measure(args, what, &files, &there, 1)?)
        });
    }
    let all: Vec<&Layout> = layouts.iter().collect();
    let together = measure(
        args,
        "all together".into(),
        experts.files(),
        &all,
        dirs.len(),
    )?;
    let mut report = Report::new(&dirs, &alone, &together.1);
    let idle = report.idle();
    if idle.is_empty() {
        report.combined.scaling = Some(report.combined.mib_per_s / report.sum());
    }
    for fault in &idle {
        tracing::warn!("{fault}");
    }
    let html = || {
        let facts = machine::facts(&shards.with_copies());
        page(args, &report, &idle, &alone, &together.1, &facts).html()
    };
    let written = reports.write(
        html,
        "mirror bench; values are nanoseconds from submission to completion of a read",
        &intervals(&dirs, &alone, &together),
    );
    if args.copies.json {
        print_json(&report)?;
    } else {
        let expert = layouts.iter().map(|l| l.footprint()).max().unwrap_or(0);
        to_stdout(|out| print(out, &report, &idle, expert))?;
    }
    written?;
    Ok(ExitCode::SUCCESS)
}

impl Report {
    fn new(dirs: &[&Path], alone: &[Option<Timed>], together: &Measured) -> Report {
        let speed = |timed: &Option<Timed>| timed.as_ref().map(|(_, m)| m.mib_per_s());
        let total = together.total().max(1) as f64;
        let share = |source| {
            let bytes = together.bytes.get(source);
            bytes.map_or(0.0, |bytes| *bytes as f64 / total)
        };
        Report {
            single: (dirs.iter().zip(alone))
                .map(|(dir, timed)| Single {
                    dir: dir.display().to_string(),
                    mib_per_s: speed(timed),
                })
                .collect(),
            combined: Combined {
                mib_per_s: together.mib_per_s(),
                scaling: None,
                shares: (0..dirs.len()).map(share).collect(),
            },
        }
    }

    /// Sum of the single speeds, in MiB/s.
    fn sum(&self) -> f64 {
        self.single
            .iter()
            .filter_map(|single| single.mib_per_s)
            .sum()
    }

    /// Why the combined speed cannot be compared with the sum of the single speeds.
    fn idle(&self) -> Vec<String> {
        let mut idle = Vec::new();
        for (single, share) in self.single.iter().zip(&self.combined.shares) {
            let dir = &single.dir;
            match single.mib_per_s {
                None => idle.push(format!(
                    "{dir} holds no whole expert: it is not measured alone"
                )),
                Some(0.0) => idle.push(format!("nothing came from {dir} alone")),
                Some(_) => {}
            }
            if *share == 0.0 {
                idle.push(format!(
                    "nothing came from {dir} when all were read together"
                ));
            }
        }
        idle
    }
}

fn page(
    args: &BenchArgs,
    report: &Report,
    idle: &[String],
    alone: &[Option<Timed>],
    together: &Measured,
    facts: &[(String, String)],
) -> Page {
    let single = (report.single.iter().zip(alone))
        .map(|(single, timed)| (single.dir.clone(), timed.as_ref().map(|(_, m)| m)));
    Mirrors {
        subject: &machine::listed(&args.copies.model),
        single: single.collect(),
        together,
        shares: &report.combined.shares,
        scaling: report.combined.scaling,
        idle,
        facts,
    }
    .page()
}

/// The measurements for the log, oldest first.
fn intervals<'a>(
    dirs: &[&Path],
    alone: &'a [Option<Timed>],
    together: &'a Timed,
) -> Vec<Interval<'a>> {
    let interval = |tag: String, (start, measured): &'a Timed| Interval {
        tag,
        start: *start,
        duration: measured.elapsed,
        latency_us: &measured.latency_us,
    };
    let mut intervals: Vec<Interval<'a>> = (dirs.iter().zip(alone))
        .filter_map(|(dir, timed)| {
            Some(interval(
                format!("alone:{}", dir.display()),
                timed.as_ref()?,
            ))
        })
        .collect();
    intervals.push(interval("together".into(), together));
    intervals
}

/// The copy of each file in one source; an empty list for a file without one.
fn only(copies: &[Replicas], source: usize) -> Vec<Replicas> {
    let there = |copies: &Replicas| -> Replicas {
        copies
            .iter()
            .filter(|copy| copy.source == source)
            .cloned()
            .collect()
    };
    copies.iter().map(there).collect()
}

fn measure(
    args: &BenchArgs,
    what: String,
    files: &Files,
    layouts: &[&Layout],
    drives: usize,
) -> anyhow::Result<Timed> {
    let bar = spinner(what);
    let engine = Options {
        kind: args.copies.engine.into(),
        ..Options::default()
    };
    let slab_bytes = layouts.iter().map(|l| l.footprint()).max().unwrap_or(0);
    let time = Duration::from_secs_f64(args.seconds);
    let load = Load {
        engine,
        slabs: memory::slabs_that_fit(measure::slabs(&engine, drives, slab_bytes), 2, slab_bytes)?,
        slab_bytes,
        warm_up: (time / 4).min(Duration::from_secs(1)),
        time,
        watch_every: Duration::MAX,
    };
    let mut rng = Rng(0);
    let next = || layouts[rng.below(layouts.len() as u64) as usize].clone();
    let start = SystemTime::now();
    let measured = measure::read(files, load, next, |_, _| ()).context("cannot measure")?;
    bar.finish_and_clear();
    Ok((start, measured))
}

fn print(out: &mut dyn Write, report: &Report, idle: &[String], expert: u64) -> io::Result<()> {
    let (combined, expert) = (&report.combined, human(expert));
    writeln!(out, "Random experts of up to {expert}\n")?;
    writeln!(out, "{:>10}  {:>10}  directory", "alone", "share of all")?;
    for (single, share) in report.single.iter().zip(&combined.shares) {
        let alone = single
            .mib_per_s
            .map_or("-".to_owned(), |speed| format!("{speed:.0} MiB/s"));
        let share = format!("{:.1} %", 100.0 * share);
        writeln!(out, "{alone:>10}  {share:>12}  {}", single.dir)?;
    }
    let speed = combined.mib_per_s;
    match combined.scaling {
        Some(scaling) => writeln!(out, "\nTogether {speed:.0} MiB/s, {scaling:.2} of the sum"),
        None => writeln!(
            out,
            "\nTogether {speed:.0} MiB/s, which cannot be compared with the sum: {}",
            idle.join("; ")
        ),
    }
}
