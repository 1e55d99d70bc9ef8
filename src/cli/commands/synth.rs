//! `synth`: writes a model with random weights.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use colibri_uring::arch::Dimensions;
use colibri_uring::pool::Pool;
use colibri_uring::tools::synth::{Coding, Preset, Spec, Synth, SynthError};
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
    /// Shape to start from: small has about 2 GB, glm-5.2 has 419 GB
    #[arg(long, value_enum, default_value = "small", help_heading = "Model")]
    preset: PresetArg,
    /// Leave experts and large matrices as holes, which read as zeros
    #[arg(long, help_heading = "Output")]
    sparse: bool,
    /// Add a layer of multi-token prediction (int8)
    #[arg(long, help_heading = "Model")]
    mtp_layer: bool,
    /// Random seed: the same seed gives the same weights
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Model")]
    seed: u64,
    /// Format of routed experts
    #[arg(long, value_enum, default_value = "int4-g64", help_heading = "Model")]
    experts_format: CodingArg,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PresetArg {
    /// GLM-5.2's full shape
    #[value(name = "glm-5.2")]
    Glm52,
    /// The same architecture in about 2 GB
    Small,
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
    fn over(&self, preset: Dimensions) -> Dimensions {
        let s = preset;
        Dimensions {
            layers: self.layers.unwrap_or(s.layers),
            dense_layers: self.dense_layers.unwrap_or(s.dense_layers),
            hidden: self.hidden.unwrap_or(s.hidden),
            intermediate: self.intermediate.unwrap_or(s.intermediate),
            moe_intermediate: self.moe_intermediate.unwrap_or(s.moe_intermediate),
            experts: self.routed_experts.unwrap_or(s.experts),
            top_k: self.experts_per_token.unwrap_or(s.top_k),
            shared_experts: self.shared_experts.unwrap_or(s.shared_experts),
            heads: self.heads.unwrap_or(s.heads),
            q_lora_rank: self.q_lora_rank.unwrap_or(s.q_lora_rank),
            kv_lora_rank: self.kv_lora_rank.unwrap_or(s.kv_lora_rank),
            qk_nope_head_dim: self.qk_nope_head_dim.unwrap_or(s.qk_nope_head_dim),
            qk_rope_head_dim: self.qk_rope_head_dim.unwrap_or(s.qk_rope_head_dim),
            v_head_dim: self.v_head_dim.unwrap_or(s.v_head_dim),
            vocab: self.vocab.unwrap_or(s.vocab),
            index_topk: self.index_topk.unwrap_or(s.index_topk),
            index_heads: self.index_heads.unwrap_or(s.index_heads),
            index_head_dim: self.index_head_dim.unwrap_or(s.index_head_dim),
            ..s
        }
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
    let (preset, shard_size) = match args.preset {
        PresetArg::Glm52 => (Preset::Glm52, 3 << 30),
        PresetArg::Small => (Preset::Small, 512 << 20),
    };
    let shard_bytes = args.shard_size.map_or(shard_size, |size| size.0);
    ensure!(shard_bytes > 0, "--shard-size must be more than 0");
    let synth = Synth::new(Spec {
        family: preset.family(),
        dimensions: Dimensions {
            draft_layers: args.mtp_layer.into(),
            ..args.shape.over(preset.dimensions())
        },
        experts: args.experts_format.into(),
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
