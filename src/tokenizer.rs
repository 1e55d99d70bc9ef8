//! Text to token ids and back, with the model's own `tokenizer.json`.

use std::io;
use std::path::{Path, PathBuf};

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
        self.ids(text, true)
    }

    /// The ids of a text that comes after another one: without the special tokens around a prompt.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.ids(text, false)
    }

    fn ids(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = guarded(|| self.inner.encode_fast(text, special)).map_err(|message| {
            TokenizerError::Encode {
                path: self.path.clone(),
                message,
            }
        })?;
        match encoding.get_ids() {
            [] => Err(TokenizerError::EmptyPrompt),
            ids => Ok(ids.to_vec()),
        }
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
        TextStream {
            tokenizer: self,
            ids: Vec::new(),
            settled: 0,
            printed: 0,
        }
    }
}

/// Ids are held back this long while they end in something that is no UTF-8; a character has at most four
/// bytes, so more can only be bytes that never become one.
const PATIENCE: usize = 8;

/// Text from ids that arrive one at a time. Its pieces never split a character, and joined they are what
/// [`Tokenizer::decode`] gives for all ids at once.
///
/// A token's text depends on its neighbours (a character may be spread over several tokens, the first word
/// of a text may lose its space), so every id is decoded together with the last few before it.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The window that is decoded: ids whose text is out already, then those held back.
    ids: Vec<u32>,
    /// How many ids of the window have all their text out.
    settled: usize,
    /// Bytes of the window's text that are out.
    printed: usize,
}

impl TextStream<'_> {
    /// Takes the next id and returns the text that is now certain, which may be empty.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`].
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        let held = self.ids.len() - self.settled;
        let certain = if held > PATIENCE {
            text.strip_suffix(char::REPLACEMENT_CHARACTER)
                .unwrap_or(&text)
        } else {
            text.trim_end_matches(char::REPLACEMENT_CHARACTER)
        };
        let piece = certain.get(self.printed..).unwrap_or("").to_owned();
        self.printed = self.printed.max(certain.len());
        let complete = certain.len() == text.len();
        if complete && !piece.is_empty() {
            // The ids that were settled before served as context for these; now these do for the next.
            self.restart(self.settled)?;
        } else if held > 4 * PATIENCE {
            self.restart(self.ids.len() - PATIENCE)?;
        }
        Ok(piece)
    }

    /// The text that was held back for more to come.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`].
    pub fn finish(self) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(text.get(self.printed..).unwrap_or("").to_owned())
    }

    /// Forgets the first `forget` ids of the window, so that its cost does not grow with the text.
    fn restart(&mut self, forget: usize) -> Result<(), TokenizerError> {
        let text = self.tokenizer.decode(&self.ids)?;
        let pending = text.len() - self.printed.min(text.len());
        self.ids.drain(..forget);
        self.settled = self.ids.len();
        self.printed = self
            .tokenizer
            .decode(&self.ids)?
            .len()
            .saturating_sub(pending);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    use super::*;

    /// The printable stand-in of a byte in byte-level vocabularies.
    fn byte_char(byte: u8) -> char {
        let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        match u32::from(byte) {
            b if printable(b) => char::from_u32(b).unwrap(),
            b => char::from_u32(256 + (0..b).filter(|b| !printable(*b)).count() as u32).unwrap(),
        }
    }

    /// One token a byte, and id 256 as a special token.
    fn byte_level() -> (tempfile::TempDir, Tokenizer) {
        let vocab: Map<String, Value> = (0..=255u8)
            .map(|b| (byte_char(b).to_string(), json!(b)))
            .collect();
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "added_tokens": [{"id": 256, "content": "<|end|>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
        });
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        let tokenizer = Tokenizer::load(dir.path()).unwrap().unwrap();
        (dir, tokenizer)
    }

    /// The byte-level tokenizer with other values of some keys.
    fn altered(keys: &Value) -> Result<Option<Tokenizer>, TokenizerError> {
        let (dir, _) = byte_level();
        let path = dir.path().join("tokenizer.json");
        let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        for (key, value) in keys.as_object().unwrap() {
            file[key] = value.clone();
        }
        std::fs::write(&path, file.to_string()).unwrap();
        Tokenizer::load(dir.path())
    }

    #[test]
    fn a_prompt_is_neither_cut_nor_filled_up() {
        let (_dir, plain) = byte_level();
        let truncation =
            json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        let padding = json!({"strategy": {"Fixed": 20}, "direction": "Left", "pad_to_multiple_of": null,
            "pad_id": 3, "pad_type_id": 0, "pad_token": "x"});
        let tokenizer = altered(&json!({"truncation": truncation, "padding": padding}))
            .unwrap()
            .unwrap();
        assert_eq!(
            tokenizer.encode("hello").unwrap(),
            plain.encode("hello").unwrap()
        );
    }

    #[test]
    fn what_makes_the_library_panic_is_an_error() {
        let precompiled =
            json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}});
        assert!(matches!(
            altered(&precompiled),
            Err(TokenizerError::Invalid { .. })
        ));
        let template = json!({"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}]}});
        let encoded = altered(&template).and_then(|t| t.unwrap().encode("hello"));
        assert!(encoded.is_err(), "{encoded:?}");
    }

    fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let mut stream = tokenizer.stream();
        let mut text: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        text += &stream.finish().unwrap();
        text
    }

    #[test]
    fn characters_are_never_split() {
        let (_dir, tokenizer) = byte_level();
        let text = "naïve 日本 🦀!";
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(ids.len(), text.len());
        let mut stream = tokenizer.stream();
        let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        assert!(
            pieces
                .iter()
                .all(|p| !p.contains(char::REPLACEMENT_CHARACTER))
        );
        assert_eq!(pieces.concat(), text);
        assert_eq!(stream.finish().unwrap(), "");
    }

    #[test]
    fn an_unfinished_character_comes_out_at_the_end() {
        let (_dir, tokenizer) = byte_level();
        let mut stream = tokenizer.stream();
        assert_eq!(stream.push(u32::from(b'a')).unwrap(), "a");
        assert_eq!(stream.push(0xf0).unwrap(), "");
        assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    }

    #[test]
    fn special_and_unknown_ids_have_no_text() {
        let (_dir, tokenizer) = byte_level();
        assert_eq!(streamed(&tokenizer, &[97, 256, 98, 9999]), "ab");
        assert_eq!(streamed(&tokenizer, &[256; 200]), "");
    }

    #[test]
    fn a_missing_and_a_broken_file() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Tokenizer::load(dir.path()).unwrap().is_none());
        std::fs::write(dir.path().join("tokenizer.json"), "{\"version\":").unwrap();
        let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json is not a valid tokenizer"));
    }

    #[test]
    fn empty_prompts_and_foreign_ids_are_refused() {
        let (_dir, tokenizer) = byte_level();
        assert!(matches!(
            tokenizer.encode(""),
            Err(TokenizerError::EmptyPrompt)
        ));
        assert!(matches!(
            check_ids(&[], 10),
            Err(TokenizerError::EmptyPrompt)
        ));
        assert!(check_ids(&[0, 9], 10).is_ok());
        let error = check_ids(&[3, 10], 10).unwrap_err().to_string();
        assert_eq!(
            error,
            "token id 10 is outside the vocabulary: the model has ids 0 to 9"
        );
    }

    proptest! {
        #[test]
        fn the_pieces_join_to_the_whole(ids in prop::collection::vec(
            prop_oneof![3 => 0u32..257, 1 => Just(0xf0u32), 1 => Just(0x9f), 1 => Just(97)], 0..120)) {
            let (_dir, tokenizer) = byte_level();
            prop_assert_eq!(streamed(&tokenizer, &ids), tokenizer.decode(&ids).unwrap());
        }
    }
}
