//! Decodes ids that arrive one at a time.

use super::{Tokenizer, TokenizerError};

/// Ids that are held back while their text ends in an incomplete character. A character has at most four bytes, so more ids can only be
/// invalid bytes.
const PATIENCE: usize = 8;

/// Decodes ids that arrive one at a time. Its pieces never split a character; joined, they equal [`Tokenizer::decode`] of all ids.
///
/// A token's text depends on its neighbours: a character may be spread over several tokens, and the first word of a text may lose its space.
/// So every id is decoded together with the last few before it.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The window that is decoded: ids whose text was returned, then those held back.
    ids: Vec<u32>,
    /// Ids of the window whose text was returned.
    settled: usize,
    /// Bytes of the window's text that were returned.
    printed: usize,
}

impl TextStream<'_> {
    pub(super) fn new(tokenizer: &Tokenizer) -> TextStream<'_> {
        TextStream {
            tokenizer,
            ids: Vec::new(),
            settled: 0,
            printed: 0,
        }
    }

    /// Takes the next id and returns the text that it completes, which may be empty.
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
            // These ids become the context of the next ones.
            self.restart(self.settled)?;
        } else if held > 4 * PATIENCE {
            self.restart(self.ids.len() - PATIENCE)?;
        }
        Ok(piece)
    }

    /// The text that was held back.
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
