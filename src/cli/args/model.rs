//! Arguments that several commands share.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::bail;
use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum};
use colibri_ring::{DirectMode, EngineKind};
use colibri_uring::model::draft;
use colibri_uring::quant::Activations;
use colibri_uring::quant::encode::Packing;
use colibri_uring::runtime::{ModelOptions, RunOptions};
use colibri_uring::shards::MAX_MIRRORS;
use colibri_uring::stream::Lookahead;

use crate::cli::args::WrongUsage;
use crate::cli::args::explicit_flags::ExplicitFlags;
use crate::cli::args::size::Size;
use crate::cli::output::pluralize::pluralize;

/// Which model, and how it is run. But for `--dsa`, `--dense-bits`, `--expert-bits` and `--activations`, none of it changes a number that the model computes.
#[derive(Debug, Args)]
pub struct ModelArgs {
    #[command(flatten)]
    pub given: ExplicitFlags,
    /// Directory with config.json and *.safetensors; give it several times for a model split over drives [default: the demo
    /// model that ships with the program]
    #[arg(long, value_name = "DIR", num_args = 1.., env = "COLIBRI_MODEL")]
    pub model: Vec<PathBuf>,
    /// Whether `model` is the demo model.
    #[arg(skip)]
    pub demo: bool,
    /// Directory on another drive with copies of the model's files, read beside them; up to 4 times
    #[arg(long, value_name = "DIR", num_args = 1.., env = "COLIBRI_MIRROR")]
    pub mirror: Vec<PathBuf>,
    /// In what ratio to read from the model's drive and the mirrors, like 2,1 (the model's first); 0 reads from one only when
    /// no other copy is left [default: from each as fast as it is]
    #[arg(
        long,
        value_name = "W,W,...",
        requires = "mirror",
        env = "COLIBRI_MIRROR_WEIGHTS"
    )]
    pub mirror_weights: Option<Weights>,
    /// Memory for everything, like 24GiB [default: what is available]
    #[arg(long, value_name = "SIZE", value_parser = crate::cli::args::size::memory, env = "COLIBRI_RAM")]
    pub ram: Option<Size>,
    /// Expert slabs for each MoE layer; 0 is the minimum, top_k + 1 in all [default: as many as fit]
    #[arg(long, value_name = "N", env = "COLIBRI_CACHE_SLOTS")]
    pub cache_slots: Option<u64>,
    /// What reads the experts
    #[arg(long, value_enum, default_value = "auto", env = "COLIBRI_ENGINE")]
    pub engine: EngineArg,
    /// Whether to read around the page cache (O_DIRECT)
    #[arg(long, value_enum, default_value = "auto", env = "COLIBRI_DIRECT")]
    pub direct: DirectArg,
    /// How many experts of the next layer to read ahead: auto, off or a number
    #[arg(
        long,
        value_name = "auto|off|K",
        default_value = "auto",
        env = "COLIBRI_LOOKAHEAD"
    )]
    pub lookahead: LookaheadArg,
    /// How many tokens of a prompt go through each layer at once at most [default: as many as memory allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), env = "COLIBRI_PREFILL_SLICE")]
    pub prefill_slice: Option<u32>,
    /// Compute threads [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), env = "COLIBRI_THREADS")]
    pub threads: Option<u16>,
    /// Share of the slabs, like 0.25 or 25%, in which the experts that earlier runs used most stay from the start
    #[arg(long, value_name = "SHARE", default_value = "25%", value_parser = share, env = "COLIBRI_PIN_SHARE")]
    pub pin_share: f64,
    /// Neither read nor write .coli_usage in the model's first directory, which says what earlier runs used
    #[arg(long, env = "COLIBRI_NO_USAGE", value_parser = FalseyValueParser::new())]
    pub no_usage: bool,
    /// Quantise float and FP8 weights that stay in memory as they are loaded: 8 is int8, 4 is int4-g64, 2 is int2; the
    /// embedding and the head become int8 [default: as they are stored]
    #[arg(long, value_name = "8|4|2", value_enum, env = "COLIBRI_DENSE_BITS")]
    pub dense_bits: Option<Bits>,
    /// Quantise float and FP8 experts each time they are computed, to hear what the model would say if it were converted:
    /// 8 is int8, 4 is int4-g64, 2 is int2. Slow, and reads as much: `convert` makes a container that is fast [default: as they
    /// are stored]
    #[arg(long, value_name = "8|4|2", value_enum, env = "COLIBRI_EXPERT_BITS")]
    pub expert_bits: Option<Bits>,
    /// How packed weights (int8, int4, int2) are multiplied: exact keeps activations as f32, int8 rounds them and multiplies
    /// integers, which is faster where arithmetic is the limit; routers, the indexer and the head stay exact
    #[arg(long, value_enum, default_value = "exact", env = "COLIBRI_ACTIVATIONS")]
    pub activations: ActivationsArg,
    /// Sparse attention where the model has an indexer; off attends everything
    #[arg(long, value_enum, default_value = "on", env = "COLIBRI_DSA")]
    pub dsa: DsaArg,
}

impl ModelArgs {
    /// The options that hold for a model, without drafts and progress.
    pub fn model_options(&self) -> Result<ModelOptions, WrongUsage> {
        check_mirrors(&self.mirror)?;
        let weights = weights(&self.given, self.mirror_weights.as_ref(), &self.mirror)?;
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

    /// The options of a run over `context` tokens, `prompt` of which come at once.
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

/// Fails where a model's directory is none, or the first holds nothing of a model.
pub fn check_model(dirs: &[PathBuf]) -> anyhow::Result<()> {
    for (i, dir) in dirs.iter().enumerate() {
        let why = match fs::metadata(dir) {
            Ok(found) if found.is_dir() && (i > 0 || holds_a_part(dir)) => continue,
            Ok(found) if found.is_dir() => "it holds no part of a model".to_owned(),
            Ok(_) => "it is no directory".to_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => "there is none".to_owned(),
            Err(error) => error.to_string(),
        };
        bail!(
            "cannot open the model directory {}: {why}; expected is one with config.json, *.safetensors and, for text, tokenizer.json",
            dir.display()
        );
    }
    Ok(())
}

/// Whether config.json or a shard is there; true also where that cannot be found out, for others to say why.
fn holds_a_part(dir: &Path) -> bool {
    fs::read_dir(dir).map_or(true, |mut entries| {
        entries.any(|entry| {
            entry.map_or(true, |entry| {
                let name = entry.file_name();
                name == "config.json" || name.as_bytes().ends_with(b".safetensors")
            })
        })
    })
}

/// Fails when more mirrors are given than a model may have.
pub fn check_mirrors(mirrors: &[PathBuf]) -> Result<(), WrongUsage> {
    match mirrors.len() {
        0..=MAX_MIRRORS => Ok(()),
        given => Err(WrongUsage(format!(
            "--mirror is given {given} times, at most {MAX_MIRRORS} are possible"
        ))),
    }
}

/// The weights of `--mirror-weights`. Fails when there is not one for the model and for each mirror; those of the variable are left out
/// then, as it may be meant for others.
pub fn weights<'a>(
    given: &ExplicitFlags,
    weights: Option<&'a Weights>,
    mirrors: &[PathBuf],
) -> Result<Option<&'a [u32]>, WrongUsage> {
    let Some(Weights(weights)) = weights else {
        return Ok(None);
    };
    let drives = mirrors.len() + 1;
    if weights.len() == drives {
        return Ok(Some(weights));
    }
    match given.has("mirror_weights") {
        false => Ok(None),
        true => Err(WrongUsage(format!(
            "--mirror-weights has {}, and there are {}: the model's and {} of mirrors",
            pluralize(weights.len(), "weight"),
            pluralize(drives, "drive"),
            mirrors.len()
        ))),
    }
}

/// `--mirror-weights`: whole numbers, not all 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights(pub Vec<u32>);

impl FromStr for Weights {
    type Err = String;

    fn from_str(text: &str) -> Result<Weights, String> {
        let weights = (text.split(','))
            .map(|weight| {
                weight
                    .trim()
                    .parse()
                    .map_err(|_| format!("{weight:?} is no weight: they are whole numbers"))
            })
            .collect::<Result<Vec<u32>, _>>()?;
        if weights.iter().all(|weight| *weight == 0) {
            return Err("a drive has to have a weight above 0".to_owned());
        }
        Ok(Weights(weights))
    }
}

/// `--engine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineArg {
    /// io_uring where the kernel allows it, else pread
    Auto,
    /// io_uring, or fail
    Uring,
    /// pread on worker threads
    Pread,
}

/// `--direct`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DirectArg {
    /// O_DIRECT for the files that support it
    Auto,
    /// O_DIRECT for all files, or fail
    On,
    /// Read through the page cache, and drop what was read
    Off,
}

impl From<EngineArg> for EngineKind {
    fn from(arg: EngineArg) -> EngineKind {
        match arg {
            EngineArg::Auto => EngineKind::Auto,
            EngineArg::Uring => EngineKind::Uring,
            EngineArg::Pread => EngineKind::Pread,
        }
    }
}

impl From<DirectArg> for DirectMode {
    fn from(arg: DirectArg) -> DirectMode {
        match arg {
            DirectArg::Auto => DirectMode::Auto,
            DirectArg::On => DirectMode::On,
            DirectArg::Off => DirectMode::Off,
        }
    }
}

/// A share from 0 to 1, also as a percentage.
fn share(text: &str) -> Result<f64, String> {
    let (number, unit) = match text.strip_suffix('%') {
        Some(number) => (number, 0.01),
        None => (text, 1.0),
    };
    match number.trim().parse::<f64>() {
        Ok(n) if (0.0..=1.0).contains(&(n * unit)) => Ok(n * unit),
        _ => Err("a share is from 0 to 1, or from 0% to 100%".to_owned()),
    }
}

/// A time in seconds that is worth measuring for.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.05..=86_400.0).contains(&s) => Ok(s),
        _ => Err("a time is a number of seconds from 0.05 to 86400".to_owned()),
    }
}

/// `--dense-bits` and `--expert-bits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Bits {
    /// One scale a row
    #[value(name = "8")]
    Eight,
    /// One scale for 64 columns
    #[value(name = "4")]
    Four,
    /// One scale a row
    #[value(name = "2")]
    Two,
}

impl From<Bits> for Packing {
    fn from(bits: Bits) -> Packing {
        match bits {
            Bits::Eight => Packing::Int8,
            Bits::Four => Packing::Int4Group(64),
            Bits::Two => Packing::Int2,
        }
    }
}

/// `--activations`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ActivationsArg {
    /// f32
    Exact,
    /// Rounded to int8, with one scale for 64 columns
    Int8,
}

impl From<ActivationsArg> for Activations {
    fn from(arg: ActivationsArg) -> Activations {
        match arg {
            ActivationsArg::Exact => Activations::Exact,
            ActivationsArg::Int8 => Activations::Int8,
        }
    }
}

/// `--dsa`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DsaArg {
    /// As the config says
    On,
    /// Dense attention
    Off,
}

/// `--lookahead`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookaheadArg {
    /// As many as pay for themselves.
    Auto,
    /// None.
    Off,
    /// This many.
    Experts(u32),
}

impl From<LookaheadArg> for Lookahead {
    fn from(arg: LookaheadArg) -> Lookahead {
        match arg {
            LookaheadArg::Auto => Lookahead::Auto,
            LookaheadArg::Off => Lookahead::Off,
            LookaheadArg::Experts(n) => Lookahead::Experts(n as usize),
        }
    }
}

impl FromStr for LookaheadArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<LookaheadArg, Self::Err> {
        match text {
            "auto" => Ok(LookaheadArg::Auto),
            "off" | "0" => Ok(LookaheadArg::Off),
            _ => text
                .parse()
                .map(LookaheadArg::Experts)
                .map_err(|_| "neither auto, off nor a number of experts"),
        }
    }
}

/// How a command that continues a text drafts it. Drafts change no token.
#[derive(Debug, Args)]
pub struct DraftArgs {
    /// How many tokens the model's prediction layer (MTP) drafts for each pass, which verifies them: auto (as many as pay), off or a number
    #[arg(
        long,
        value_name = "auto|off|N",
        default_value = "auto",
        env = "COLIBRI_MTP"
    )]
    pub mtp: MtpArg,
}

/// `--mtp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MtpArg(pub draft::Mode);

impl FromStr for MtpArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<MtpArg, Self::Err> {
        /// More never come true.
        const MOST: usize = 16;
        let mode = match text {
            "auto" => draft::Mode::Auto,
            "off" | "0" => draft::Mode::Off,
            _ => match text.parse() {
                Ok(n) if n <= MOST => draft::Mode::Drafts(n),
                _ => return Err("neither auto, off nor a number of drafts up to 16"),
            },
        };
        Ok(MtpArg(mode))
    }
}

/// Token ids separated by white space, or by one comma each with or without white space, like `3,14,159`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ids(pub Vec<u32>);

impl FromStr for Ids {
    type Err = String;

    fn from_str(text: &str) -> Result<Ids, String> {
        let mut ids = Vec::new();
        if text.trim().is_empty() {
            return Err("no token id".to_owned());
        }
        for part in text.split(',') {
            if part.trim().is_empty() {
                return Err(format!("token id {} is missing", ids.len() + 1));
            }
            for id in part.split_whitespace() {
                let parsed = id.parse();
                let at = ids.len() + 1;
                ids.push(parsed.map_err(|_| format!("{id:?} is no token id (number {at})"))?);
            }
        }
        Ok(Ids(ids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_separated_by_commas_or_space() {
        assert_eq!("3,14,159".parse(), Ok(Ids(vec![3, 14, 159])));
        assert_eq!(" 3, 14\n159 ".parse(), Ok(Ids(vec![3, 14, 159])));
        assert_eq!("3,\n14 159".parse(), Ok(Ids(vec![3, 14, 159])));
        for (text, why) in [
            ("", "no token id"),
            (" \n", "no token id"),
            (",", "token id 1 is missing"),
            ("1,,2", "token id 2 is missing"),
            ("1 2, ,3", "token id 3 is missing"),
            ("1,2,", "token id 3 is missing"),
            (",1", "token id 1 is missing"),
            ("3,x", "\"x\" is no token id (number 2)"),
            ("-1", "\"-1\" is no token id (number 1)"),
            ("4294967296", "\"4294967296\" is no token id (number 1)"),
            ("3 1.5", "\"1.5\" is no token id (number 2)"),
        ] {
            assert_eq!(text.parse::<Ids>(), Err(why.to_owned()), "{text:?}");
        }
    }

    #[test]
    fn shares_are_fractions_or_percentages() {
        for (text, expected) in [
            ("0", 0.0),
            ("0.25", 0.25),
            ("25%", 0.25),
            ("100%", 1.0),
            ("1", 1.0),
        ] {
            assert_eq!(share(text), Ok(expected), "{text}");
        }
        for text in ["", "%", "-0.1", "1.5", "101%", "nan", "half"] {
            assert!(share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn weights_are_whole_numbers_not_all_zero() {
        assert_eq!("2,0, 1".parse(), Ok(Weights(vec![2, 0, 1])));
        for text in ["", "0", "0,0", "1,", "1.5,1", "-1,2", "4294967296,1"] {
            assert!(text.parse::<Weights>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn drafts_are_auto_off_or_a_number() {
        for (text, mode) in [
            ("auto", draft::Mode::Auto),
            ("off", draft::Mode::Off),
            ("0", draft::Mode::Off),
            ("3", draft::Mode::Drafts(3)),
        ] {
            assert_eq!(text.parse(), Ok(MtpArg(mode)));
        }
        for text in ["", "17", "-1", "on", "1.5"] {
            assert!(text.parse::<MtpArg>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn lookahead_is_auto_off_or_a_number() {
        assert_eq!("auto".parse(), Ok(LookaheadArg::Auto));
        assert_eq!("0".parse(), Ok(LookaheadArg::Off));
        assert_eq!("6".parse(), Ok(LookaheadArg::Experts(6)));
        assert!("some".parse::<LookaheadArg>().is_err());
    }
}
