//! `convert`: quantises a checkpoint into a container.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::Args;
use colibri_uring::pool::Pool;
use colibri_uring::quant::encode::Packing;
use colibri_uring::tools::convert::{Conversion, ConvertError, Options, Recipe, Summary};
use serde::Serialize;

use crate::cli::args::size::Size;
use crate::cli::interrupt;
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::printer::{print_json, to_stdout};
use crate::cli::output::size::human;
use crate::cli::output::{formats, progress};

/// Quantise a checkpoint into a container; run it again to resume
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    colibri-uring convert /models/GLM-5.2-FP8 /models/GLM-5.2-int4\n  \
    colibri-uring convert /ssd1/GLM-5.2 /ssd2/GLM-5.2 /models/GLM-5.2-int8 --experts int8 --dense int8\n  \
    colibri-uring convert /models/GLM-5.2-FP8 /models/GLM-5.2-int4 --delete-source\n\n\
    FORMAT is int4-g64 (or another group size), int4, int8, int2, or keep. Routers, norms and biases become F32. \
    It takes less than 100 MB of memory.")]
pub struct ConvertArgs {
    /// Directory with config.json and *.safetensors; several for a split checkpoint
    #[arg(value_name = "SRC", required = true, num_args = 1..)]
    sources: Vec<PathBuf>,
    /// Directory of the container: new, empty, or from the same conversion, interrupted
    #[arg(value_name = "OUT", required = true)]
    out: PathBuf,
    /// Format of routed experts
    #[arg(
        long,
        value_name = "FORMAT",
        default_value = "int4-g64",
        help_heading = "Formats"
    )]
    experts: FormatArg,
    /// Format of all other matrices
    #[arg(
        long,
        value_name = "FORMAT",
        default_value = "int4-g64",
        help_heading = "Formats"
    )]
    dense: FormatArg,
    /// Format of the embedding and the head
    #[arg(
        long,
        value_name = "FORMAT",
        default_value = "int8",
        help_heading = "Formats"
    )]
    embed: FormatArg,
    /// Format of the layer for multi-token prediction, experts included
    #[arg(
        long,
        value_name = "FORMAT",
        default_value = "int8",
        help_heading = "Formats"
    )]
    mtp: FormatArg,
    /// Largest size of a shard
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "5GiB",
        help_heading = "Output"
    )]
    shard_size: Size,
    /// Remove each source file when everything made from it is synced
    #[arg(long, help_heading = "Output")]
    delete_source: bool,
    /// Print the plan and write nothing
    #[arg(long, help_heading = "Output")]
    dry_run: bool,
    /// Compute threads [default: one per CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), env = "COLIBRI_THREADS", help_heading = "Compute")]
    threads: Option<u16>,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// `None` keeps the stored format.
#[derive(Clone, Copy, Debug)]
struct FormatArg(Option<Packing>);

impl FromStr for FormatArg {
    type Err = String;

    fn from_str(text: &str) -> Result<FormatArg, String> {
        match text {
            "keep" => Ok(FormatArg(None)),
            _ => text
                .parse()
                .map(|packing| FormatArg(Some(packing)))
                .map_err(|e| format!("{e}, or keep")),
        }
    }
}

/// The JSON object.
#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    summary: Summary,
    dry_run: bool,
    seconds: f64,
}

pub fn run(args: &ConvertArgs) -> anyhow::Result<ExitCode> {
    ensure!(args.shard_size.0 > 0, "--shard-size must be more than 0");
    let start = Instant::now();
    let conversion = Conversion::plan(Options {
        sources: args.sources.clone(),
        out: args.out.clone(),
        recipe: Recipe {
            experts: args.experts.0,
            dense: args.dense.0,
            embed: args.embed.0,
            mtp: args.mtp.0,
        },
        shard_size: args.shard_size.0,
        delete_source: args.delete_source,
    })?;
    let planned = conversion.summary().clone();
    if planned.requantised > 0 {
        tracing::warn!(
            "rounded a second time, because it is quantised already: {} (keep leaves it unchanged)",
            pluralize(planned.requantised, "tensor")
        );
    }
    conversion.check_space()?;
    // On a terminal, like the progress bar.
    if args.dry_run && !args.json {
        to_stdout(|out| out.write_all(describe(&planned, args).as_bytes()))?;
    } else if !args.json && io::stderr().is_terminal() {
        io::stderr().write_all(describe(&planned, args).as_bytes())?;
    }
    let summary = if args.dry_run {
        planned
    } else {
        let stop = interrupt::install().context("cannot handle Ctrl-C")?;
        let threads = args
            .threads
            .map_or_else(colibri_uring::cpus::default_threads, usize::from);
        let bar = progress::bytes(planned.bytes_to_read);
        let done = conversion.run(&Pool::new(threads), &stop, &|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        match done {
            Err(ConvertError::Stopped) => return Ok(interrupt::exit_code()),
            done => done?,
        }
    };
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        print_json(&Report {
            summary,
            dry_run: args.dry_run,
            seconds,
        })?;
    } else if !args.dry_run {
        to_stdout(|out| {
            writeln!(
                out,
                "{} in {} at {}, in {seconds:.1} s",
                human(summary.bytes_out),
                pluralize(summary.shards, "shard"),
                args.out.display()
            )
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Describes the plan.
fn describe(summary: &Summary, args: &ConvertArgs) -> String {
    let mut text = format!(
        "{} of tensors become {} in {}; {} are free at {}\n",
        human(summary.bytes_in),
        human(summary.bytes_out),
        pluralize(summary.shards, "shard"),
        human(summary.space_free),
        args.out.display()
    );
    text += &formats::table(&summary.formats);
    if summary.unknown > 0 {
        text += &format!(
            "copied, because this architecture does not use it: {}\n",
            pluralize(summary.unknown, "tensor")
        );
    }
    if summary.finished_before > 0 {
        text += &format!(
            "finished already: {} of {}\n",
            summary.finished_before,
            pluralize(summary.shards, "shard")
        );
    }
    text
}
