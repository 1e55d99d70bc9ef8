//! Adds biases and penalties to logits, as the OpenAI API defines them.

use std::collections::HashMap;

/// What is added to logits before anything else.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adjustments {
    /// Added to the logits of these tokens.
    pub bias: Vec<(u32, f32)>,
    /// Subtracted from the logits of tokens that have been drawn.
    pub presence: f32,
    /// Subtracted from the logit of a token for each time that it has been drawn.
    pub frequency: f32,
}

impl Adjustments {
    /// Whether they change nothing.
    pub fn is_none(&self) -> bool {
        self.bias.is_empty() && !self.counts()
    }

    /// Whether they depend on what has been drawn.
    fn counts(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0
    }
}

/// Adjustments, and the tokens that have been drawn.
#[derive(Clone, Debug, Default)]
pub(super) struct Adjusted {
    pub by: Adjustments,
    drawn: HashMap<u32, u32>,
}

impl Adjusted {
    pub fn new(by: Adjustments) -> Adjusted {
        let drawn = HashMap::new();
        Adjusted { by, drawn }
    }

    /// Counts a token that has been drawn.
    pub fn push(&mut self, id: u32) {
        if self.by.counts() {
            *self.drawn.entry(id).or_default() += 1;
        }
    }

    pub fn apply(&self, logits: &mut [f32]) {
        for (id, count) in &self.drawn {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit -= self.by.presence + self.by.frequency * *count as f32;
            }
        }
        for (id, bias) in &self.by.bias {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit += bias;
            }
        }
    }
}
