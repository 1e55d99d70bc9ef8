//! Environment variables stand for flags, and give way to what is on the command line: a variable that contradicts a flag is as if it were
//! not set.

use std::collections::HashSet;
use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches};

/// Parses `args`, the program's name first. Ends the program as clap does when they are wrong.
pub fn parse<C: FromArgMatches>(command: Command, args: Vec<OsString>) -> C {
    let command = yielding(command, &args);
    let mut again = command.clone();
    let matches = command.get_matches_from(args);
    C::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut again).exit())
}

/// The command without the variables that contradict `args`.
fn yielding(command: Command, args: &[OsString]) -> Command {
    let mut first = without_environment(command.clone()).ignore_errors(true);
    first.build();
    // What is wrong with the arguments is for the real parsing to say.
    match first.clone().try_get_matches_from(args) {
        Ok(matches) => hide(command, &first, &matches),
        Err(_) => command,
    }
}

fn without_environment(command: Command) -> Command {
    let none = clap::builder::Resettable::Reset;
    command
        .mut_args(|arg| arg.env(none.clone()))
        .mut_subcommands(without_environment)
}

fn hide(command: Command, built: &Command, matches: &ArgMatches) -> Command {
    let given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let mut hidden = HashSet::new();
    let known = built
        .get_arguments()
        .filter(|arg| given_id(matches, arg.get_id().as_str()));
    for arg in known.filter(|arg| given(arg.get_id().as_str())) {
        // The library knows only those that the argument itself names.
        let others = built.get_arguments().filter(|other| {
            let named = built.get_arg_conflicts_with(other);
            named.iter().any(|named| named.get_id() == arg.get_id())
        });
        let named = built.get_arg_conflicts_with(arg).into_iter().chain(others);
        let mut contradicting: Vec<String> = named.map(|arg| arg.get_id().to_string()).collect();
        for group in built.get_groups() {
            let of_group: Vec<_> = group.get_args().collect();
            if !group.clone().is_multiple() && of_group.contains(&arg.get_id()) {
                contradicting.extend(of_group.iter().map(|id| id.to_string()));
            }
        }
        hidden.extend(contradicting);
    }
    let command = command.mut_args(|arg| match arg.get_id().as_str() {
        id if hidden.contains(id) && !(given_id(matches, id) && given(id)) => {
            arg.env(clap::builder::Resettable::Reset)
        }
        _ => arg,
    });
    match matches.subcommand() {
        Some((name, matches)) => {
            let Some(built) = built.find_subcommand(name) else {
                return command;
            };
            command.mut_subcommand(name, |command| hide(command, built, matches))
        }
        None => command,
    }
}

/// Whether the library can be asked about this argument: it panics about those that it does not know.
fn given_id(matches: &ArgMatches, id: &str) -> bool {
    matches.ids().any(|known| known == id)
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
        // Variables that every environment has.
        #[arg(long, env = "PATH")]
        left: Option<String>,
        #[arg(long)]
        right: Option<String>,
        #[arg(long, env = "PATH", conflicts_with = "right")]
        up: Option<String>,
        #[arg(long, env = "PATH")]
        down: Option<String>,
    }

    fn go(args: &[&str]) -> Result<Go, clap::error::ErrorKind> {
        use clap::CommandFactory;
        let args: Vec<OsString> = ["cli", "go"]
            .iter()
            .chain(args)
            .map(OsString::from)
            .collect();
        let command = yielding(Cli::command(), &args);
        let matches = command.try_get_matches_from(args).map_err(|e| e.kind())?;
        let Sub::Go(go) = Cli::from_arg_matches(&matches).unwrap().command;
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
    fn two_flags_still_contradict() {
        let conflict = clap::error::ErrorKind::ArgumentConflict;
        assert_eq!(go(&["--right", "r", "--left", "l"]).unwrap_err(), conflict);
        assert_eq!(go(&["--right", "r", "--up", "u"]).unwrap_err(), conflict);
        let unknown = clap::error::ErrorKind::UnknownArgument;
        assert_eq!(go(&["--right", "r", "--nonsense"]).unwrap_err(), unknown);
    }
}
