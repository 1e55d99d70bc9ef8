//! `score`: prints the log-probabilities of given tokens.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use colibri_uring::model::ModelError;
use colibri_uring::model::draft::Mode;
use colibri_uring::quant::Activations;
use colibri_uring::runtime::sample::{argmax, log_softmax_at};
use colibri_uring::runtime::tokenizer::check_ids;
use serde::Serialize;

use crate::cli::args::model::ModelArgs;
use crate::cli::args::prompt::{self, PromptArgs};
use crate::cli::args::usage::WrongUsage;
use crate::cli::args::values::Ids;
use crate::cli::commands::load;
use crate::cli::output::printer::{print_json, to_stdout};
use crate::cli::output::progress;

/// Score token ids or a text: the most likely next token and the actual one's log-probability, at each position
#[derive(Debug, Args)]
#[command(after_long_help = "Example:\n  colibri-uring score --model DIR --ids 3,14,159,26 --json")]
pub struct ScoreArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids to score, like 3,14,159
    #[arg(long, value_name = "IDS", conflicts_with_all = ["prompt", "prompt_file"], help_heading = "Prompt")]
    ids: Option<Ids>,
    #[command(flatten)]
    text: PromptArgs,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// The JSON object.
#[derive(Debug, Default, Serialize)]
struct Report {
    /// The most likely next token after each id; `null` if no logit is a number.
    argmax: Vec<Option<u32>>,
    /// Natural logarithm of the probability of the id that follows: one fewer than ids.
    logprobs: Vec<f64>,
    /// Mean of the negated `logprobs`; `null` without any.
    nll: Option<f64>,
    /// Logits after the last id.
    last_logits: Vec<f32>,
    /// `exact` or `int8`.
    activations: Activations,
}

pub fn run(args: &ScoreArgs) -> anyhow::Result<ExitCode> {
    let opened = load::open(&args.model, Mode::Off, false)?;
    let ids = &match &args.ids {
        Some(ids) => ids.0.clone(),
        None => match args.text.read()? {
            Some(text) => prompt::encode(opened.model().tokenizer()?, &args.model.model[0], &text)?,
            None => bail!(WrongUsage(
                "score needs --ids, --prompt or --prompt-file".into()
            )),
        },
    };
    check_ids(ids, opened.model().config().vocab_size)?;
    let mut runner = opened
        .load(args.model.run_options(ids.len(), ids.len()))?
        .runner;
    let mut sequence = runner.sequence();
    let mut report = Report {
        activations: args.model.activations.into(),
        ..Report::default()
    };
    let reading = progress::reading(&mut runner, ids.len());
    let scored = runner.score(&mut sequence, ids, |at, logits| {
        report.argmax.push(argmax(logits));
        match ids.get(at + 1) {
            Some(&next) => report.logprobs.push(log_softmax_at(logits, next as usize)),
            None => report.last_logits = logits.to_vec(),
        }
    });
    reading.finish_and_clear();
    let stopped = matches!(scored, Err(ModelError::Stopped));
    if !stopped {
        scored?;
    }
    runner.save_usage();
    if stopped {
        return Ok(crate::cli::interrupt::exit_code());
    }
    if !report.logprobs.is_empty() {
        let sum: f64 = report.logprobs.iter().sum();
        report.nll = Some(-sum / report.logprobs.len() as f64);
    }
    if args.json {
        print_json(&report)?;
    } else {
        to_stdout(|out| print(out, ids, &report))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints one line per position.
fn print(out: &mut dyn Write, ids: &[u32], report: &Report) -> io::Result<()> {
    writeln!(
        out,
        "position  id  most likely next  log-probability of the next"
    )?;
    for (at, (id, top)) in ids.iter().zip(&report.argmax).enumerate() {
        let top = top.map_or("-".to_owned(), |id| id.to_string());
        match report.logprobs.get(at) {
            Some(logprob) => writeln!(out, "{at}  {id}  {top}  {logprob:.4}")?,
            None => writeln!(out, "{at}  {id}  {top}")?,
        }
    }
    if let Some(nll) = report.nll {
        let note = match report.activations {
            Activations::Exact => "",
            Activations::Int8 => " (activations rounded to int8)",
        };
        writeln!(out, "mean negative log-likelihood: {nll:.4}{note}")?;
    }
    Ok(())
}
