//! The command line: argument parsing and printing only, one file a subcommand.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory, Parser, Subcommand};

mod args;
mod commands;
mod interrupt;
mod output;

use args::{WrongUsage, environment};
use commands::{
    chat, convert, decode, demo, doctor, inspect, manual, mirror, plan, profile, score, simulate,
    synth,
};
use output::error::{is_closed_pipe, one_line};
use output::{printer, terminal};

/// Runs mixture-of-experts language models far larger than memory, their experts streamed from SSD through io_uring.
#[derive(Debug, Parser)]
#[command(name = "colibri-uring", version, max_term_width = 100)]
#[command(
    after_help = "Every flag also reads an environment variable: --cache-slots reads COLIBRI_CACHE_SLOTS, -n reads COLIBRI_N.\n\
                  A flag overrides its variable, and a variable that does not go with the flags counts as not set,\n\
                  as does one whose value only another command takes (COLIBRI_ENGINE=all is for profile).\n\
                  Several values are separated by commas (COLIBRI_BLOCK_SIZE=1MiB,4MiB, COLIBRI_QUEUE_DEPTH=4,8,\n\
                  COLIBRI_MIRROR_WEIGHTS=2,1); COLIBRI_MODEL, COLIBRI_MIRROR and COLIBRI_TEMPLATE_VAR hold one.\n\
                  A switch is off when its variable is empty, 0, no, false or off.\n\
                  Results go to stdout, everything else to stderr. Exit code 0: done, 1: failed, 2: usage, 130: interrupted.\n\
                  Without a command, the demo model that ships with the program writes a little."
)]
struct Cli {
    /// Say more on stderr: -v for what is done, -vv for details. RUST_LOG overrides it
    #[arg(short, long, global = true, action = ArgAction::Count, env = "COLIBRI_VERBOSE")]
    verbose: u8,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Decode(Box<decode::DecodeArgs>),
    Chat(Box<chat::ChatArgs>),
    Score(Box<score::ScoreArgs>),
    Profile(profile::ProfileArgs),
    Mirror(mirror::MirrorArgs),
    Simulate(simulate::SimulateArgs),
    Inspect(inspect::InspectArgs),
    Convert(convert::ConvertArgs),
    Doctor(doctor::DoctorArgs),
    Plan(Box<plan::PlanArgs>),
    Synth(synth::SynthArgs),
    Man(manual::ManArgs),
    Completions(manual::CompletionsArgs),
}

/// Parses the command line, runs the command and turns its outcome into an exit code.
pub fn main() -> ExitCode {
    let outcome = match environment::parse::<Cli>(command(), std::env::args_os().collect()) {
        Ok(parsed) => {
            log_to_stderr(parsed.args.verbose);
            parsed.warn();
            let outcome = match parsed.args.command {
                Some(command) => run(command),
                None => demonstrate(),
            };
            interrupt::leave_the_end_to_signals();
            outcome.or_else(|error| with_usage(error, parsed.used))
        }
        Err(error) => show(&error),
    };
    match outcome {
        Ok(code) => code,
        // The reader has seen enough (`| head -1`): not our failure, and nobody to tell.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Not `eprintln!`, which panics when stderr is full or closed; the exit code still tells.
            let _ = writeln!(io::stderr(), "error: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// Runs a command, with the demo model if it has none.
fn run(mut command: Command) -> anyhow::Result<ExitCode> {
    let _demo = demo::provide(&mut command)?;
    match command {
        Command::Decode(args) => decode::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Score(args) => score::run(&args),
        Command::Profile(args) => profile::run(&args),
        Command::Mirror(args) => mirror::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Convert(args) => convert::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Man(args) => manual::man(&args),
        Command::Completions(args) => manual::completions(&args),
    }
}

/// What is run when no command is given: something to see, and what to do next.
fn demonstrate() -> anyhow::Result<ExitCode> {
    let args = ["colibri-uring", "decode"].map(Into::into).into();
    let mut command = match environment::parse::<Cli>(command(), args) {
        Ok(parsed) => {
            parsed.warn();
            parsed.args.command
        }
        Err(error) => return show(&error),
    };
    if let Some(Command::Decode(args)) = &mut command {
        args.demonstrate = true;
    }
    let outcome = command.map_or(Ok(ExitCode::SUCCESS), run)?;
    demo::hint();
    Ok(outcome)
}

/// The command line. What begins like a negative number is a value everywhere, so that whoever gives one is told what is possible.
fn command() -> clap::Command {
    fn with_numbers(command: clap::Command) -> clap::Command {
        let with_number = |arg: clap::Arg| match arg.get_action().takes_values() {
            true => arg.allow_negative_numbers(true),
            false => arg,
        };
        command.mut_args(with_number).mut_subcommands(with_numbers)
    }
    with_numbers(Cli::command())
}

/// Shows wrong usage of the command `used`; other errors stay.
fn with_usage(error: anyhow::Error, mut used: clap::Command) -> anyhow::Result<ExitCode> {
    match error.downcast_ref::<WrongUsage>() {
        Some(wrong) => show(&used.error(ErrorKind::ValueValidation, wrong)),
        None => Err(error),
    }
}

/// Shows what clap has to say: help on stdout, or wrong usage on stderr.
fn show(said: &clap::Error) -> anyhow::Result<ExitCode> {
    let written = said.print();
    if !said.use_stderr() {
        printer::to_stdout(|_| written)?;
    }
    Ok(u8::try_from(said.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from))
}

fn log_to_stderr(verbose: u8) {
    let level = ["warn", "info", "debug", "trace"][usize::from(verbose.min(3))];
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(terminal::styled(&io::stderr()))
        .with_target(false)
        .without_time()
        // Lines that cannot be written are lost; reporting that on the same stderr would panic.
        .log_internal_errors(false)
        .init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_reads_its_environment_variable() {
        let cli = Cli::command();
        let nested = cli
            .get_subcommands()
            .flat_map(clap::Command::get_subcommands);
        for command in cli.get_subcommands().chain(nested) {
            for arg in command.get_arguments().filter(|arg| !arg.is_positional()) {
                let name = arg
                    .get_long()
                    .map(str::to_owned)
                    .or(arg.get_short().map(String::from))
                    .unwrap();
                if ["help", "version"].contains(&name.as_str()) {
                    continue;
                }
                let expected = format!("COLIBRI_{}", name.replace('-', "_").to_uppercase());
                assert_eq!(
                    arg.get_env().and_then(|env| env.to_str()),
                    Some(&*expected),
                    "of {} {name}",
                    command.get_name()
                );
            }
        }
    }
}
