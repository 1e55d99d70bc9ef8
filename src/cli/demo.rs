//! Commands without `--model` use the model that ships with the program.

use std::io::{self, Write};
use std::path::PathBuf;

use colibri_uring::demo::Demo;

use super::Command;

/// Unpacks the demo model for a command that has no model, and says so. The model is there as long as the result.
pub fn provide(command: &mut Command) -> anyhow::Result<Option<Demo>> {
    let Some(model) = model_of(command).filter(|model| model.is_empty()) else {
        return Ok(None);
    };
    let demo = Demo::open()?;
    model.push(demo.dir().to_owned());
    if let Command::Decode(args) = command {
        args.model.demo = true;
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
