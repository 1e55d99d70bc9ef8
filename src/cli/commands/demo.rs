//! Unpacks the demo model for commands without `--model`.

use std::io::{self, Write};
use std::path::PathBuf;

use colibri_uring::runtime::demo::Demo;

use crate::cli::args::drives::check_model;
use crate::cli::interrupt;

/// Fills in the demo model if `model` is empty, or checks the given directories. The demo model's files exist until the result is
/// dropped.
pub fn provide(model: &mut Vec<PathBuf>) -> anyhow::Result<Option<Demo>> {
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
    // A closed stderr is not an error.
    let _ = writeln!(
        io::stderr(),
        "no --model is given: this is the demo model, in {}",
        demo.dir().display()
    );
    Ok(Some(demo))
}

/// Suggests a next step after a run without a command.
pub fn hint() {
    let _ = writeln!(
        io::stderr(),
        "Next: colibri-uring decode --prompt \"The hummingbird\", or colibri-uring --help"
    );
}
