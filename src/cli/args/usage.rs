//! Reports wrong usage that clap's derive cannot express.

/// Ends the program with exit code 2, this message and the usage of the command.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct WrongUsage(pub String);
