//! Follows one text, and says which tokens may come next.

use llguidance::Matcher;
use llguidance::api::StopReason;

/// Why a text cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// A limit of the work for one token.
    #[error("the grammar is too complex at this place of the text: simplify it")]
    TooComplex,
    /// No token of the model fits.
    #[error("no token of the model fits the grammar at this place of the text")]
    NoToken,
    /// A token that the mask does not have.
    #[error("token {0} does not fit the grammar")]
    Refused(u32),
}

/// The place of a text in its grammar.
pub struct Constraint {
    matcher: Matcher,
    /// Ends a complete text that can only end.
    stop: u32,
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

impl Clone for Constraint {
    /// Shares no cache, so that the clones run on different threads.
    fn clone(&self) -> Constraint {
        Constraint {
            matcher: self.matcher.deep_clone(),
            stop: self.stop,
        }
    }
}

impl Constraint {
    pub(super) fn new(matcher: Matcher, stop: u32) -> Constraint {
        Constraint { matcher, stop }
    }

    /// Sets the logits of tokens that may not come next to minus infinity. Stop tokens may come when the text is complete.
    ///
    /// # Errors
    /// [`ConstraintError::TooComplex`] and [`ConstraintError::NoToken`].
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        let allowed = self.matcher.compute_mask_or_eos();
        let allowed = allowed.map_err(|_| self.why(ConstraintError::NoToken))?;
        for (id, logit) in logits.iter_mut().enumerate() {
            if !allowed.get(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// The tokens that must come next, whatever the logits: at most `most`, possibly none. They are accepted with this call. A complete text
    /// that can only end gets a stop token.
    ///
    /// # Errors
    /// [`ConstraintError::TooComplex`].
    pub fn forced(&mut self, most: usize) -> Result<Vec<u32>, ConstraintError> {
        let mut ids = Vec::new();
        while ids.len() < most && !self.is_stopped() {
            let mut next = self.matcher.compute_ff_tokens();
            next.truncate(most - ids.len());
            if next.is_empty() {
                return Ok(ids);
            }
            let accepted = self.matcher.consume_tokens(&next);
            accepted.map_err(|_| self.why(ConstraintError::TooComplex))?;
            ids.extend(next);
        }
        if ids.len() < most && self.matcher.stop_reason() == StopReason::NoExtension {
            ids.push(self.stop);
        }
        Ok(ids)
    }

    /// Takes `id` as the next token.
    ///
    /// # Errors
    /// [`ConstraintError::Refused`] for a token that may not come next, [`ConstraintError::TooComplex`].
    pub fn accept(&mut self, id: u32) -> Result<(), ConstraintError> {
        if self.is_stopped() {
            return Ok(());
        }
        let accepted = self.matcher.consume_token(id);
        accepted.map_err(|_| self.why(ConstraintError::Refused(id)))
    }

    /// Whether the text may end here.
    pub fn is_complete(&mut self) -> bool {
        self.is_stopped() || self.matcher.is_accepting().unwrap_or(false)
    }

    /// Whether nothing but a stop token may come next, or a stop token has come.
    fn is_stopped(&self) -> bool {
        !self.matcher.is_error() && self.matcher.is_stopped()
    }

    /// The limit that the matcher met, or `otherwise`.
    fn why(&self, otherwise: ConstraintError) -> ConstraintError {
        let text = self.matcher.get_error().unwrap_or_default();
        tracing::debug!("the grammar ends the text: {text}");
        match text.to_lowercase().replace(' ', "").contains("toocomplex") {
            true => ConstraintError::TooComplex,
            false => otherwise,
        }
    }
}
