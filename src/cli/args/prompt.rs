//! Reads a prompt from an argument, a file or the standard input.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use colibri_uring::runtime::tokenizer::{Settings, Tokenizer, TokenizerError};
use rustix::fs::{FileType, fstat, major, minor};

use crate::cli::args::usage::WrongUsage;
use crate::cli::output::size::human;

/// The text of a prompt.
#[derive(Debug, Args)]
pub struct PromptArgs {
    /// Text to continue
    ///
    /// The model's directory must have a tokenizer.json. Redirected standard input is the prompt if you give none.
    #[arg(
        short,
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        help_heading = "Prompt"
    )]
    prompt: Option<OsString>,
    /// File with the text to continue; - is the standard input
    ///
    /// The newline at its end is removed.
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    prompt_file: Option<PathBuf>,
}

impl PromptArgs {
    /// Whether a flag gives a prompt.
    pub fn is_given(&self) -> bool {
        self.prompt.is_some() || self.prompt_file.is_some()
    }

    /// Returns the prompt. `None` without a flag, if the standard input is a terminal, `/dev/null` or empty.
    pub fn read(&self) -> anyhow::Result<Option<String>> {
        match (&self.prompt, &self.prompt_file) {
            (Some(text), _) => match text.clone().into_encoded_bytes().try_into() {
                Ok(Utf8(text)) => Ok(Some(text)),
                Err(why) => bail!(WrongUsage(format!("--prompt {why}"))),
            },
            (None, Some(path)) if path == Path::new("-") => Ok(Some(standard_input()?)),
            (None, Some(path)) => Ok(Some(file(path)?)),
            (None, None) if !redirected() => Ok(None),
            (None, None) => Ok(Some(standard_input()?).filter(|text| !text.is_empty())),
        }
    }
}

/// Encodes a prompt. An empty one becomes the tokenizer's bos_token, if it has one.
pub fn encode(tokenizer: &Tokenizer, dir: &Path, text: &str) -> anyhow::Result<Vec<u32>> {
    match tokenizer.encode(text) {
        Err(TokenizerError::EmptyPrompt) => {
            let settings = Settings::load(dir)?;
            let file = dir.join("tokenizer_config.json");
            let Some(token) = settings.token("bos_token") else {
                bail!(
                    "{}, and the model names no token that begins a text: give a prompt that is not empty",
                    TokenizerError::EmptyPrompt
                );
            };
            match tokenizer.id(token) {
                Some(bos) => Ok(vec![bos]),
                None => bail!(
                    "{}, and bos_token of {}, to begin with, is {token:?}, which is no token of tokenizer.json",
                    TokenizerError::EmptyPrompt,
                    file.display()
                ),
            }
        }
        ids => Ok(ids?),
    }
}

/// Whether the standard input can hold a prompt: neither a terminal nor /dev/null.
fn redirected() -> bool {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return false;
    }
    let Ok(found) = fstat(&stdin) else {
        return false;
    };
    let device = (major(found.st_rdev), minor(found.st_rdev));
    // /dev/null is device 1:3 under any name.
    !(FileType::from_raw_mode(found.st_mode) == FileType::CharacterDevice && device == (1, 3))
}

/// More text than any context holds.
const MAX_BYTES: u64 = 64 << 20;

/// Reads a file and removes the newline at its end.
fn file(path: &Path) -> anyhow::Result<String> {
    let bytes = File::open(path).and_then(limited);
    let text = bytes.and_then(|bytes| without_newline(text(bytes)?));
    text.with_context(|| format!("cannot read {}", path.display()))
}

fn standard_input() -> anyhow::Result<String> {
    let text = limited(io::stdin().lock()).and_then(|bytes| without_newline(text(bytes)?));
    text.context("cannot read the standard input")
}

/// Reads a file unchanged.
pub fn verbatim(path: &Path) -> anyhow::Result<String> {
    let text = File::open(path).and_then(limited).and_then(text);
    text.with_context(|| format!("cannot read {}", path.display()))
}

fn limited(from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MAX_BYTES {
        false => Ok(bytes),
        true => Err(io::Error::other(format!(
            "it is longer than {}",
            human(MAX_BYTES)
        ))),
    }
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    let Utf8(text) = Utf8::try_from(bytes).map_err(|why| io::Error::other(format!("it {why}")))?;
    Ok(text)
}

/// Removes what editors and `echo` add: a newline at the end, a byte order mark at the start.
fn without_newline(mut text: String) -> io::Result<String> {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(match text.strip_prefix('\u{feff}') {
        Some(rest) => rest.to_owned(),
        None => text,
    })
}

/// Text whose bytes were checked.
#[derive(Debug)]
pub struct Utf8(pub String);

impl TryFrom<Vec<u8>> for Utf8 {
    type Error = String;

    fn try_from(bytes: Vec<u8>) -> Result<Utf8, String> {
        String::from_utf8(bytes).map(Utf8).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            let bytes = error.as_bytes();
            let hint = match bytes {
                [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "; it looks like UTF-16",
                _ => "",
            };
            format!(
                "is not UTF-8 text: byte {:#04x} at offset {at}{hint}",
                bytes[at]
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_text_is_located() {
        let why = |bytes: &[u8]| Utf8::try_from(bytes.to_vec()).unwrap_err();
        let said = why(b"caf\xe9 au lait");
        assert_eq!(said, "is not UTF-8 text: byte 0xe9 at offset 3");
        assert!(why("é".as_bytes()[..1].as_ref()).contains("offset 0"));
        assert!(why(b"\xff\xfeh\0").contains("UTF-16"));
    }

    #[test]
    fn one_newline_ends_a_text() {
        for (text, expected) in [
            ("a\n", "a"),
            ("a\n\n", "a\n"),
            ("a\r\n", "a"),
            ("\n", ""),
            ("\u{feff}a", "a"),
            (" a ", " a "),
        ] {
            assert_eq!(without_newline(text.to_owned()).unwrap(), expected);
        }
    }
}
