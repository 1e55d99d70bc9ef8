//! Errors of `config.json` and `generation_config.json`.

use std::path::PathBuf;

use crate::stand_in::StandIn;

/// Why a config was refused. Each message names the file, the key, its value and what is possible.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The file stands in for another.
    #[error("{} {stand_in}: {remedy}", path.display())]
    StandIn {
        /// The file.
        path: PathBuf,
        /// What it is.
        stand_in: StandIn,
        /// What to do.
        remedy: String,
    },
    /// The file is no JSON object.
    #[error("{}: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Why not, with line and column.
        reason: String,
    },
    /// A key without a default is absent.
    #[error("{}: key {key} is missing", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A value has the wrong JSON type.
    #[error("{}: {key} is {value}, expected {expected}", path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value as JSON, shortened.
        value: String,
        /// What the key holds.
        expected: &'static str,
    },
    /// A value is outside its range.
    #[error("{}: {key} is {value}, allowed is {allowed}", path.display())]
    Range {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value as JSON, shortened.
        value: String,
        /// The allowed values.
        allowed: String,
    },
    /// A valid value asks for arithmetic that is not implemented.
    #[error("{}: {key} {value} is not supported, only {supported}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value as JSON, shortened.
        value: String,
        /// The supported values.
        supported: String,
    },
}
