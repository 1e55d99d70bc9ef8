//! Checks the directories of a model and of its mirrors.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::bail;
use colibri_uring::shards::{MAX_MIRRORS, other_weights};

use super::usage::WrongUsage;
use super::values::Weights;
use crate::cli::output::pluralize::pluralize;

/// Refuses a path that is no directory, and a first directory without config.json or shards.
pub fn check_model(dirs: &[PathBuf]) -> anyhow::Result<()> {
    for (i, dir) in dirs.iter().enumerate() {
        let why = match fs::metadata(dir) {
            Ok(found) if found.is_dir() && (i > 0 || holds_a_part(dir)) => continue,
            Ok(found) if found.is_dir() => match other_weights(dir) {
                Some(others) => format!("it holds no part of a model; {others}"),
                None => "it holds no part of a model".to_owned(),
            },
            Ok(_) => "it is no directory".to_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => "there is none".to_owned(),
            Err(error) => error.to_string(),
        };
        bail!(
            "cannot open the model directory {}: {why}; expected is one with config.json, *.safetensors and, for text, tokenizer.json",
            dir.display()
        );
    }
    Ok(())
}

/// Whether `dir` has config.json or a shard. True if it cannot be listed: opening the model then reports why.
fn holds_a_part(dir: &Path) -> bool {
    fs::read_dir(dir).map_or(true, |mut entries| {
        entries.any(|entry| {
            entry.map_or(true, |entry| {
                let name = entry.file_name();
                name == "config.json" || name.as_bytes().ends_with(b".safetensors")
            })
        })
    })
}

/// Refuses more than `MAX_MIRRORS` mirrors.
pub fn check_mirrors(mirrors: &[PathBuf]) -> Result<(), WrongUsage> {
    match mirrors.len() {
        0..=MAX_MIRRORS => Ok(()),
        given => Err(WrongUsage(format!(
            "--mirror is given {given} times, at most {MAX_MIRRORS} are possible"
        ))),
    }
}

/// Returns the weights of `--mirror-weights`. Refuses them unless each drive has one.
pub fn weights<'a>(
    weights: Option<&'a Weights>,
    mirrors: &[PathBuf],
) -> Result<Option<&'a [u32]>, WrongUsage> {
    let Some(Weights(weights)) = weights else {
        return Ok(None);
    };
    let drives = mirrors.len() + 1;
    match weights.len() == drives {
        true => Ok(Some(weights)),
        false => Err(WrongUsage(format!(
            "--mirror-weights has {}, and there are {}: the model's and {} of mirrors",
            pluralize(weights.len(), "weight"),
            pluralize(drives, "drive"),
            mirrors.len()
        ))),
    }
}
