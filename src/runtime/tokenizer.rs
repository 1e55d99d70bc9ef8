//! Text to token ids and back, with the model's own `tokenizer.json`.

use std::io;
use std::path::{Path, PathBuf};

mod settings;
mod stream;
#[cfg(test)]
mod tests;

pub use settings::{Settings, TemplateSource};
pub use stream::TextStream;

/// What can be wrong with a prompt or with the tokenizer that reads it.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file exists and cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The file is no tokenizer.
    #[error("{} is not a valid tokenizer: {message}", path.display())]
    Invalid {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// What the tokenizers library says.
        message: String,
    },
    /// The tokenizer failed on a text.
    #[error("cannot encode the prompt with {}: {message}", path.display())]
    Encode {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// What the tokenizers library says.
        message: String,
    },
    /// The tokenizer failed on token ids.
    #[error("cannot decode token ids with {}: {message}", path.display())]
    Decode {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// What the tokenizers library says.
        message: String,
    },
    /// No token: there is nothing to continue.
    #[error("the prompt is empty: it encodes to no token")]
    EmptyPrompt,
    /// An id that the model has no embedding for.
    #[error("token id {id} is outside the vocabulary: the model has ids 0 to {}", vocab.saturating_sub(1))]
    OutOfVocabulary {
        /// The id.
        id: u32,
        /// Size of the model's vocabulary.
        vocab: usize,
    },
}

/// Checks that there is at least one id and that the model knows all of them.
///
/// # Errors
/// [`TokenizerError::EmptyPrompt`], or [`TokenizerError::OutOfVocabulary`] naming the first id that is not
/// below `vocab`.
pub fn check_ids(ids: &[u32], vocab: usize) -> Result<(), TokenizerError> {
    if ids.is_empty() {
        return Err(TokenizerError::EmptyPrompt);
    }
    match ids.iter().find(|id| **id as usize >= vocab) {
        Some(&id) => Err(TokenizerError::OutOfVocabulary { id, vocab }),
        None => Ok(()),
    }
}

/// Runs something of the tokenizers library, which panics on some files that it should refuse. The panic becomes
/// the message of an error.
fn guarded<T>(run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    std::panic::set_hook(hook);
    match result {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied());
            Err(format!(
                "the tokenizers library fails on it: {}",
                text.unwrap_or("unknown")
            ))
        }
    }
}

/// A loaded `tokenizer.json`.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
}

impl Tokenizer {
    /// Loads `tokenizer.json` of a model directory; `None` when there is none.
    ///
    /// # Errors
    /// [`TokenizerError::Read`] and [`TokenizerError::Invalid`], naming the file.
    pub fn load(dir: &Path) -> Result<Option<Tokenizer>, TokenizerError> {
        let path = dir.join("tokenizer.json");
        // Looked at before it is opened: opening a FIFO would wait for a writer.
        let read = || match std::fs::metadata(&path)?.is_file() {
            true => std::fs::read(&path),
            false => Err(io::Error::other("not a regular file")),
        };
        let bytes = match read() {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(TokenizerError::Read { path, source }),
        };
        match guarded(|| tokenizers::Tokenizer::from_bytes(bytes)) {
            Ok(mut inner) => {
                // What a training pipeline left there: a prompt is neither cut nor filled up.
                let _ = inner.with_truncation(None);
                inner.with_padding(None);
                Ok(Some(Tokenizer { inner, path }))
            }
            Err(message) => Err(TokenizerError::Invalid { path, message }),
        }
    }

    /// The ids of a text, with the special tokens that the tokenizer puts around a prompt.
    ///
    /// # Errors
    /// [`TokenizerError::EmptyPrompt`] when there are none, [`TokenizerError::Encode`] when the library fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        match self.ids(text, true)? {
            ids if ids.is_empty() => Err(TokenizerError::EmptyPrompt),
            ids => Ok(ids),
        }
    }

    /// The ids of a text and nothing around them. Special tokens that are spelled in it become those tokens.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] when the library fails.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.ids(text, false)
    }

    fn ids(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding =
            guarded(|| self.inner.encode_fast(text, add_special_tokens)).map_err(|message| {
                TokenizerError::Encode {
                    path: self.path.clone(),
                    message,
                }
            })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The id of a token, spelled as in `tokenizer.json`.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The tokens that are found in a text before anything else, like `<|user|>`, and whether each is special: those are left out of
    /// decoded text. In no particular order.
    pub fn added_tokens(&self) -> impl Iterator<Item = (String, bool)> {
        let tokens = self.inner.get_added_tokens_decoder();
        tokens
            .into_iter()
            .map(|(_, token)| (token.content, token.special))
    }

    /// The text of ids, without special tokens. Bytes that are no UTF-8 become U+FFFD; ids that the tokenizer
    /// does not know (a model's vocabulary may be padded) become nothing.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`] when the library fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.inner
            .decode(ids, true)
            .map_err(|error| TokenizerError::Decode {
                path: self.path.clone(),
                message: error.to_string(),
            })
    }

    /// Starts decoding ids that arrive one at a time.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }
}
