//! Flags that select a model with its mirrors.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use colibri_uring::shards::{Fault, Shards};

use super::drives::{check_mirrors, check_model};
use super::values::{DirectArg, EngineArg};

/// Selects a model and its mirrors, and how to read them.
#[derive(Debug, Args)]
pub struct CopiesArgs {
    /// Directory with config.json and *.safetensors; repeat it for a split model
    #[arg(long, value_name = "DIR", num_args = 1.., required = true, env = "COLIBRI_MODEL", help_heading = "Model")]
    pub model: Vec<PathBuf>,
    /// Directory on another drive with copies of the model's files; up to 4
    #[arg(long, value_name = "DIR", num_args = 1.., required = true, env = "COLIBRI_MIRROR", help_heading = "Drives")]
    pub mirror: Vec<PathBuf>,
    /// I/O engine for the reads: auto, uring or pread
    #[arg(long, value_enum, default_value = "auto", help_heading = "Drives")]
    pub engine: EngineArg,
    /// Bypass the page cache with O_DIRECT: auto, on or off
    #[arg(long, value_enum, default_value = "auto", help_heading = "Drives")]
    pub direct: DirectArg,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

impl CopiesArgs {
    /// Opens the model with its mirrors. A mirror that is no directory is an error: these commands are about it.
    pub fn open(&self) -> anyhow::Result<Shards> {
        check_mirrors(&self.mirror)?;
        check_model(&self.model)?;
        let shards = Shards::open_with(&self.model, &self.mirror, self.engine.into())?;
        for fault in shards.faults() {
            ensure!(matches!(fault, Fault::Files { .. }), "{fault}");
        }
        Ok(shards)
    }
}
