//! Finds the chat template of a model directory.

use std::io;
use std::path::{Path, PathBuf};

use super::TemplateError;
use crate::arch::{ConfigError, Keys, read_object};
use crate::runtime::tokenizer::{Settings, TemplateSource};

/// Preferred to the others.
pub const FILE: &str = "chat_template.jinja";
/// Processors of multimodal models save this one.
pub const JSON_FILE: &str = "chat_template.json";
/// Known templates have some kilobytes.
pub const MAX_BYTES: u64 = 256 << 10;
const TOO_LARGE: &str = "larger than 256 KiB";

/// The text of the template of a model directory and its file: `chat_template.jinja`, else the key `chat_template` of
/// `chat_template.json` or `tokenizer_config.json` (of several, the one named `default`).
pub fn find(dir: &Path, settings: &Settings) -> Result<(String, PathBuf), TemplateError> {
    let path = dir.join(FILE);
    match read(&path) {
        Ok(source) => return Ok((source, path)),
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(TemplateError::Read { path, source });
        }
        Err(_) => {}
    }
    let path = dir.join(JSON_FILE);
    let found = match read_object(&path) {
        Ok(value) => TemplateSource::of_key(&Keys::new(&path, &value)?),
        Err(ConfigError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    let (found, path) = match found {
        Some(found) => (Some(found), path),
        None => (
            settings.chat_template.clone(),
            dir.join("tokenizer_config.json"),
        ),
    };
    let message = match found {
        None => return Err(TemplateError::Missing { dir: dir.into() }),
        Some(TemplateSource::Text(source)) if source.len() as u64 > MAX_BYTES => {
            format!("is {TOO_LARGE}")
        }
        Some(TemplateSource::Text(source)) => return Ok((source, path)),
        Some(TemplateSource::Named(names)) => {
            format!("has no template named default, only: {}", names.join(", "))
        }
        Some(TemplateSource::Other(kind)) => {
            format!("is {kind}, neither a text nor a list of named ones")
        }
    };
    Err(TemplateError::Source { path, message })
}

/// Reads a regular file of limited size.
pub fn read(path: &Path) -> io::Result<String> {
    // Checked before opening: opening a FIFO would wait for a writer.
    let found = std::fs::metadata(path)?;
    if !found.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    if found.len() > MAX_BYTES {
        return Err(io::Error::other(TOO_LARGE));
    }
    std::fs::read_to_string(path)
}
