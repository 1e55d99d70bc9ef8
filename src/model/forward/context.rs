//! The tokens of a session: what is there already, what a prompt can reuse of it, and what another session has left.

use super::Session;
use crate::config::Config;
use crate::model::error::ModelError;
use crate::model::kv::{KvCache, Rows};

/// Whether the model was made for a context of `tokens` tokens.
///
/// # Errors
/// [`ModelError::ContextTooLong`] beyond its `max_position_embeddings`.
pub fn check_context(config: &Config, tokens: usize) -> Result<(), ModelError> {
    let max = config.max_position_embeddings;
    if tokens > max {
        return Err(ModelError::ContextTooLong { tokens, max });
    }
    Ok(())
}

/// How many tokens of `prompt` a context that begins with `ids` spares: the common beginning, but never all of the prompt,
/// because the logits after its last token have to be computed.
pub fn reusable(ids: &[u32], prompt: &[u32]) -> usize {
    let common = ids.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    common.min(prompt.len().saturating_sub(1))
}

impl Session<'_> {
    /// Tokens in the context.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether the context is empty.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The tokens in the context.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// What attention remembers of them.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// Forgets the tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len() {
            self.ids.truncate(len);
            self.truncate_drafting();
            self.cache.truncate(len);
        }
    }

    /// Forgets what a context that begins with `prompt` does not have, and says how many of its tokens are there: the
    /// others, at least one, are for [`Session::prefill`], whose logits are the same to the last bit as without reuse.
    pub fn reuse(&mut self, prompt: &[u32]) -> usize {
        let kept = reusable(&self.ids, prompt);
        self.truncate(kept);
        kept
    }

    /// Continues where another session of the same model, with the same settings, had computed `ids` and left `cache`. What
    /// was in the context is forgotten. Only one of the two may have had the prediction layer: drafts are made of what it has seen.
    ///
    /// # Errors
    /// [`ModelError::Cache`] when layers, widths or lengths are others, [`ModelError::Token`] for an id outside the
    /// vocabulary, and [`ModelError::ContextTooLong`]. The session is then as before.
    pub fn restore(&mut self, ids: Vec<u32>, mut cache: KvCache) -> Result<(), ModelError> {
        let (shape, own) = (cache.shape(), self.cache.shape());
        if !shape.agrees_with(&own) {
            let what = "it has other layers, or rows of other widths";
            return Err(ModelError::Cache { what });
        }
        let fits = |(rows, (_, ahead)): (&Rows, (usize, usize))| match ahead {
            0 => rows.len() == ids.len(),
            _ => rows.len() <= ids.len(),
        };
        if !cache.rows().zip(shape.lists()).all(fits) {
            let what = "a layer has more or fewer rows than there are tokens";
            return Err(ModelError::Cache { what });
        }
        if !ids.is_empty() {
            self.check_ids(&ids)?;
            check_context(&self.model.config, ids.len())?;
        }
        self.truncate(0);
        cache.fit(&own);
        (self.ids, self.cache) = (ids, cache);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_of_a_prompt_is_never_spared() {
        for (ids, prompt, spared) in [
            (&[][..], &[1, 2][..], 0),
            (&[1, 2], &[1, 2, 3], 2),
            (&[1, 2, 3, 4], &[1, 2, 3], 2),
            (&[1, 2, 3], &[1, 2, 3], 2),
            (&[1, 9, 3], &[1, 2, 3], 1),
            (&[5], &[5], 0),
            (&[5], &[], 0),
        ] {
            assert_eq!(reusable(ids, prompt), spared, "{ids:?} {prompt:?}");
        }
    }
}
