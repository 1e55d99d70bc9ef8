//! `mirror`: what copies of a model on several drives are worth, and whether they are copies.

use std::process::ExitCode;

use clap::{Args, Subcommand};

mod bench;
mod verify;

/// Measure and check copies of a model on several drives
#[derive(Debug, Args)]
pub struct MirrorArgs {
    #[command(subcommand)]
    command: MirrorCommand,
}

#[derive(Debug, Subcommand)]
enum MirrorCommand {
    Bench(bench::BenchArgs),
    Verify(verify::VerifyArgs),
}

/// Runs the subcommand.
pub fn run(args: &MirrorArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        MirrorCommand::Bench(args) => bench::run(args),
        MirrorCommand::Verify(args) => verify::run(args),
    }
}
