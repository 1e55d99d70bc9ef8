//! Parses the command line, runs the command and prints its result.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory, Parser, Subcommand};

mod args;
mod commands;
mod interrupt;
mod notify;
mod output;

use args::command_line;
use args::usage::WrongUsage;
use commands::{
    chat, convert, decode, demo, doctor, inspect, manual, mirror, plan, profile, score, serve,
    simulate, synth, tokenize,
};
use output::error::{LogWriter, is_closed_pipe, one_line};
use output::{printer, terminal};

/// Runs mixture-of-experts language models far larger than memory: streams their experts from SSD through io_uring
#[derive(Debug, Parser)]
#[command(name = "colibri-uring", version, max_term_width = 100)]
#[command(
    after_long_help = "Results go to stdout, everything else to stderr. Exit code 0: done, 1: failed, 2: wrong usage, 130: interrupted.\n\n\
                  These variables stand for their flags: COLIBRI_MODEL, COLIBRI_MIRROR, COLIBRI_RAM, COLIBRI_THREADS, COLIBRI_KV, \
                  COLIBRI_NO_KV, COLIBRI_NO_USAGE and COLIBRI_VERBOSE. Flags override variables; a conflicting variable is ignored. \
                  COLIBRI_NO_KV overrides COLIBRI_KV in chat.\n\n\
                  Without a command, the program continues a short text with the demo model that ships with it."
)]
struct Cli {
    /// Log more to stderr: -v for each step, -vv for details
    ///
    /// RUST_LOG overrides it.
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
    Tokenize(tokenize::TokenizeArgs),
    Detokenize(tokenize::DetokenizeArgs),
    Serve(Box<serve::ServeArgs>),
    Profile(profile::ProfileArgs),
    Mirror(mirror::MirrorArgs),
    Simulate(simulate::SimulateArgs),
    Inspect(inspect::InspectArgs),
    Convert(convert::ConvertArgs),
    Doctor(doctor::DoctorArgs),
    Plan(Box<plan::PlanArgs>),
    Synth(Box<synth::SynthArgs>),
    Man(manual::ManArgs),
    Completions(manual::CompletionsArgs),
}

impl Command {
    /// The directories of the model, for commands that run the demo model by default.
    fn model(&mut self) -> Option<&mut Vec<PathBuf>> {
        match self {
            Command::Decode(args) => Some(&mut args.model.model),
            Command::Chat(args) => Some(&mut args.model.model),
            Command::Score(args) => Some(&mut args.model.model),
            Command::Tokenize(args) => Some(&mut args.model),
            Command::Detokenize(args) => Some(&mut args.model),
            Command::Serve(args) => Some(&mut args.model.model),
            Command::Plan(args) => Some(&mut args.model.model),
            Command::Simulate(args) => Some(&mut args.model),
            Command::Inspect(args) => Some(&mut args.model),
            Command::Profile(args) if args.file.is_none() => Some(&mut args.model),
            _ => None,
        }
    }
}

/// Parses the command line, runs the command and returns the exit code.
pub fn main() -> ExitCode {
    interrupt::fail_oversized_writes();
    let args: Vec<OsString> = std::env::args_os().collect();
    let outcome = match command_line::parse::<Cli>(&args) {
        Ok(parsed) => {
            log_to_stderr(parsed.args.verbose, parsed.args.command.as_ref());
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
        // The reader closed the pipe (`| head -1`): not a failure.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Not `eprintln!`, which panics if stderr is full or closed. The exit code still tells.
            let _ = writeln!(io::stderr(), "error: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// Runs a command, with the demo model if it needs a model and has none.
fn run(mut command: Command) -> anyhow::Result<ExitCode> {
    let demo = command.model().map(demo::provide).transpose()?.flatten();
    match &mut command {
        Command::Decode(args) => args.model.demo = demo.is_some(),
        Command::Chat(args) => args.model.demo = demo.is_some(),
        Command::Serve(args) => args.model.demo = demo.is_some(),
        _ => {}
    }
    match command {
        Command::Decode(args) => decode::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Score(args) => score::run(&args),
        Command::Tokenize(args) => tokenize::tokenize(&args),
        Command::Detokenize(args) => tokenize::detokenize(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Profile(args) => profile::run(&args),
        Command::Mirror(args) => mirror::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Convert(args) => convert::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Man(args) => manual::man(&args, Cli::command()),
        Command::Completions(args) => manual::completions(&args, Cli::command()),
    }
}

/// Runs without a command: decodes with the demo model's prompt, then suggests what to type next.
fn demonstrate() -> anyhow::Result<ExitCode> {
    let args = ["colibri-uring", "decode"].map(Into::into);
    let mut command = match command_line::parse::<Cli>(&args) {
        Ok(parsed) => parsed.args.command,
        Err(error) => return show(&error),
    };
    if let Some(Command::Decode(args)) = &mut command {
        args.demonstrate = true;
    }
    let outcome = command.map_or(Ok(ExitCode::SUCCESS), run)?;
    demo::hint();
    Ok(outcome)
}

/// Prints `WrongUsage` with the usage of the command `used`; returns other errors.
fn with_usage(error: anyhow::Error, mut used: clap::Command) -> anyhow::Result<ExitCode> {
    match error.downcast_ref::<WrongUsage>() {
        Some(wrong) => show(&used.error(ErrorKind::ValueValidation, wrong)),
        None => Err(error),
    }
}

/// Prints clap's help to stdout, or its error to stderr.
fn show(said: &clap::Error) -> anyhow::Result<ExitCode> {
    let written = said.print();
    if !said.use_stderr() {
        printer::to_stdout(|_| written)?;
    }
    Ok(u8::try_from(said.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// A server also logs a line for each request, with the time.
fn log_to_stderr(verbose: u8, command: Option<&Command>) {
    let server = match command {
        Some(Command::Serve(args)) => Some(args.log_json),
        _ => None,
    };
    let level = usize::from(verbose) + usize::from(server.is_some());
    let level = ["warn", "info", "debug", "trace"][level.min(3)];
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| LogWriter)
        .with_ansi(terminal::styled(&io::stderr()))
        .with_target(false)
        // Reporting a failed write to the same stderr would panic.
        .log_internal_errors(false);
    match server {
        None => log.without_time().init(),
        Some(false) => log.init(),
        Some(true) => log.json().flatten_event(true).init(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use clap_complete::Shell;
    use clap_mangen::Man;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    fn commands() -> Vec<clap::Command> {
        let mut command = Cli::command();
        command.build();
        manual::pages(command)
    }

    #[test]
    fn every_page_names_every_flag() {
        for command in commands() {
            let mut page = Vec::new();
            Man::new(command.clone()).render(&mut page).unwrap();
            let page = String::from_utf8(page).unwrap().replace("\\-", "-");
            assert!(page.contains(".TH "), "{}", command.get_name());
            for long in command.get_arguments().filter_map(|arg| arg.get_long()) {
                assert!(
                    page.contains(&format!("--{long}")),
                    "{} --{long}",
                    command.get_name()
                );
            }
        }
    }

    #[test]
    fn completions_know_every_flag() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "colibri-uring", &mut script);
            let script = String::from_utf8(script).unwrap();
            for command in commands() {
                for long in command.get_arguments().filter_map(|arg| arg.get_long()) {
                    assert!(
                        script.contains(long),
                        "{shell}: {} {long}",
                        command.get_name()
                    );
                }
            }
        }
    }

    #[test]
    fn every_command_that_does_something_has_examples() {
        let leaves = commands().into_iter().filter(|c| !c.has_subcommands());
        for command in leaves {
            let help = command.get_after_long_help().map(ToString::to_string);
            let help = help.unwrap_or_default();
            assert!(help.contains("Example"), "{}", command.get_name());
            assert!(help.contains("colibri-uring "), "{}", command.get_name());
        }
    }
}
