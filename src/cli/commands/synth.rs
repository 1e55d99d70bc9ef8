//! `synth`: writes a model with random weights.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use colibri_uring::arch::{self, Dimension, Preset};
use colibri_uring::pool::Pool;
use colibri_uring::tools::synth::{Coding, Spec, Synth, SynthError};
use serde::Serialize;

use crate::cli::args::size::Size;
use crate::cli::interrupt;
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::printer::{print_json, to_stdout};
use crate::cli::output::progress;
use crate::cli::output::size::human;

/// Write a model with random weights, to try the program without a download
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    colibri-uring synth /models/small\n  \
    colibri-uring synth /models/glm-shape --preset glm-5.2 --sparse\n  \
    colibri-uring synth DIR --layers 4 --routed-experts 32 --experts-format int8 --seed 7")]
pub struct SynthArgs {
    /// Directory to write to: new or empty
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// Shape to start from
    #[arg(long, value_name = "PRESET", value_parser = preset_parser(), default_value = "small", help_heading = "Model")]
    preset: Preset,
    /// Leave experts and large matrices as holes, which read as zeros
    #[arg(long, help_heading = "Output")]
    sparse: bool,
    /// Add a layer of multi-token prediction (int8)
    #[arg(long, help_heading = "Model")]
    mtp_layer: bool,
    /// Random seed: the same seed gives the same weights
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Model")]
    seed: u64,
    /// Format of routed experts [default: int4-g64, and mxfp4 for gpt-oss]
    #[arg(long, value_enum, help_heading = "Model")]
    experts_format: Option<CodingArg>,
    /// Format of the large resident matrices
    #[arg(long, value_enum, default_value = "int4-g64", help_heading = "Model")]
    dense_format: CodingArg,
    /// Approximate size of a shard [default: 3GiB, small: 512MiB]
    #[arg(long, value_name = "SIZE", help_heading = "Output")]
    shard_size: Option<Size>,
    /// Compute threads [default: one per CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), env = "COLIBRI_THREADS", help_heading = "Compute")]
    threads: Option<u16>,
    #[command(flatten)]
    shape: ShapeArgs,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Overrides of the preset's shape.
#[derive(Debug, Args)]
struct ShapeArgs {
    /// Decoder layers
    #[arg(long, value_name = "N", help_heading = "Shape (default: the preset's)")]
    layers: Option<u64>,
    /// Leading layers with a dense MLP instead of experts
    #[arg(long, value_name = "N", help_heading = "Shape (default: the preset's)")]
    dense_layers: Option<u64>,
    /// Width of the residual stream
    #[arg(long, value_name = "N", help_heading = "Shape (default: the preset's)")]
    hidden: Option<u64>,
    /// Width of a dense layer's MLP
    #[arg(long, value_name = "N", help_heading = "Shape (default: the preset's)")]
    intermediate: Option<u64>,
    /// Width of an expert
    #[arg(long, value_name = "N", help_heading = "Shape (default: the preset's)")]
    moe_intermediate: Option<u64>,
    /// Routed experts per layer
    #[arg(long, value_name = "N", help_heading = "Shape (default: the preset's)")]
    routed_experts: Option<u64>,
    /// Experts per token and layer
    #[arg(long, value_name = "N", help_heading = "Shape (default: the preset's)")]
    experts_per_token: Option<u64>,
    /// Shared experts
    #[arg(long, value_name = "N", help_heading = "Shape (default: the preset's)")]
    shared_experts: Option<u64>,
    /// Attention heads
    #[arg(long, value_name = "N", help_heading = "Shape (default: the preset's)")]
    heads: Option<u64>,
    /// Heads of keys and values
    #[arg(
        long,
        value_name = "N",
        hide_short_help = true,
        help_heading = "Shape (default: the preset's)"
    )]
    kv_heads: Option<u64>,
    /// Dimensions of a head
    #[arg(
        long,
        value_name = "N",
        hide_short_help = true,
        help_heading = "Shape (default: the preset's)"
    )]
    head_dim: Option<u64>,
    /// Rank of the queries
    #[arg(
        long,
        value_name = "N",
        hide_short_help = true,
        help_heading = "Shape (default: the preset's)"
    )]
    q_lora_rank: Option<u64>,
    /// Rank of keys and values
    #[arg(
        long,
        value_name = "N",
        hide_short_help = true,
        help_heading = "Shape (default: the preset's)"
    )]
    kv_lora_rank: Option<u64>,
    /// Dimensions of a head's key without position
    #[arg(
        long,
        value_name = "N",
        hide_short_help = true,
        help_heading = "Shape (default: the preset's)"
    )]
    qk_nope_head_dim: Option<u64>,
    /// Dimensions of a head's key with position
    #[arg(
        long,
        value_name = "N",
        hide_short_help = true,
        help_heading = "Shape (default: the preset's)"
    )]
    qk_rope_head_dim: Option<u64>,
    /// Dimensions of a head's value
    #[arg(
        long,
        value_name = "N",
        hide_short_help = true,
        help_heading = "Shape (default: the preset's)"
    )]
    v_head_dim: Option<u64>,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N", help_heading = "Shape (default: the preset's)")]
    vocab: Option<u64>,
    /// Positions that sparse attention attends; 0 for dense attention
    #[arg(
        long,
        value_name = "N",
        hide_short_help = true,
        help_heading = "Shape (default: the preset's)"
    )]
    index_topk: Option<u64>,
    /// Heads of the indexer
    #[arg(
        long,
        value_name = "N",
        hide_short_help = true,
        help_heading = "Shape (default: the preset's)"
    )]
    index_heads: Option<u64>,
    /// Dimensions of an indexer's head
    #[arg(
        long,
        value_name = "N",
        hide_short_help = true,
        help_heading = "Shape (default: the preset's)"
    )]
    index_head_dim: Option<u64>,
}

fn preset_parser() -> impl TypedValueParser<Value = Preset> {
    let names = arch::presets().map(|preset| PossibleValue::new(preset.name).help(preset.about));
    PossibleValuesParser::new(names).try_map(|name| {
        let found = arch::presets().find(|preset| preset.name == name);
        found.copied().ok_or("no preset")
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CodingArg {
    /// 4 bits, one scale per 64 columns
    #[value(name = "int4-g64")]
    Int4G64,
    /// 4 bits, one scale per row
    Int4,
    /// 8 bits, one scale per row
    Int8,
    /// 2 bits, one scale per row
    Int2,
    /// bfloat16
    Bf16,
}

impl From<CodingArg> for Coding {
    fn from(arg: CodingArg) -> Coding {
        match arg {
            CodingArg::Int4G64 => Coding::Int4G64,
            CodingArg::Int4 => Coding::Int4,
            CodingArg::Int8 => Coding::Int8,
            CodingArg::Int2 => Coding::Int2,
            CodingArg::Bf16 => Coding::Bf16,
        }
    }
}

impl ShapeArgs {
    /// The dimensions that are given, with the flags that give them.
    fn changes(&self) -> Vec<(&'static str, Dimension, u64)> {
        let all = [
            ("layers", Dimension::Layers, self.layers),
            ("dense-layers", Dimension::DenseLayers, self.dense_layers),
            ("hidden", Dimension::Hidden, self.hidden),
            ("intermediate", Dimension::Intermediate, self.intermediate),
            (
                "moe-intermediate",
                Dimension::MoeIntermediate,
                self.moe_intermediate,
            ),
            ("routed-experts", Dimension::Experts, self.routed_experts),
            ("experts-per-token", Dimension::TopK, self.experts_per_token),
            (
                "shared-experts",
                Dimension::SharedExperts,
                self.shared_experts,
            ),
            ("heads", Dimension::Heads, self.heads),
            ("kv-heads", Dimension::KvHeads, self.kv_heads),
            ("head-dim", Dimension::HeadDim, self.head_dim),
            ("q-lora-rank", Dimension::QueryRank, self.q_lora_rank),
            ("kv-lora-rank", Dimension::KvRank, self.kv_lora_rank),
            (
                "qk-nope-head-dim",
                Dimension::NopeHeadDim,
                self.qk_nope_head_dim,
            ),
            (
                "qk-rope-head-dim",
                Dimension::RopeHeadDim,
                self.qk_rope_head_dim,
            ),
            ("v-head-dim", Dimension::ValueHeadDim, self.v_head_dim),
            ("vocab", Dimension::Vocab, self.vocab),
            ("index-topk", Dimension::IndexTopK, self.index_topk),
            ("index-heads", Dimension::IndexHeads, self.index_heads),
            (
                "index-head-dim",
                Dimension::IndexHeadDim,
                self.index_head_dim,
            ),
        ];
        let given = |(flag, dimension, value): (_, _, Option<u64>)| Some((flag, dimension, value?));
        all.into_iter().filter_map(given).collect()
    }

    /// The preset's config with these changes.
    fn config(&self, preset: &Preset, drafts: bool) -> anyhow::Result<serde_json::Value> {
        let given = self.changes();
        let changes: Vec<_> = given.iter().map(|(_, d, value)| (*d, *value)).collect();
        preset.config_json(&changes, drafts).map_err(|dimension| {
            let flag = given.iter().find(|(_, d, _)| *d == dimension);
            let flag = flag.map_or("", |(flag, ..)| flag);
            anyhow!("--{flag} is no dimension of --preset {}", preset.name)
        })
    }
}

/// The JSON object.
#[derive(Debug, Serialize)]
struct Report {
    shards: usize,
    tensors: usize,
    /// Bytes of all files, holes included.
    bytes: u64,
    /// Bytes without holes.
    written_bytes: u64,
    seconds: f64,
}

pub fn run(args: &SynthArgs) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let small = args.preset.name == "small";
    let shard_size = if small { 512 << 20 } else { 3 << 30 };
    let shard_bytes = args.shard_size.map_or(shard_size, |size| size.0);
    ensure!(shard_bytes > 0, "--shard-size must be more than 0");
    let synth = Synth::new(Spec {
        config: args.shape.config(&args.preset, args.mtp_layer)?,
        drafts: args.mtp_layer,
        experts: args.experts_format.map(Coding::from),
        dense: args.dense_format.into(),
        sparse: args.sparse,
        seed: args.seed,
        shard_bytes,
    })?;
    let stop = interrupt::install().context("cannot handle Ctrl-C")?;
    let threads = args
        .threads
        .map_or_else(colibri_uring::cpus::default_threads, usize::from);
    let made = synth.made();
    let bar = progress::bytes(made.written);
    let written = synth.write(&args.out, &Pool::new(threads), &stop, &|bytes| {
        bar.inc(bytes);
    });
    bar.finish_and_clear();
    match written {
        Err(SynthError::Stopped) => return Ok(interrupt::exit_code()),
        other => other?,
    }
    let report = Report {
        shards: made.shards,
        tensors: made.tensors,
        bytes: made.bytes,
        written_bytes: made.written,
        seconds: start.elapsed().as_secs_f64(),
    };
    if args.json {
        print_json(&report)?;
    } else {
        to_stdout(|out| {
            writeln!(
                out,
                "{}: {} in {}, {}, of which {} are no holes; {:.1} s",
                args.out.display(),
                pluralize(report.tensors, "tensor"),
                pluralize(report.shards, "shard"),
                human(report.bytes),
                human(report.written_bytes),
                report.seconds
            )
        })?;
    }
    Ok(ExitCode::SUCCESS)
}
