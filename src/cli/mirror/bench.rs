//! `mirror bench`: each drive alone, then all together.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use clap::builder::FalseyValueParser;
use colibri_ring::engine::Options;
use colibri_ring::extent::Layout;
use colibri_ring::replica::{Files, Replicas};
use colibri_uring::config::Config;
use colibri_uring::measure::{self, Dice, Load, Measured};
use colibri_uring::shards::Shards;
use colibri_uring::stream::{Catalog, ExpertFiles};
use serde::Serialize;

use super::super::args::{DirectArg, EngineArg, check_mirrors, seconds};
use super::super::progress::spinner;

/// Read experts from each drive alone and from all together, and compare
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  colibri-uring mirror bench --model /ssd1/GLM-5.2 --mirror /ssd2/GLM-5.2"
)]
pub struct BenchArgs {
    /// Directory with config.json and *.safetensors; give it several times for a model split over drives
    #[arg(long, value_name = "DIR", num_args = 1.., required = true, env = "COLIBRI_MODEL")]
    model: Vec<PathBuf>,
    /// Directory on another drive with copies of the model's files; up to 4 times
    #[arg(long, value_name = "DIR", num_args = 1.., required = true, env = "COLIBRI_MIRROR")]
    mirror: Vec<PathBuf>,
    /// How long each measurement takes
    #[arg(long, value_name = "S", default_value_t = 5.0, value_parser = seconds, env = "COLIBRI_SECONDS")]
    seconds: f64,
    /// What reads
    #[arg(long, value_enum, default_value = "auto", env = "COLIBRI_ENGINE")]
    engine: EngineArg,
    /// Whether to read around the page cache (O_DIRECT)
    #[arg(long, value_enum, default_value = "auto", env = "COLIBRI_DIRECT")]
    direct: DirectArg,
    /// Print one JSON object
    #[arg(long, env = "COLIBRI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
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
    /// `null` where no expert lies wholly in this directory.
    mib_per_s: Option<f64>,
}

/// All directories together.
#[derive(Debug, Serialize)]
struct Combined {
    mib_per_s: f64,
    /// Speed over the sum of the single speeds.
    scaling: f64,
    /// What part of the bytes came from each directory, in the order of `single`.
    shares: Vec<f64>,
}

/// Measures and prints.
pub fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    check_mirrors(&args.mirror);
    let config = Config::load(&args.model[0])?;
    let shards = Shards::open_mirrored(&args.model, &args.mirror)?;
    let catalog = Catalog::new(&shards, &config)?;
    let experts = ExpertFiles::new(&shards, catalog, args.direct.into())?;
    let layouts = experts.layouts()?;
    ensure!(!layouts.is_empty(), "the model has no routed experts");
    let copies = shards.replicas();
    let dirs: Vec<&Path> = (shards.dirs().iter().chain(shards.mirrors()))
        .map(PathBuf::as_path)
        .collect();

    let mut single = Vec::new();
    for (source, dir) in dirs.iter().enumerate() {
        let bar = spinner(format!("{} alone", dir.display()));
        let alone = only(&copies, source);
        let there: Vec<&Layout> = (layouts.iter())
            .filter(|layout| {
                layout
                    .spans
                    .iter()
                    .all(|s| !alone[s.file as usize].is_empty())
            })
            .collect();
        let mib_per_s = if there.is_empty() {
            tracing::warn!(
                "{} holds no whole expert: it is not measured alone",
                dir.display()
            );
            None
        } else {
            let files = Files::new(alone, args.direct.into())?;
            Some(measure(args, &files, &there, 1)?.mib_per_s())
        };
        bar.finish_and_clear();
        single.push(Single {
            dir: dir.display().to_string(),
            mib_per_s,
        });
    }
    let bar = spinner("all together".into());
    let all: Vec<&Layout> = layouts.iter().collect();
    let together = measure(args, experts.files(), &all, dirs.len())?;
    bar.finish_and_clear();

    let sum: f64 = single.iter().filter_map(|s| s.mib_per_s).sum();
    let total = together.total().max(1) as f64;
    let share = |source| {
        together
            .bytes
            .get(source)
            .map_or(0.0, |bytes| *bytes as f64 / total)
    };
    let report = Report {
        combined: Combined {
            mib_per_s: together.mib_per_s(),
            scaling: together.mib_per_s() / sum.max(f64::MIN_POSITIVE),
            shares: (0..dirs.len()).map(share).collect(),
        },
        single,
    };
    if args.json {
        super::super::print_json(&report)?;
    } else {
        print(
            &report,
            layouts.iter().map(|l| l.footprint).max().unwrap_or(0),
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Every file with its copy in one source; an empty list where it has none there.
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
    files: &Files,
    layouts: &[&Layout],
    drives: usize,
) -> anyhow::Result<Measured> {
    let engine = Options {
        kind: args.engine.into(),
        ..Options::default()
    };
    let slab_bytes = layouts.iter().map(|l| l.footprint).max().unwrap_or(0);
    let time = Duration::from_secs_f64(args.seconds);
    let load = Load {
        engine,
        slabs: measure::slabs(&engine, drives, slab_bytes),
        slab_bytes,
        warm_up: (time / 4).min(Duration::from_secs(1)),
        time,
    };
    let mut dice = Dice(0);
    let next = || layouts[dice.below(layouts.len() as u64) as usize].clone();
    measure::read(files, load, next, |_, _| ()).context("cannot measure")
}

/// A table for people.
fn print(report: &Report, expert: u64) -> io::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let (combined, expert) = (&report.combined, super::super::size::human(expert));
    writeln!(out, "Random experts of up to {expert}\n")?;
    writeln!(out, "{:>10}  {:>10}  directory", "alone", "share of all")?;
    for (single, share) in report.single.iter().zip(&combined.shares) {
        let alone = single
            .mib_per_s
            .map_or("-".to_owned(), |speed| format!("{speed:.0} MiB/s"));
        let share = format!("{:.1} %", 100.0 * share);
        writeln!(out, "{alone:>10}  {share:>12}  {}", single.dir)?;
    }
    writeln!(
        out,
        "\nTogether {:.0} MiB/s, {:.2} of the sum",
        combined.mib_per_s, combined.scaling
    )?;
    out.flush()
}
