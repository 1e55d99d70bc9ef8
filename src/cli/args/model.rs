//! Flags that select a model and say how it runs.

use std::path::PathBuf;

use clap::Args;
use clap::builder::FalseyValueParser;
use colibri_uring::quant::encode::Packing;
use colibri_uring::runtime::{ModelOptions, RunOptions};

use super::drives::{check_mirrors, weights};
use super::size::{self, Size};
use super::usage::WrongUsage;
use super::values::{
    ActivationsArg, Bits, DirectArg, DsaArg, EngineArg, LookaheadArg, MtpArg, Weights, share,
};

/// Selects a model and how it runs. Only `--dsa`, `--dense-bits`, `--expert-bits` and `--activations` change the model's output.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Directory with config.json and *.safetensors; repeat it for a split model
    ///
    /// Give every directory of a model that is split over drives. Without --model the demo model runs, which ships with
    /// the program.
    #[arg(short, long, value_name = "DIR", num_args = 1.., env = "COLIBRI_MODEL", help_heading = "Model")]
    pub model: Vec<PathBuf>,
    /// Whether `model` is the demo model.
    #[arg(skip)]
    pub demo: bool,
    /// Quantise resident float and FP8 weights at load: 8, 4 or 2 bits [default: as stored]
    ///
    /// The embedding and the head become int8.
    #[arg(
        long,
        value_name = "8|4|2",
        value_enum,
        hide_short_help = true,
        help_heading = "Model"
    )]
    pub dense_bits: Option<Bits>,
    /// Preview a quantised model's output without converting it [default: as stored]
    ///
    /// Quantises float and FP8 experts each time they are computed. This is slow, and reads as many bytes as before.
    /// `convert` makes a container that is fast.
    #[arg(
        long,
        value_name = "8|4|2",
        value_enum,
        hide_short_help = true,
        help_heading = "Model"
    )]
    pub expert_bits: Option<Bits>,
    /// Precision of activations for packed weights: exact or int8
    ///
    /// exact keeps activations as f32. int8 rounds them and multiplies integers, which is faster where arithmetic is the
    /// limit. Routers, the indexer and the head stay exact.
    #[arg(
        long,
        value_enum,
        default_value = "exact",
        hide_short_help = true,
        help_heading = "Model"
    )]
    pub activations: ActivationsArg,
    /// Sparse attention where the model has an indexer: on or off
    #[arg(
        long,
        value_enum,
        default_value = "on",
        hide_short_help = true,
        help_heading = "Model"
    )]
    pub dsa: DsaArg,
    /// Compute threads [default: one per CPU]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), env = "COLIBRI_THREADS", help_heading = "Model")]
    pub threads: Option<u16>,
    /// Memory budget of the process, like 24GiB [default: available memory]
    #[arg(long, value_name = "SIZE", value_parser = size::memory, env = "COLIBRI_RAM", help_heading = "Memory")]
    pub ram: Option<Size>,
    /// Expert slabs per MoE layer [default: as many as fit]
    ///
    /// 0 is the minimum: top_k + 1 slabs in all.
    #[arg(long, value_name = "N", help_heading = "Memory")]
    pub cache_slots: Option<u64>,
    /// Fraction of the slabs pinned to the most used experts, like 0.25 or 25%
    ///
    /// Pinned experts are those that earlier runs used most. They are never evicted.
    #[arg(long, value_name = "SHARE", default_value = "25%", value_parser = share, hide_short_help = true, help_heading = "Memory")]
    pub pin_share: f64,
    /// Neither read nor write the usage history, .coli_usage
    ///
    /// The history lies in the model's first directory and counts the experts that earlier runs used.
    #[arg(long, env = "COLIBRI_NO_USAGE", value_parser = FalseyValueParser::new(), hide_short_help = true, help_heading = "Memory")]
    pub no_usage: bool,
    /// Prompt tokens per forward pass, at most [default: as many as memory allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), hide_short_help = true, help_heading = "Memory")]
    pub prefill_slice: Option<u32>,
    /// Directory on another drive with copies of the model's files
    ///
    /// Repeat it for up to 4 mirrors. The engine reads from the model's drive and from all mirrors at the same time.
    #[arg(long, value_name = "DIR", num_args = 1.., env = "COLIBRI_MIRROR", help_heading = "Drives")]
    pub mirror: Vec<PathBuf>,
    /// Ratio of reads from the model's drive and each mirror, like 2,1
    ///
    /// The model's drive comes first. A drive with weight 0 serves a read only when no other copy is left. By default
    /// each drive serves as much as it is fast.
    #[arg(
        long,
        value_name = "W,W,...",
        requires = "mirror",
        hide_short_help = true,
        help_heading = "Drives"
    )]
    pub mirror_weights: Option<Weights>,
    /// I/O engine for expert reads: auto, uring or pread
    #[arg(
        long,
        value_enum,
        default_value = "auto",
        hide_short_help = true,
        help_heading = "Drives"
    )]
    pub engine: EngineArg,
    /// Bypass the page cache with O_DIRECT: auto, on or off
    #[arg(
        long,
        value_enum,
        default_value = "auto",
        hide_short_help = true,
        help_heading = "Drives"
    )]
    pub direct: DirectArg,
    /// Experts of the next layer to prefetch
    #[arg(
        long,
        value_name = "auto|off|K",
        default_value = "auto",
        help_heading = "Drives"
    )]
    pub lookahead: LookaheadArg,
}

/// Selects how many tokens a command drafts. Drafts change no token.
#[derive(Debug, Args)]
pub struct DraftArgs {
    /// Tokens to draft per pass with the prediction layer
    ///
    /// The layer is for multi-token prediction (MTP). The next pass verifies the drafts, so they change speed and not the text. auto drafts as many as pay.
    #[arg(
        long,
        value_name = "auto|off|N",
        default_value = "auto",
        help_heading = "Model"
    )]
    pub mtp: MtpArg,
}

impl ModelArgs {
    /// The options of the model, without drafts and progress.
    pub fn model_options(&self) -> Result<ModelOptions, WrongUsage> {
        check_mirrors(&self.mirror)?;
        let weights = weights(self.mirror_weights.as_ref(), &self.mirror)?;
        Ok(ModelOptions {
            more_dirs: self.model[1..].to_vec(),
            mirrors: self.mirror.clone(),
            mirror_weights: weights.map(<[u32]>::to_vec),
            engine: self.engine.into(),
            direct: self.direct.into(),
            threads: self.threads.map(usize::from),
            dsa: self.dsa == DsaArg::On,
            dense: self.dense_bits.map(Packing::from),
            round_experts: self.expert_bits.map(Packing::from),
            activations: self.activations.into(),
            ..ModelOptions::default()
        })
    }

    /// The options of a run over `context` tokens, of which `prompt` come at once.
    pub fn run_options(&self, context: usize, prompt: usize) -> RunOptions {
        RunOptions {
            context: Some(context),
            prompt: Some(prompt),
            slice: self.prefill_slice.map_or(usize::MAX, |n| n as usize),
            ram: self.ram.map(|size| size.0),
            cache_slots: self.cache_slots,
            lookahead: self.lookahead.into(),
            usage: !self.no_usage,
            pin_share: self.pin_share,
            ..RunOptions::default()
        }
    }
}
