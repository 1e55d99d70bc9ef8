//! `mirror`: copies a model to other drives, checks the copies and measures them.

use std::process::ExitCode;

use clap::{Args, Subcommand};

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

pub fn run(args: &MirrorArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        MirrorCommand::Bench(args) => bench::run(args),
        MirrorCommand::Verify(args) => verify::run(args),
        MirrorCommand::Stage(args) => stage::run(args),
    }
}
