//! Commands without `--model` use the model that ships with the program.

use std::io::{self, Write};
use std::path::PathBuf;

use colibri_uring::runtime::demo::Demo;

use crate::cli::args::model::check_model;
use crate::cli::{Command, interrupt};

/// Unpacks the demo model for a command that has no model, and says so. The model is there as long as the result. A model that is given
/// has to be one.
pub fn provide(command: &mut Command) -> anyhow::Result<Option<Demo>> {
    let Some(model) = model_of(command) else {
        return Ok(None);
    };
    if !model.is_empty() {
        check_model(model)?;
        return Ok(None);
    }
    let demo = Demo::open(|dir| {
        if let Err(error) = interrupt::remove_at_end(dir) {
            tracing::warn!("a signal would leave {}: {error}", dir.display());
        }
    })?;
    model.push(demo.dir().to_owned());
    match command {
        Command::Decode(args) => args.model.demo = true,
        Command::Chat(args) => args.model.demo = true,
        _ => {}
    }
    // Nobody to tell if stderr is closed.
    let _ = writeln!(
        io::stderr(),
        "no --model is given: this is the demo model, in {}",
        demo.dir().display()
    );
    Ok(Some(demo))
}

/// The directories of the model, of commands that have a use for any model.
fn model_of(command: &mut Command) -> Option<&mut Vec<PathBuf>> {
    match command {
        Command::Decode(args) => Some(&mut args.model.model),
        Command::Chat(args) => Some(&mut args.model.model),
        Command::Score(args) => Some(&mut args.model.model),
        Command::Plan(args) => Some(&mut args.model.model),
        Command::Simulate(args) => Some(&mut args.model),
        Command::Inspect(args) => Some(&mut args.model),
        Command::Profile(args) if args.file.is_none() => Some(&mut args.model),
        _ => None,
    }
}

/// What to do next, for somebody who has given no command.
pub fn hint() {
    let _ = writeln!(
        io::stderr(),
        "Next: colibri-uring decode --prompt \"The hummingbird\", or colibri-uring --help"
    );
}
