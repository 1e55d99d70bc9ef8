//! Unpacks the demo model that the program contains: `glm_moe_dsa`, 16 experts a layer, trained on English novels (demo/README.md).
//!
//! Models are read from files, with O_DIRECT where possible, so the model is unpacked to the user's cache directory. Each
//! later use compares the files with the digests of `SHA256SUMS` and replaces damaged ones.

use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tempfile::TempDir;

mod unpack;

/// The prompt that the demo continues by default.
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

/// The files of the model; each has a line in [`SUMS`].
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

/// The demo model cannot be unpacked, not even to a temporary directory.
#[derive(Debug, thiserror::Error)]
#[error("cannot unpack the demo model to {}: {source}", path.display())]
pub struct DemoError {
    /// The temporary directory, tried after the cache directory.
    path: PathBuf,
    /// The error of the last attempt.
    source: io::Error,
}

/// The demo model in a directory. A temporary one is removed when this is dropped.
#[derive(Debug)]
pub struct Demo {
    dir: PathBuf,
    _temporary: Option<TempDir>,
}

impl Demo {
    /// Unpacks the model to the user's cache directory, unless an intact copy exists. If the cache directory cannot be used,
    /// logs a warning and unpacks to a temporary directory. `temporary` is called with each directory that the caller must
    /// remove if the process exits without dropping the result.
    ///
    /// # Errors
    /// [`DemoError`] if the temporary directory cannot be written either.
    pub fn open(temporary: impl Fn(&Path)) -> Result<Demo, DemoError> {
        Demo::open_in(cache(), &temporary)
    }

    /// [`Demo::open`] with the cache directory, or the reason why none exists.
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

    /// The directory with the model's files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// The directory's name, derived from the digests, so that versions of the program with different models can coexist.
fn directory() -> String {
    format!("demo-{}", &hex(&Sha256::digest(SUMS))[..12])
}

/// `XDG_CACHE_HOME` if it is absolute, else `~/.cache`. Does not create a missing home directory.
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
