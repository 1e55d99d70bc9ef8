//! Parses the command line. Flags override environment variables; a conflicting variable is ignored. Of two variables that conflict,
//! the one of a `--no-` flag counts: what a user forbids is not done.

use std::ffi::OsString;

use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches};

/// A parsed command line.
#[derive(Debug)]
pub struct Parsed<C> {
    pub args: C,
    /// The innermost command, for errors that show its usage.
    pub used: Command,
}

/// Parses `args`, of which the first is the program's name.
///
/// # Errors
/// Wrong usage, or the help text that `args` ask for.
pub fn parse<C: CommandFactory + FromArgMatches>(
    args: &[OsString],
) -> Result<Parsed<C>, clap::Error> {
    let full = args.iter().any(|arg| arg == "--help" || arg == "help");
    let mut command = with_negative_numbers(C::command());
    if !full {
        command = one_screen(command, "");
    }
    let (matches, mut used) = without_conflicts(command, args)?;
    let args = C::from_arg_matches(&matches).map_err(|error| error.format(&mut used))?;
    let mut matches = &matches;
    while let Some((name, inner)) = matches.subcommand()
        && let Some(subcommand) = used.find_subcommand(name).cloned()
    {
        (used, matches) = (subcommand, inner);
    }
    Ok(Parsed { args, used })
}

/// Lets values begin with a minus, so that the error for `-1` names the values that are possible.
fn with_negative_numbers(command: Command) -> Command {
    let with_number = |arg: Arg| match arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    };
    command
        .mut_args(with_number)
        .mut_subcommands(with_negative_numbers)
}

/// Shortens `-h`: without variables, possible values and examples.
fn one_screen(command: Command, parent: &str) -> Command {
    let path = format!("{parent}{} ", command.get_name());
    command
        .after_help(format!("Details and examples: {path}--help"))
        .mut_args(|arg| {
            let takes_values = arg.get_action().takes_values();
            arg.hide_env(true).hide_possible_values(takes_values)
        })
        .mut_subcommands(|command| one_screen(command, &path))
}

/// Parses with all variables. If two arguments conflict, parses again without the variable of one of them.
fn without_conflicts(
    command: Command,
    args: &[OsString],
) -> Result<(ArgMatches, Command), clap::Error> {
    let attempt = |mut command: Command| -> Result<_, clap::Error> {
        let matches = command.try_get_matches_from_mut(args)?;
        Ok((matches, command))
    };
    let conflict = match attempt(command.clone()) {
        Err(error) if error.kind() == ErrorKind::ArgumentConflict => error,
        other => return other,
    };
    let mut names = conflicting(&conflict);
    names.sort_by_key(|name| name.starts_with("--no-"));
    let second = names
        .iter()
        .map(|name| attempt(without_variable(command.clone(), name)))
        .find(
            |result| !matches!(result, Err(error) if error.kind() == ErrorKind::ArgumentConflict),
        );
    second.unwrap_or(Err(conflict))
}

/// The arguments that an error names, like `--kv <FILE>`.
fn conflicting(error: &clap::Error) -> Vec<String> {
    [ContextKind::PriorArg, ContextKind::InvalidArg]
        .into_iter()
        .filter_map(|kind| error.get(kind))
        .flat_map(|value| match value {
            ContextValue::String(name) => vec![name.clone()],
            ContextValue::Strings(names) => names.clone(),
            _ => Vec::new(),
        })
        .collect()
}

fn without_variable(command: Command, name: &str) -> Command {
    let flag = name.split_whitespace().next().unwrap_or(name);
    let reset = |arg: Arg| match arg
        .get_long()
        .is_some_and(|long| flag == format!("--{long}"))
    {
        true => arg.env(Resettable::Reset),
        false => arg,
    };
    command
        .mut_args(reset)
        .mut_subcommands(|command| without_variable(command, name))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    // cargo sets these variables for every test.
    #[derive(Debug, Parser)]
    struct Cli {
        #[arg(long, env = "CARGO_PKG_NAME", conflicts_with = "right")]
        left: Option<String>,
        #[arg(long)]
        right: Option<String>,
        #[arg(long, env = "CARGO_PKG_VERSION")]
        down: Option<String>,
    }

    fn parsed(args: &[&str]) -> Result<Cli, ErrorKind> {
        let args: Vec<OsString> = ["cli"].iter().chain(args).map(OsString::from).collect();
        Ok(parse::<Cli>(&args).map_err(|error| error.kind())?.args)
    }

    #[test]
    fn flags_override_variables() {
        let cli = parsed(&["--down", "d"]).unwrap();
        assert_eq!(cli.down.as_deref(), Some("d"));
        assert!(cli.left.is_some());
    }

    #[test]
    fn a_conflicting_variable_is_ignored() {
        let cli = parsed(&["--right", "r"]).unwrap();
        assert!(cli.left.is_none() && cli.right.is_some() && cli.down.is_some());
    }

    #[test]
    fn two_flags_still_conflict() {
        let both = ["--right", "r", "--left", "l"];
        assert_eq!(parsed(&both).unwrap_err(), ErrorKind::ArgumentConflict);
        let unknown = ["--right", "r", "--nonsense"];
        assert_eq!(parsed(&unknown).unwrap_err(), ErrorKind::UnknownArgument);
    }
}
