//! The small model that is part of the program: `glm_moe_dsa` with 16 experts a layer, trained on English novels (demo/README.md).
//!
//! Models are read from files, with O_DIRECT where possible, so this one is unpacked to the user's cache directory. Every
//! later use compares what is there with the digests of `SHA256SUMS`, and puts right what is damaged.

use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tempfile::TempDir;

mod unpack;

/// What the model can be asked to continue.
pub const PROMPT: &str = "It is a truth universally acknowledged, that";

/// A file of the model.
#[derive(Clone, Copy, Debug)]
struct File {
    name: &'static str,
    bytes: &'static [u8],
}

macro_rules! files {
    ($($name:literal),*) => {
        &[$(File { name: $name, bytes: include_bytes!(concat!("../../demo/model/", $name)) }),*]
    };
}

/// All of them. A file that is not here is not known to the program, and one that is has a line in [`SUMS`].
const FILES: &[File] = files!(
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json"
);

/// SHA-256 digests, as `sha256sum` writes them.
const SUMS: &str = include_str!("../../demo/model/SHA256SUMS");

/// The digest of a file in hexadecimal digits.
fn sum_of(name: &str) -> Option<&'static str> {
    let mut lines = SUMS.lines().filter_map(|line| line.split_once("  "));
    lines.find(|(_, file)| *file == name).map(|(sum, _)| sum)
}

/// Hexadecimal digits of a digest.
fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Why there is no demo model.
#[derive(Debug, thiserror::Error)]
#[error("cannot unpack the demo model to {}: {source}", path.display())]
pub struct DemoError {
    /// The temporary directory, which was the last resort.
    path: PathBuf,
    /// The operating system's answer.
    source: io::Error,
}

/// The demo model in a directory. A temporary one is removed when this is dropped.
#[derive(Debug)]
pub struct Demo {
    dir: PathBuf,
    _temporary: Option<TempDir>,
}

impl Demo {
    /// Unpacks the model to the user's cache directory, unless it is there already. Where that is not possible, a
    /// warning says why, and it is unpacked to a temporary directory. `temporary` is told the name of each directory that must be
    /// removed if the process ends otherwise than by dropping what this returns.
    ///
    /// # Errors
    /// [`DemoError`]: the temporary directory cannot be written either.
    pub fn open(temporary: impl Fn(&Path)) -> Result<Demo, DemoError> {
        Demo::open_in(cache(), &temporary)
    }

    /// Like [`Demo::open`], for a cache directory, or the reason why there is none.
    fn open_in(
        cache: Result<PathBuf, &'static str>,
        temporary: &dyn Fn(&Path),
    ) -> Result<Demo, DemoError> {
        let reason = match cache {
            Ok(cache) => {
                let dir = cache.join("colibri-uring").join(directory());
                match unpack::keep(&dir, temporary) {
                    Ok(()) => {
                        return Ok(Demo {
                            dir,
                            _temporary: None,
                        });
                    }
                    Err(error) => format!("{} cannot be used: {error}", dir.display()),
                }
            }
            Err(reason) => reason.to_owned(),
        };
        tracing::warn!("the demo model is unpacked to a temporary directory: {reason}");
        let failed = |source| DemoError {
            path: std::env::temp_dir(),
            source,
        };
        let dir = tempfile::Builder::new()
            .prefix("colibri-uring-demo-")
            .tempdir()
            .map_err(failed)?;
        temporary(dir.path());
        unpack::write(dir.path(), FILES).map_err(failed)?;
        Ok(Demo {
            dir: dir.path().to_owned(),
            _temporary: Some(dir),
        })
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// The name of the model's directory: another model has another one, so that versions of the program do not disturb each other.
fn directory() -> String {
    format!("demo-{}", &hex(&Sha256::digest(SUMS))[..12])
}

/// `XDG_CACHE_HOME`, which counts only when it is absolute, or `~/.cache`. A home that does not exist is not made.
fn cache() -> Result<PathBuf, &'static str> {
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    if let Some(cache) = named.filter(|cache| cache.is_absolute()) {
        return Ok(cache);
    }
    match std::env::home_dir() {
        Some(home) if home.is_absolute() && home.is_dir() => Ok(home.join(".cache")),
        _ => Err("there is no home directory, and XDG_CACHE_HOME is not set"),
    }
}

#[cfg(test)]
mod tests;
