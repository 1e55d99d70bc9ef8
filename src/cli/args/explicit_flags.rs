//! Which flags are on the command line, and not from a variable.

use std::collections::HashSet;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};

/// The flags that are given. To be flattened into a command's arguments as the first of them: what stands before it is taken from the matches
/// already.
#[derive(Clone, Debug, Default)]
pub struct ExplicitFlags(HashSet<String>);

impl ExplicitFlags {
    /// Whether the flag of this field is given.
    pub fn has(&self, field: &str) -> bool {
        self.0.contains(field)
    }
}

impl FromArgMatches for ExplicitFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<ExplicitFlags, clap::Error> {
        let ids = matches.ids().map(clap::Id::as_str);
        let given = ids.filter(|id| matches.value_source(id) == Some(ValueSource::CommandLine));
        Ok(ExplicitFlags(given.map(str::to_owned).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = ExplicitFlags::from_arg_matches(matches)?;
        Ok(())
    }
}

/// It has no argument of its own.
impl Args for ExplicitFlags {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}
