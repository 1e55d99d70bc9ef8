//! `plan`: what a model takes in memory, and whether that fits.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::ensure;
use clap::Args;
use clap::builder::FalseyValueParser;
use colibri_uring::runtime::RunOptions;
use colibri_uring::runtime::plan::{Available, MemoryInputs, Plan};
use serde::Serialize;

use crate::cli::args::model::{DraftArgs, ModelArgs};
use crate::cli::args::size::human;
use crate::cli::commands::load;
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::printer::to_stdout;

/// Say how memory would be used, and whether the model fits; nothing is loaded
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    colibri-uring plan --model /models/GLM-5.2\n  \
    colibri-uring plan --model DIR --ram 24GiB --context 32768 --json\n\
Exit code 1 when the model does not fit.")]
pub struct PlanArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    draft: DraftArgs,
    /// Tokens of the context [default: 4096, or as many as the model allows]
    #[arg(long, value_name = "N", env = "COLIBRI_CONTEXT")]
    context: Option<usize>,
    /// Tokens of it that come at once, as a prompt
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        env = "COLIBRI_PROMPT_TOKENS"
    )]
    prompt_tokens: usize,
    /// With what `decode --trace` or `--report` records
    #[arg(long, env = "COLIBRI_RECORD", value_parser = FalseyValueParser::new())]
    record: bool,
    /// Print one JSON object
    #[arg(long, env = "COLIBRI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

/// The JSON object. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Whether it fits.
    pub fits: bool,
    /// Routed experts of a layer.
    experts_per_layer: usize,
    /// Experts that each layer keeps; `null` where nothing fits.
    cache_slots_per_layer: Option<usize>,
    dense_bytes: u64,
    kv_bytes: u64,
    scratch_bytes: u64,
    scores_bytes: u64,
    drafts_bytes: u64,
    index_bytes: u64,
    program_bytes: u64,
    record_bytes: u64,
    /// Slabs that a token needs at once.
    working_slab_bytes: u64,
    /// Slabs beside them, in which experts are kept.
    cache_slab_bytes: u64,
    /// The sum of the above.
    pub total_bytes: u64,
    /// What may be used; `null` if that is not known.
    pub budget_bytes: Option<u64>,
    /// Where the budget comes from: "ram" or "available".
    budget_source: &'static str,
    mem_total_bytes: Option<u64>,
    mem_available_bytes: Option<u64>,
    reserve_bytes: Option<u64>,
    cgroup: Option<Cgroup>,
    /// Slabs by size.
    slabs: Vec<Slabs>,
}

#[derive(Clone, Debug, Serialize)]
struct Cgroup {
    path: String,
    limit_bytes: u64,
    left_bytes: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Slabs {
    bytes: usize,
    count: usize,
}

impl Report {
    /// What a survey says of a model with so many routed experts in a layer, with its plan if there is one.
    pub fn new(survey: &MemoryInputs, plan: Option<&Plan>, ram: bool, experts: usize) -> Report {
        let needs = plan.map_or(&survey.needs, |plan| &plan.needs);
        let slabs = plan.map_or(survey.working_bytes(), |plan| plan.slots.bytes());
        let working = survey.working_bytes().min(slabs);
        let available = survey.available.as_ref().ok();
        let cgroup = |available: &Available| {
            available.cgroup.as_ref().map(|bound| Cgroup {
                path: bound.path.display().to_string(),
                limit_bytes: bound.limit,
                left_bytes: bound.left,
            })
        };
        Report {
            fits: plan.is_some(),
            experts_per_layer: experts,
            cache_slots_per_layer: plan.map(|plan| plan.slots.per_layer_quota),
            dense_bytes: needs.dense,
            kv_bytes: needs.kv,
            scratch_bytes: needs.scratch,
            scores_bytes: needs.scores,
            drafts_bytes: needs.drafts,
            index_bytes: needs.index,
            program_bytes: needs.program,
            record_bytes: needs.record,
            working_slab_bytes: working,
            cache_slab_bytes: slabs - working,
            total_bytes: needs.sum().saturating_add(slabs),
            budget_bytes: survey.budget(),
            budget_source: if ram { "ram" } else { "available" },
            mem_total_bytes: available.map(|a| a.mem_total),
            mem_available_bytes: available.map(|a| a.mem_available),
            reserve_bytes: available.map(|a| a.reserve),
            cgroup: available.and_then(cgroup),
            slabs: plan.map_or_else(Vec::new, |plan| {
                let class = |class: &colibri_ring::Class| Slabs {
                    bytes: class.bytes,
                    count: class.count,
                };
                plan.slots.classes.iter().map(class).collect()
            }),
        }
    }
}

/// Tokens of a context where nobody says how many.
const DEFAULT_CONTEXT: usize = 4096;

/// Works the plan out and prints it.
pub fn run(args: &PlanArgs) -> anyhow::Result<ExitCode> {
    let opened = load::open(&args.model, args.draft.mtp.0)?;
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
    let report = Report::new(&survey, plan.as_ref().ok(), ram, config.n_routed_experts);
    if args.json {
        crate::cli::output::print_json(&report)?;
    } else {
        to_stdout(|out| print(out, &report, context))?;
    }
    plan?;
    Ok(ExitCode::SUCCESS)
}

fn print(out: &mut dyn Write, report: &Report, context: usize) -> io::Result<()> {
    let mut line = |name: &str, bytes: Option<u64>, note: &str| {
        let bytes = bytes.map_or("unknown".to_owned(), human);
        let text = format!("{name:<28}{bytes:>12}  {note}");
        writeln!(out, "{}", text.trim_end())
    };
    let context = format!("for {}", pluralize(context, "token"));
    line("resident weights", Some(report.dense_bytes), "")?;
    line("KV cache", Some(report.kv_bytes), &context)?;
    line("scratch", Some(report.scratch_bytes), "")?;
    line("attention scores", Some(report.scores_bytes), "")?;
    line("drafts", Some(report.drafts_bytes), "")?;
    line("index", Some(report.index_bytes), "")?;
    line("program", Some(report.program_bytes), "")?;
    if report.record_bytes > 0 {
        line(
            "record",
            Some(report.record_bytes),
            "for a trace or a report",
        )?;
    }
    let working = "what a token needs at once";
    line(
        "expert slabs, working",
        Some(report.working_slab_bytes),
        working,
    )?;
    let slots = match report.cache_slots_per_layer {
        Some(slots) => format!(
            "{slots} of {} kept in each layer",
            pluralize(report.experts_per_layer, "expert")
        ),
        None => "nothing is left".to_owned(),
    };
    line("expert slabs, cache", Some(report.cache_slab_bytes), &slots)?;
    line("in all", Some(report.total_bytes), "")?;
    let source = match report.budget_source {
        "ram" => "from --ram",
        _ => "the least that is available, less the reserve",
    };
    line("budget", report.budget_bytes, source)?;
    line("memory of the machine", report.mem_total_bytes, "")?;
    line("available there", report.mem_available_bytes, "")?;
    if let Some(cgroup) = &report.cgroup {
        line(
            "limit of the cgroup",
            Some(cgroup.limit_bytes),
            &cgroup.path,
        )?;
        line("left of it", Some(cgroup.left_bytes), "")?;
    }
    line("reserve", report.reserve_bytes, "for everything else")?;
    let verdict = if report.fits {
        "it fits"
    } else {
        "it does not fit"
    };
    writeln!(out, "{verdict}")
}
