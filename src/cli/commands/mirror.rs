//! `mirror`: what copies of a model on several drives are worth, and whether they are copies.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::ensure;
use clap::builder::FalseyValueParser;
use clap::{Args, Subcommand};
use colibri_uring::shards::{Fault, Shards};

use crate::cli::args::explicit_flags::ExplicitFlags;
use crate::cli::args::model::{DirectArg, EngineArg, check_mirrors, check_model};

mod bench;
mod stage;
mod verify;

/// Make, measure and check copies of a model on several drives
#[derive(Debug, Args)]
pub struct MirrorArgs {
    #[command(subcommand)]
    command: MirrorCommand,
}

#[derive(Debug, Subcommand)]
enum MirrorCommand {
    Bench(bench::BenchArgs),
    Verify(verify::VerifyArgs),
    Stage(stage::StageArgs),
}

/// A model, its copies, and how they are read.
#[derive(Debug, Args)]
struct CopiesArgs {
    #[command(flatten)]
    given: ExplicitFlags,
    /// Directory with config.json and *.safetensors; give it several times for a model split over drives
    #[arg(long, value_name = "DIR", num_args = 1.., required = true, env = "COLIBRI_MODEL")]
    model: Vec<PathBuf>,
    /// Directory on another drive with copies of the model's files; up to 4 times
    #[arg(long, value_name = "DIR", num_args = 1.., required = true, env = "COLIBRI_MIRROR")]
    mirror: Vec<PathBuf>,
    /// What reads
    #[arg(long, value_enum, default_value = "auto", env = "COLIBRI_ENGINE")]
    engine: EngineArg,
    /// Whether to read around the page cache (O_DIRECT)
    #[arg(long, value_enum, default_value = "auto", env = "COLIBRI_DIRECT")]
    direct: DirectArg,
    /// Print one JSON object
    #[arg(long, env = "COLIBRI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

impl CopiesArgs {
    /// Opens the model with its copies. A mirror that is no directory is an error here: nobody asks about what is not there.
    fn open(&self) -> anyhow::Result<Shards> {
        check_mirrors(&self.mirror)?;
        check_model(&self.model)?;
        let shards = Shards::open_with(&self.model, &self.mirror, self.engine.into())?;
        for fault in shards.faults() {
            ensure!(matches!(fault, Fault::Files { .. }), "{fault}");
        }
        Ok(shards)
    }
}

/// Runs the subcommand.
pub fn run(args: &MirrorArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        MirrorCommand::Bench(args) => bench::run(args),
        MirrorCommand::Verify(args) => verify::run(args),
        MirrorCommand::Stage(args) => stage::run(args),
    }
}
