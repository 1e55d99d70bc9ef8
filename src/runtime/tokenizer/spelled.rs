//! Lists the bytes of each token, as grammars need them.

use serde_json::{Map, Value, json};

use super::{Tokenizer, guarded};

/// Stands before the name of a token that is no text. No text has this byte.
const MARKER: u8 = 0xff;

impl Tokenizer {
    /// The bytes of tokens 0 to `vocab - 1`; empty for ids without a token. Added tokens, like `<think>`, are marked as no text: a text that
    /// spells one is made of ordinary tokens. Runs of blanks are text.
    ///
    /// # Errors
    /// Why the bytes cannot be told: the decoder is neither of byte level nor has a byte fallback.
    pub fn token_bytes(&self, vocab: usize) -> Result<Vec<Vec<u8>>, String> {
        let decoder = serde_json::to_value(self.inner.get_decoder());
        let decoder = decoder.map_err(|error| error.to_string())?;
        let added = self.inner.get_added_tokens_decoder();
        let marked: Vec<Value> = (added.iter())
            .filter(|(id, _)| (**id as usize) < vocab)
            .map(|(id, token)| {
                let text = token.content.chars().all(char::is_whitespace);
                json!({"id": id, "content": token.content, "special": !text})
            })
            .collect();
        let ordinary: Map<String, Value> = (self.inner.get_vocab(false).into_iter())
            .filter(|(_, id)| (*id as usize) < vocab)
            .map(|(token, id)| (token, id.into()))
            .collect();
        let file = json!({
            "decoder": decoder,
            "added_tokens": marked,
            "model": { "vocab": ordinary },
        });
        let mut bytes = guarded(|| Ok(llguidance::token_bytes_from_tokenizer_json(&file)?))?;
        bytes.resize(vocab, Vec::new());
        Ok(bytes)
    }

    /// The ids of a text of ordinary tokens, if they have its bytes, by `bytes` of [`Tokenizer::token_bytes`].
    pub(crate) fn spell(&self, text: &[u8], bytes: impl Fn(u32) -> Vec<u8>) -> Option<Vec<u32>> {
        let ids = self.encode_plain(std::str::from_utf8(text).ok()?).ok()?;
        let mut left = text;
        for &id in &ids {
            let token = bytes(id);
            // A normaliser may have changed the text, and an added token is no text.
            left = left
                .strip_prefix(&token[..])
                .filter(|_| !token.is_empty() && token[0] != MARKER)?;
        }
        left.is_empty().then_some(ids)
    }
}
