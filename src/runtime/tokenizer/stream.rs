//! Text from ids that arrive one at a time.

use super::{Tokenizer, TokenizerError};

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
    pub(super) fn new(tokenizer: &Tokenizer) -> TextStream<'_> {
        TextStream {
            tokenizer,
            ids: Vec::new(),
            settled: 0,
            printed: 0,
        }
    }

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
