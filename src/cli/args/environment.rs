//! Environment variables stand for flags, and give way: one that does not go with what is on the command line is as if it were not set, and so is
//! one with a value that only a flag of another command takes.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};

use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, FromArgMatches};

/// What was on the command line.
#[derive(Debug)]
pub struct Parsed<C> {
    /// All of it.
    pub args: C,
    /// The command that is used, the innermost one.
    pub used: Command,
    /// Variables that it would read, were their values not for other commands.
    foreign: Vec<String>,
}

impl<C> Parsed<C> {
    /// Says which variables are left out though nothing is given in their place.
    pub fn warn(&self) {
        for name in &self.foreign {
            tracing::warn!(
                "{name} has a value that `{}` does not take, and another command does: it counts as not set",
                self.used.get_name()
            );
        }
    }
}

/// Parses `args`, the program's name first.
///
/// # Errors
/// Wrong usage, or help that was asked for.
pub fn parse<C: FromArgMatches>(
    command: Command,
    args: Vec<OsString>,
) -> Result<Parsed<C>, clap::Error> {
    let mut all = command.clone();
    let (matches, mut command) = matches(without_foreign(command, &all), &args)?;
    let args = C::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    let (mut matches, root) = (&matches, all.clone());
    while let Some((name, inner)) = matches.subcommand() {
        let inside = |command: &Command| command.find_subcommand(name).cloned();
        let (Some(used), Some(unchanged)) = (inside(&command), inside(&all)) else {
            break;
        };
        (command, all, matches) = (used, unchanged, inner);
    }
    let unread = (all.get_arguments())
        .filter(|arg| is_foreign(arg, &root))
        .filter(|arg| {
            matches.value_source(arg.get_id().as_str()) != Some(ValueSource::CommandLine)
        });
    let foreign = unread.filter_map(|arg| Some(arg.get_env()?.to_str()?.to_owned()));
    Ok(Parsed {
        args,
        foreign: foreign.collect(),
        used: command,
    })
}

/// The command, no argument of which reads a variable with a value that is for another command.
fn without_foreign(command: Command, all: &Command) -> Command {
    let keep = |arg: Arg| match is_foreign(&arg, all) {
        true => arg.env(Resettable::Reset),
        false => arg,
    };
    command
        .mut_args(keep)
        .mut_subcommands(|command| without_foreign(command, all))
}

/// Whether an argument does not take the value of its variable, and one of another command in `all` does.
fn is_foreign(arg: &Arg, all: &Command) -> bool {
    fn is_taken(name: &OsStr, value: &OsStr, command: &Command) -> bool {
        let mut args = command.get_arguments();
        args.any(|arg| arg.get_env() == Some(name) && takes(arg, value))
            || (command.get_subcommands()).any(|command| is_taken(name, value, command))
    }
    let Some(name) = arg.get_env() else {
        return false;
    };
    let value = std::env::var_os(name);
    value.is_some_and(|value| !takes(arg, &value) && is_taken(name, &value, all))
}

/// Whether a value can be one of an argument. Switches take any.
fn takes(arg: &Arg, value: &OsStr) -> bool {
    if !arg.get_action().takes_values() {
        return true;
    }
    let mut alone = Arg::new("value")
        .long("value")
        .value_parser(arg.get_value_parser().clone());
    if let Some(delimiter) = arg.get_value_delimiter() {
        alone = alone.value_delimiter(delimiter);
    }
    let mut given = OsString::from("--value=");
    given.push(value);
    let command = Command::new("value").no_binary_name(true).arg(alone);
    command.try_get_matches_from([given]).is_ok()
}

/// Parses with as many variables as go with the arguments.
fn matches(command: Command, args: &[OsString]) -> Result<(ArgMatches, Command), clap::Error> {
    let known = variables(&command);
    let with = |used: &HashSet<&str>| {
        let others = known.iter().map(String::as_str);
        let others = others.filter(|name| !used.contains(name)).collect();
        let mut command = without_variables(command.clone(), &others);
        let matches = command.try_get_matches_from_mut(args)?;
        Ok((matches, command))
    };
    let mut used: HashSet<&str> = known.iter().map(String::as_str).collect();
    let all = with(&used);
    if !all.as_ref().is_err_and(is_misfit) {
        return all;
    }
    // One after the other, again and again: one that needs another may go only when that one is used.
    let lacking = |used: &HashSet<&str>| match with(used) {
        Ok(_) => Some(Vec::new()),
        Err(error) if error.kind() == ErrorKind::ArgumentConflict => None,
        Err(error) => Some(missing(&error)),
    };
    used.clear();
    let mut lacks = lacking(&used);
    let mut grows = true;
    while std::mem::take(&mut grows) {
        for name in &known {
            if !used.insert(name) {
                continue;
            }
            match (lacking(&used), &lacks) {
                (Some(now), Some(before)) if now.iter().all(|arg| before.contains(arg)) => {
                    (lacks, grows) = (Some(now), true);
                }
                _ => {
                    used.remove(name.as_str());
                }
            }
        }
    }
    with(&used)
}

/// Whether arguments do not go together, or one is missing.
fn is_misfit(error: &clap::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ArgumentConflict | ErrorKind::MissingRequiredArgument
    )
}

/// The arguments that an error says are missing.
fn missing(error: &clap::Error) -> Vec<String> {
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::Strings(names))
            if error.kind() == ErrorKind::MissingRequiredArgument =>
        {
            names.clone()
        }
        _ => Vec::new(),
    }
}

/// The variables that are set and that an argument of the command, or of one below it, reads; in their order.
fn variables(command: &Command) -> Vec<String> {
    let own = command.get_arguments().filter_map(|arg| arg.get_env());
    let mut names: Vec<String> = own
        .filter(|name| std::env::var_os(name).is_some())
        .filter_map(|name| name.to_str().map(str::to_owned))
        .collect();
    names.extend(command.get_subcommands().flat_map(variables));
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
    names
}

/// The command, which does not read these variables.
fn without_variables(command: Command, unread: &HashSet<&str>) -> Command {
    let keep = |arg: clap::Arg| {
        let name = arg.get_env().and_then(|name| name.to_str());
        match name.is_some_and(|name| unread.contains(name)) {
            true => arg.env(Resettable::Reset),
            false => arg,
        }
    };
    command
        .mut_args(keep)
        .mut_subcommands(|command| without_variables(command, unread))
}

#[cfg(test)]
mod tests {
    use clap::{Args, Parser, Subcommand};

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(subcommand)]
        command: Sub,
    }

    #[derive(Debug, Subcommand)]
    enum Sub {
        Go(Go),
    }

    #[derive(Debug, Args)]
    #[command(group(clap::ArgGroup::new("input").args(["left", "right"])))]
    struct Go {
        // Variables that the environment of a test has.
        #[arg(long, env = "PATH")]
        left: Option<String>,
        #[arg(long)]
        right: Option<String>,
        #[arg(long, env = "CARGO_PKG_NAME", conflicts_with = "right")]
        up: Option<String>,
        #[arg(long, env = "CARGO_PKG_VERSION")]
        down: Option<String>,
        #[arg(long, env = "CARGO_MANIFEST_DIR", requires = "under")]
        over: Option<String>,
        #[arg(long)]
        under: Option<String>,
    }

    fn go(args: &[&str]) -> Result<Go, clap::error::ErrorKind> {
        use clap::CommandFactory;
        let args: Vec<OsString> = ["cli", "go"]
            .iter()
            .chain(args)
            .map(OsString::from)
            .collect();
        let parsed = parse::<Cli>(Cli::command(), args).map_err(|e| e.kind())?;
        assert_eq!(parsed.used.get_name(), "go");
        let Sub::Go(go) = parsed.args.command;
        Ok(go)
    }

    #[test]
    fn the_command_line_overrides_the_environment() {
        let go_on = go(&[]).unwrap();
        assert!(go_on.left.is_some() && go_on.up.is_some() && go_on.down.is_some());
        let go_on = go(&["--right", "r"]).unwrap();
        assert_eq!((go_on.left, go_on.up), (None, None));
        assert!(go_on.right.is_some() && go_on.down.is_some());
    }

    #[test]
    fn a_variable_that_needs_what_is_not_there_is_left_out() {
        assert_eq!(go(&[]).unwrap().over, None);
        assert!(go(&["--under", "u"]).unwrap().over.is_some());
        let both = go(&["--right", "r", "--under", "u"]).unwrap();
        assert!(both.left.is_none() && both.over.is_some());
    }

    #[test]
    fn two_flags_still_contradict() {
        let conflict = clap::error::ErrorKind::ArgumentConflict;
        assert_eq!(go(&["--right", "r", "--left", "l"]).unwrap_err(), conflict);
        assert_eq!(go(&["--right", "r", "--up", "u"]).unwrap_err(), conflict);
        let missing = clap::error::ErrorKind::MissingRequiredArgument;
        assert_eq!(go(&["--over", "o"]).unwrap_err(), missing);
        let unknown = clap::error::ErrorKind::UnknownArgument;
        assert_eq!(go(&["--right", "r", "--nonsense"]).unwrap_err(), unknown);
    }
}
