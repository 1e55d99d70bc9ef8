//! `mirror verify`: compares mirrors with the model, byte by byte.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use colibri_ring::Options;
use colibri_uring::shards::{Fault, Refusal, Shards, Unserved};
use colibri_uring::tools::measure::mib_per_s;
use colibri_uring::tools::verify::{Verdict, bytes_to_compare, path_in_mirror, verify};
use serde::Serialize;

use crate::cli::args::copies::CopiesArgs;
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::printer::{print_json, to_stdout};
use crate::cli::output::progress;
use crate::cli::output::size::human;

/// Compare every byte of the mirrors with the model; exit code 1 if one differs
#[derive(Debug, Args)]
#[command(
    after_long_help = "Example:\n  colibri-uring mirror verify --model /ssd1/GLM-5.2 --mirror /ssd2/GLM-5.2"
)]
pub struct VerifyArgs {
    #[command(flatten)]
    copies: CopiesArgs,
}

/// The JSON object.
#[derive(Debug, Serialize)]
struct Report {
    /// Whether every file in every mirror is a copy.
    identical: bool,
    mirrors: Vec<Mirror>,
    seconds: f64,
    /// Combined speed of all drives.
    mib_per_s: f64,
}

/// One mirror.
#[derive(Debug, Serialize)]
struct Mirror {
    dir: String,
    /// Files with the primary's size and header.
    files: usize,
    /// Files that only the primary has.
    missing: usize,
    /// Files with another size or header, or that cannot be opened.
    refused: Vec<String>,
    /// The reason for each file in `refused`.
    #[serde(skip)]
    reasons: Vec<String>,
    /// Bytes that equal the primary's.
    bytes: u64,
    first_difference: Option<FirstDifference>,
}

#[derive(Debug, Serialize)]
struct FirstDifference {
    file: String,
    /// `null` in the header.
    tensor: Option<String>,
    offset: u64,
    /// Why the mirror cannot be read here; `null` if the bytes differ.
    error: Option<String>,
}

pub fn run(args: &VerifyArgs) -> anyhow::Result<ExitCode> {
    let args = &args.copies;
    let shards = args.open()?;
    let options = Options {
        kind: args.engine.into(),
        ..Options::default()
    };
    let bar = progress::bytes(bytes_to_compare(&shards));
    let start = Instant::now();
    let verdicts = verify(&shards, args.direct.into(), options, |bytes| bar.inc(bytes))?;
    let elapsed = start.elapsed();
    bar.finish_and_clear();
    let mirrors: Vec<Mirror> = (verdicts.into_iter().enumerate())
        .map(|(i, verdict)| mirror(&shards, i, verdict))
        .collect();
    let copy = |m: &Mirror| m.refused.is_empty() && m.first_difference.is_none() && m.files > 0;
    let bytes: u64 = mirrors.iter().map(|m| m.bytes).sum();
    let report = Report {
        identical: mirrors.iter().all(copy),
        seconds: elapsed.as_secs_f64(),
        // The primary was read once for all of them.
        mib_per_s: mib_per_s(
            bytes + mirrors.iter().map(|m| m.bytes).max().unwrap_or(0),
            elapsed,
        ),
        mirrors,
    };
    if args.json {
        print_json(&report)?;
    } else {
        to_stdout(|out| print(out, &report))?;
    }
    Ok(match report.identical {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn mirror(shards: &Shards, i: usize, verdict: Verdict) -> Mirror {
    let served = |file: &usize| shards.copies(*file).iter().any(|copy| copy.mirror == i);
    let files = (0..shards.files().len()).filter(served).count();
    let unserved = match shards.fault(i) {
        Some(Fault::Files { unserved, .. }) => unserved.as_slice(),
        _ => &[],
    };
    let (missing, refused): (Vec<&Unserved>, Vec<&Unserved>) =
        (unserved.iter()).partition(|file| matches!(file.reason, Refusal::Missing));
    Mirror {
        dir: shards.mirrors()[i].display().to_string(),
        files,
        missing: missing.len(),
        refused: refused
            .iter()
            .map(|f| f.path.display().to_string())
            .collect(),
        reasons: refused.iter().map(|f| f.reason.to_string()).collect(),
        bytes: verdict.bytes,
        first_difference: verdict.difference.map(|d| FirstDifference {
            file: path_in_mirror(shards, i, d.file).display().to_string(),
            tensor: d.tensor,
            offset: d.offset,
            error: d.unreadable.map(|e| e.source.to_string()),
        }),
    }
}

fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    for mirror in &report.mirrors {
        let dir = &mirror.dir;
        let (same, files) = (human(mirror.bytes), mirror.files);
        match mirror.first_difference {
            None if files == 0 => writeln!(out, "{dir}: there is no copy of any file")?,
            None => writeln!(
                out,
                "{dir}: the same are {same} in {}",
                pluralize(files, "file")
            )?,
            Some(_) => writeln!(
                out,
                "{dir}: differs; the first difference comes after {same}"
            )?,
        }
        if mirror.missing > 0 {
            writeln!(out, "  not there: {}", pluralize(mirror.missing, "file"))?;
        }
        for (path, reason) in mirror.refused.iter().zip(&mirror.reasons) {
            writeln!(out, "  {path} is no copy: {reason}")?;
        }
        if let Some(difference) = &mirror.first_difference {
            let tensor = difference.tensor.as_deref().unwrap_or("the header");
            let (file, offset) = (&difference.file, difference.offset);
            match &difference.error {
                Some(error) => writeln!(
                    out,
                    "  {file}: {tensor} cannot be read at offset {offset}: {error}"
                )?,
                None => writeln!(out, "  {file}: {tensor} differs, first at offset {offset}")?,
            }
        }
    }
    // Nothing was read: no speed.
    if report.mib_per_s > 0.0 {
        let speed = human((report.mib_per_s * f64::from(1 << 20)) as u64);
        writeln!(
            out,
            "all drives together: {speed}/s for {:.2} s",
            report.seconds
        )?;
    }
    Ok(())
}
