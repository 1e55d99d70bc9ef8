//! Encodes text to token ids and decodes ids to text, by the model's `tokenizer.json`.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once, OnceLock};

mod settings;
mod spelled;
mod stream;
#[cfg(test)]
mod tests;

pub use settings::{Settings, TemplateSource};
pub use stream::TextStream;

/// Why a tokenizer cannot be loaded, or a text or ids cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A model without `tokenizer.json` takes token ids only.
    #[error(
        "no tokenizer.json in {}: copy it there from the model's download page{}",
        dir.display(), other_tokenizer(dir)
    )]
    Missing {
        /// The model's first directory.
        dir: PathBuf,
    },
    /// The file exists and cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The file is not a tokenizer.
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
    /// A text without tokens.
    #[error("the prompt is empty: it encodes to no token")]
    EmptyPrompt,
    /// An id outside the embedding.
    #[error("token id {id} is outside the vocabulary: the model has ids 0 to {}", vocab.saturating_sub(1))]
    OutOfVocabulary {
        /// The id.
        id: u32,
        /// Size of the model's vocabulary.
        vocab: usize,
    },
}

/// Names a file of another format that the model has.
fn other_tokenizer(dir: &Path) -> String {
    let files = ["tokenizer.model", "tiktoken.model", "vocab.json"];
    let found = files.into_iter().find(|file| dir.join(file).exists());
    found.map_or_else(String::new, |file| {
        format!(", or make it from {file}, which cannot be read (save_pretrained of transformers' AutoTokenizer does)")
    })
}

/// Checks that `ids` has at least one id, and all of them are in the vocabulary.
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

thread_local! {
    /// Whether panics of this thread become errors, and are not printed.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls the tokenizers library, which panics on some invalid files. The panic becomes an error message.
pub(super) fn guarded<T>(run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    // The hook is of the whole process: it is replaced once, so that no other thread restores a silent one.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                hook(info);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    GUARDED.set(outer);
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

/// A loaded `tokenizer.json`. Clones share it.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    path: PathBuf,
}

impl Tokenizer {
    /// Loads `tokenizer.json` of a model directory; `None` when there is none.
    ///
    /// # Errors
    /// [`TokenizerError::Read`] and [`TokenizerError::Invalid`], naming the file.
    pub fn load(dir: &Path) -> Result<Option<Tokenizer>, TokenizerError> {
        let path = dir.join("tokenizer.json");
        // Checked before opening: opening a FIFO would wait for a writer.
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
                // Settings of a training pipeline that would truncate or pad a prompt.
                let _ = inner.with_truncation(None);
                inner.with_padding(None);
                let inner = Arc::new(inner);
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

    /// The ids of a text alone. Spelled special tokens become those tokens.
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

    /// Bytes of its longest token, at least.
    pub fn longest(&self) -> usize {
        let tokens = self.inner.get_vocab(true);
        // A byte-level token is spelled with at least one byte for each of its bytes.
        tokens.keys().map(String::len).max().unwrap_or(0)
    }

    /// The added tokens, like `<|user|>`, which are matched before all others, and whether each is special. Special tokens are left out of
    /// decoded text. The order is arbitrary.
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

/// The tokenizer of a model, loaded at the first use.
#[derive(Debug)]
pub(crate) struct LazyTokenizer {
    dir: PathBuf,
    tokenizer: OnceLock<Tokenizer>,
}

impl LazyTokenizer {
    pub(crate) fn new(dir: &Path) -> LazyTokenizer {
        LazyTokenizer {
            dir: dir.to_owned(),
            tokenizer: OnceLock::new(),
        }
    }

    /// The tokenizer; [`TokenizerError::Missing`] when the model has none.
    pub(crate) fn get(&self) -> Result<&Tokenizer, TokenizerError> {
        if let Some(tokenizer) = self.tokenizer.get() {
            return Ok(tokenizer);
        }
        match Tokenizer::load(&self.dir)? {
            Some(tokenizer) => Ok(self.tokenizer.get_or_init(|| tokenizer)),
            None => Err(TokenizerError::Missing {
                dir: self.dir.clone(),
            }),
        }
    }
}
