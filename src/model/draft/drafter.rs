//! Feeds a sequence several tokens a forward pass, and yields the logits of one token a pass.
//!
//! A [`Drafter`] stands between the loop that chooses tokens and the runner that computes logits. It returns the logits after each
//! token, as [`Runner::decode`] does. But it feeds a few drafts behind the token in the same pass, and if the next token turns out
//! to be the first of them, its logits are there already.
//!
//! **The text is the same.** Logits have the same bits however many tokens a pass has (docs/architecture.md), and every token is still
//! drawn from the model's logits by the usual sampler. For a draft x that is certain, that *is* the rule of rejection sampling for
//! speculative decoding. The rule accepts x with probability min(1, p(x) / q(x)) = p(x), as q(x) = 1, and otherwise draws from p without
//! x, rescaled. To draw one token from p, to accept the draft when it is x, and to keep the drawn token when it is not, does the same: x
//! comes with p(x), any other y with (1 - p(x)) * p(y) / (1 - p(x)) = p(y). And as each token takes one draw of the random stream
//! either way, a seed gives the same text with and without drafts.

use std::time::{Duration, Instant};

use super::auto::{Auto, MAX_DEPTH};
use crate::model::{ModelError, Runner, Sequence};

/// How many tokens are drafted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// As many as pay.
    Auto,
    /// None.
    Off,
    /// This many for each pass.
    Drafts(usize),
}

impl Mode {
    /// Drafts of a pass, at most.
    pub fn most(self) -> usize {
        match self {
            Mode::Auto => MAX_DEPTH,
            Mode::Off => 0,
            Mode::Drafts(n) => n,
        }
    }
}

/// Counts of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Tokens drafted.
    pub drafted: u64,
    /// Drafts that were the next token.
    pub accepted: u64,
    /// Forward passes after the prompt.
    pub forwards: u64,
    /// Drafts that the next pass would have.
    pub depth: usize,
}

impl DraftStats {
    /// Tokens fed for each forward pass after the prompt; 0 when there was none.
    pub fn tokens_per_forward(&self) -> f64 {
        match self.forwards {
            0 => 0.0,
            n => (n + self.accepted) as f64 / n as f64,
        }
    }
}

/// A pass whose logits are not all used yet.
#[derive(Debug)]
struct Run {
    drafts: Vec<u32>,
    /// Drafts that were accepted.
    accepted: usize,
    /// Tokens of the sequence up to the one that was fed.
    len: usize,
    took: Duration,
}

/// The drafts of one sequence: how many to make, and which of them are accepted.
#[derive(Debug)]
pub struct Drafter {
    mode: Mode,
    auto: Auto,
    /// Tokens of the sequence, at most.
    limit: usize,
    run: Option<Run>,
    stats: DraftStats,
}

impl Drafter {
    /// A drafter for `sequence`, which will have at most `limit` tokens: nothing is drafted beyond. Drafts nothing where the sequence
    /// does not.
    pub fn new(sequence: &Sequence, mode: Mode, limit: usize) -> Drafter {
        Drafter {
            mode: if sequence.can_draft() {
                mode
            } else {
                Mode::Off
            },
            auto: Auto::new(),
            limit,
            run: None,
            stats: DraftStats::default(),
        }
    }

    /// How many tokens to draft after the next one, which becomes token `len` of the sequence.
    pub fn depth(&self, len: usize) -> usize {
        let depth = match self.mode {
            Mode::Auto => self.auto.drafts(),
            Mode::Off => 0,
            Mode::Drafts(n) => n,
        };
        depth.min(self.limit.saturating_sub(len))
    }

    /// A pass of `took` fed a token and `drafts`, after which the sequence has `len` tokens and the drafts. Its logits are those after
    /// the token, in row 0, and after each draft.
    pub fn verify(&mut self, drafts: Vec<u32>, len: usize, took: Duration) {
        self.stats.forwards += 1;
        self.stats.drafted += drafts.len() as u64;
        self.run = Some(Run {
            drafts,
            accepted: 0,
            len,
            took,
        });
    }

    /// Takes `id` as the next token. If it is the next draft, the row of the pass that has the logits after it.
    pub fn accept(&mut self, id: u32) -> Option<usize> {
        let run = self.run.as_mut()?;
        if run.drafts.get(run.accepted) != Some(&id) {
            return None;
        }
        run.accepted += 1;
        self.stats.accepted += 1;
        Some(run.accepted)
    }

    /// Removes from the sequence the drafts of the last pass that were not accepted.
    pub fn settle(&mut self, sequence: &mut Sequence) {
        let Some(run) = self.run.take() else { return };
        sequence.truncate(run.len + run.accepted);
        // A pass that the limit cut short says nothing about its depth.
        if self.mode == Mode::Auto && run.drafts.len() == self.auto.drafts() {
            self.auto.passed(1 + run.accepted as u64, run.took);
        }
    }

    /// Appends `ids` to the sequence; the logits `[vocab_size]` after the last of them.
    ///
    /// # Errors
    /// As [`Runner::forward`].
    pub fn feed<'r>(
        &mut self,
        runner: &'r mut Runner,
        sequence: &mut Sequence,
        ids: &[u32],
    ) -> Result<&'r [f32], ModelError> {
        let mut ids = ids;
        // The last pass has rows of those that were drafted.
        while let [id, rest @ ..] = ids
            && !rest.is_empty()
            && self.accept(*id).is_some()
        {
            ids = rest;
        }
        let row = match ids {
            [id] => self.accept(*id),
            _ => None,
        };
        if let Some(row) = row {
            let vocab_size = runner.weights().config().vocab_size;
            return Ok(&runner.logits()[row * vocab_size..][..vocab_size]);
        }
        self.settle(sequence);
        let [id] = ids else {
            return runner.prefill(sequence, ids);
        };
        if sequence.is_empty() {
            return runner.prefill(sequence, ids);
        }
        let len = sequence.len() + 1;
        let (depth, start) = (self.depth(len), Instant::now());
        if depth == 0 {
            runner.decode(sequence, *id)?;
            self.verify(Vec::new(), len, start.elapsed());
            return Ok(runner.logits());
        }
        let drafts = runner.speculate(sequence, *id, depth)?;
        self.verify(drafts, len, start.elapsed());
        let vocab_size = runner.weights().config().vocab_size;
        Ok(&runner.logits()[..vocab_size])
    }

    /// Ends the text: the sequence has the tokens that were fed, and no drafts.
    pub fn finish(mut self, sequence: &mut Sequence) -> DraftStats {
        self.settle(sequence);
        DraftStats {
            depth: match self.mode {
                Mode::Auto => self.auto.depth(),
                _ => self.mode.most(),
            },
            ..self.stats
        }
    }
}
