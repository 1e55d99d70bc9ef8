//! `plan`: prints the memory plan of a model, and whether it fits.

use std::process::ExitCode;

use anyhow::ensure;
use clap::Args;
use colibri_uring::runtime::{OpenError, RunOptions};
use colibri_uring::shards::{Findings, Severity};
use serde::Serialize;
use serde_json::json;

use crate::cli::args::model::{DraftArgs, ModelArgs};
use crate::cli::commands::load;
use crate::cli::output::findings::print_findings;
use crate::cli::output::memory::{Report, print};
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::printer::{print_json, to_stdout};

/// Plan memory and check that a model fits, without loading it
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    colibri-uring plan --model /models/GLM-5.2\n  \
    colibri-uring plan --model DIR --ram 24GiB --context 32768 --json\n\
The exit code is 1 if the model does not fit.")]
pub struct PlanArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    draft: DraftArgs,
    /// Tokens of the context [default: 4096, or the model's maximum]
    #[arg(short, long, value_name = "N", help_heading = "Memory")]
    context: Option<usize>,
    /// Tokens of the context that come at once, as a prompt
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Memory")]
    prompt_tokens: usize,
    /// Add the recording of `decode --trace` and `--report`
    #[arg(long, help_heading = "Memory")]
    record: bool,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// The JSON object.
#[derive(Debug, Serialize)]
struct Planned<'a> {
    #[serde(flatten)]
    report: Report,
    /// Warnings and notes about tensors and files.
    findings: &'a Findings,
}

/// Tokens of a context without --context.
const DEFAULT_CONTEXT: usize = 4096;

pub fn run(args: &PlanArgs) -> anyhow::Result<ExitCode> {
    let opened = match load::open(&args.model, args.draft.mtp.0, false) {
        Ok(opened) => opened,
        Err(error) => {
            if let (true, Some(OpenError::NotWhole(findings))) = (args.json, error.downcast_ref()) {
                print_json(&json!({ "fits": false, "findings": findings }))?;
            }
            return Err(error);
        }
    };
    let findings = opened.model().findings();
    let config = opened.model().config();
    let context =
        (args.context).unwrap_or_else(|| DEFAULT_CONTEXT.min(config.max_position_embeddings));
    ensure!(context > 0, "a context has at least one token");
    ensure!(
        args.prompt_tokens <= context,
        "a prompt of {} does not fit into a context of {context}",
        pluralize(args.prompt_tokens, "token"),
    );
    let survey = opened.model().memory(&RunOptions {
        record: args.record,
        ..args.model.run_options(context, args.prompt_tokens)
    })?;
    let plan = survey.plan();
    let ram = args.model.ram.is_some();
    let report = Report::new(&survey, plan.as_ref().ok(), ram, config.experts.count);
    if args.json {
        print_json(&Planned { report, findings })?;
    } else {
        to_stdout(|out| {
            print(out, &report, context)?;
            print_findings(out, &findings.only(&[Severity::Note]))
        })?;
    }
    plan?;
    Ok(ExitCode::SUCCESS)
}
