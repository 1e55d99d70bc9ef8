//! `mirror stage`: copies a model's shards to another drive.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use colibri_ring::Options;
use colibri_uring::shards::Shards;
use colibri_uring::tools::measure::mib_per_s;
use colibri_uring::tools::stage::{CopyState, Copying, Ended, Shard, Work, copy_shard, copy_small};
use serde::Serialize;

use crate::cli::args::drives::check_model;
use crate::cli::args::size::Size;
use crate::cli::args::values::{DirectArg, EngineArg};
use crate::cli::interrupt;
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::printer::{print_json, to_stdout};
use crate::cli::output::progress;
use crate::cli::output::size::human;

/// Copy a model's shards to another drive, for --mirror; run it again to resume
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    colibri-uring mirror stage --model /ssd1/GLM-5.2 --to /ssd2/GLM-5.2\n  \
    colibri-uring mirror stage --model /ssd1/GLM-5.2 --to /ssd2/GLM-5.2 --budget 200GiB --dry-run\n\n\
    An existing file counts as a copy if its size, its header and a 2 MiB sample of its data equal the shard's. \
    `mirror verify` compares every byte. A file that differs is an error. The command deletes and overwrites only its own \
    unfinished files (.NAME.colibri-part), with --force too.")]
pub struct StageArgs {
    /// Directory with *.safetensors; repeat it for a split model
    #[arg(long, value_name = "DIR", num_args = 1.., required = true, env = "COLIBRI_MODEL", help_heading = "Model")]
    model: Vec<PathBuf>,
    /// Directory on another drive for the copies; created if missing
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    to: PathBuf,
    /// Total size of the copies, at most; the most used shards come first [default: all]
    #[arg(long, value_name = "SIZE", help_heading = "Output")]
    budget: Option<Size>,
    /// Print the plan and write nothing
    #[arg(long, help_heading = "Output")]
    dry_run: bool,
    /// Copy even to a drive that the model is on
    ///
    /// Such a copy adds no bandwidth. --force overwrites nothing.
    #[arg(long, help_heading = "Output")]
    force: bool,
    /// I/O engine for the reads: auto, uring or pread
    #[arg(long, value_enum, default_value = "auto", help_heading = "Drives")]
    engine: EngineArg,
    /// Bypass the page cache with O_DIRECT: auto, on or off
    #[arg(long, value_enum, default_value = "auto", help_heading = "Drives")]
    direct: DirectArg,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// The JSON object.
#[derive(Debug, Default, Serialize)]
struct Report {
    to: String,
    /// Whether every shard within the budget is copied.
    complete: bool,
    dry_run: bool,
    /// Shards that this run copied, or would copy.
    copied: Vec<String>,
    /// Shards with an existing copy: equal size, header and sample of the content.
    already_there: Vec<String>,
    /// Shards beyond the budget.
    left_out: Vec<String>,
    /// Bytes of `copied`, without those that an earlier run wrote.
    bytes: u64,
    /// Small files that this run copied, or would copy.
    small_files: usize,
    seconds: f64,
    /// Speed of copying and comparing.
    mib_per_s: f64,
}

pub fn run(args: &StageArgs) -> anyhow::Result<ExitCode> {
    check_model(&args.model)?;
    let shards = Shards::open(&args.model)?;
    let work = Work::plan(&shards, &args.to, args.budget.map(|size| size.0))?;
    let mut report = Report::new(&work, args.dry_run);
    if work.same_drive {
        let to = args.to.display();
        if !args.force && !args.dry_run {
            bail!(
                "{to} is on a drive that the model is on: copies there bring no bandwidth; --force copies all the same"
            );
        }
        tracing::warn!("{to} is on a drive that the model is on: copies there bring no bandwidth");
    }
    if args.dry_run {
        return finish(args, &work, &report, ExitCode::SUCCESS);
    }
    let copying = Copying {
        engine: Options {
            kind: args.engine.into(),
            ..Options::default()
        },
        direct: args.direct.into(),
        stop: interrupt::install().context("cannot handle Ctrl-C")?,
    };
    let start = Instant::now();
    report.complete = copy(&work, &copying)?;
    let elapsed = start.elapsed();
    report.seconds = elapsed.as_secs_f64();
    report.mib_per_s = mib_per_s(report.bytes, elapsed);
    let code = match report.complete {
        true => ExitCode::SUCCESS,
        false => interrupt::exit_code(),
    };
    finish(args, &work, &report, code)
}

/// Whether it came to its end.
fn copy(work: &Work, copying: &Copying) -> anyhow::Result<bool> {
    let to = work.to.display();
    fs::create_dir_all(&work.to).with_context(|| format!("cannot make {to}"))?;
    for (from, to) in &work.small {
        copy_small(from, to)?;
    }
    let missing: Vec<&Shard> = (work.shards.iter())
        .filter(|shard| matches!(shard.state, CopyState::Missing { .. }))
        .collect();
    // Each byte is written, and compared.
    let total: u64 = missing.iter().map(|s| s.to_write() + s.file.size()).sum();
    let bar = progress::bytes(total);
    for shard in missing {
        if copy_shard(shard, copying, |bytes| bar.inc(bytes))? == Ended::Stopped {
            bar.finish_and_clear();
            return Ok(false);
        }
    }
    bar.finish_and_clear();
    Ok(true)
}

impl Report {
    fn new(work: &Work, dry_run: bool) -> Report {
        let names = |wanted: fn(CopyState) -> bool| -> Vec<String> {
            let of_state = work.shards.iter().filter(|shard| wanted(shard.state));
            of_state.map(name).collect()
        };
        Report {
            to: work.to.display().to_string(),
            complete: work.to_write() == 0,
            dry_run,
            copied: names(|state| matches!(state, CopyState::Missing { .. })),
            already_there: names(|state| state == CopyState::Complete),
            left_out: names(|state| state == CopyState::LeftOut),
            bytes: work.to_write(),
            small_files: work.small.len(),
            ..Report::default()
        }
    }
}

fn name(shard: &Shard) -> String {
    let name = shard.to.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

fn finish(
    args: &StageArgs,
    work: &Work,
    report: &Report,
    code: ExitCode,
) -> anyhow::Result<ExitCode> {
    if args.json {
        print_json(report)?;
    } else {
        to_stdout(|out| print(out, work, report))?;
    }
    Ok(code)
}

fn print(out: &mut dyn Write, work: &Work, report: &Report) -> io::Result<()> {
    let to = &report.to;
    if report.dry_run {
        for shard in &work.shards {
            let size = human(shard.file.size());
            let what = match shard.state {
                CopyState::Complete => "is there".to_owned(),
                CopyState::Missing { begun: 0 } => format!("copy {size}"),
                CopyState::Missing { begun } => format!("resume after {} of {size}", human(begun)),
                CopyState::LeftOut => format!("leave out {size}: beyond the budget"),
            };
            writeln!(out, "{}: {what}", name(shard))?;
        }
        writeln!(
            out,
            "{} to write to {to}, and {}",
            human(report.bytes),
            pluralize(report.small_files, "small file")
        )?;
        return Ok(());
    }
    if report.complete {
        writeln!(
            out,
            "{to}: {} copied and compared ({} in {:.1} s, {:.0} MiB/s), {} there before, {} left out",
            pluralize(report.copied.len(), "shard"),
            human(report.bytes),
            report.seconds,
            report.mib_per_s,
            report.already_there.len(),
            report.left_out.len()
        )?;
    } else {
        writeln!(
            out,
            "{to}: interrupted; run the same command again to resume"
        )?;
    }
    Ok(())
}
