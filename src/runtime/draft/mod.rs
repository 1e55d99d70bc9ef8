//! Speculative decoding: several tokens a forward pass, and the same text.
//!
//! A [`Drafter`] stands between the loop that chooses tokens and the session that computes logits. Whoever feeds it one token gets the
//! logits after that token, as from [`Session::decode`]. But it feeds the session a few drafts behind the token in the same pass, and if the
//! next token turns out to be the first of them, its logits are there already.
//!
//! **Nothing is lost.** Logits are bit-identical however many tokens a pass has (docs/architecture.md), so what is handed out is what
//! decoding one token at a time would have computed. The choice stays where it was: every token is drawn from the model's logits by the usual
//! sampler. For a draft x that is certain, that *is* the rule of rejection sampling for speculative decoding. The rule accepts x with
//! probability min(1, p(x) / q(x)) = p(x), as q(x) = 1, and otherwise draws from p without x, rescaled. To draw one token from p, to
//! accept the draft when it is x, and to keep the drawn token when it is not, does the same: x comes with p(x), any other y with
//! (1 - p(x)) * p(y) / (1 - p(x)) = p(y). And as each token takes one draw of the random stream either way, a seed gives the same text with and
//! without drafts.

mod auto;

pub use auto::{Auto, MAX_DEPTH};

use std::time::{Duration, Instant};

use crate::model::{ModelError, Session};

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

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tokens drafted.
    pub drafted: u64,
    /// Drafts that were the next token.
    pub accepted: u64,
    /// Forward passes after the prompt.
    pub forwards: u64,
    /// Drafts that the next pass would have.
    pub depth: usize,
}

impl Stats {
    /// Tokens fed for each forward pass after the prompt; 0 when there was none.
    pub fn tokens_per_forward(&self) -> f64 {
        match self.forwards {
            0 => 0.0,
            n => (n + self.accepted) as f64 / n as f64,
        }
    }
}

/// A pass whose logits are being handed out.
#[derive(Debug)]
struct Run {
    drafts: Vec<u32>,
    /// How many of them have come true.
    right: usize,
    /// Tokens of the context up to the one that was fed.
    len: usize,
    took: Duration,
}

/// Feeds a session, with drafts.
#[derive(Debug)]
pub struct Drafter<'a, 'm> {
    session: &'a mut Session<'m>,
    mode: Mode,
    auto: Auto,
    /// Tokens that the context may have, at most.
    limit: usize,
    run: Option<Run>,
    stats: Stats,
}

impl<'a, 'm> Drafter<'a, 'm> {
    /// A drafter for a context that will have at most `limit` tokens, beyond which nothing is drafted. Without a prediction
    /// layer it drafts nothing.
    pub fn new(session: &'a mut Session<'m>, mode: Mode, limit: usize) -> Drafter<'a, 'm> {
        Drafter {
            mode: if session.can_draft() { mode } else { Mode::Off },
            session,
            auto: Auto::new(),
            limit,
            run: None,
            stats: Stats::default(),
        }
    }

    /// The session. Its context may end with drafts.
    pub fn session(&self) -> &Session<'m> {
        self.session
    }

    /// Appends `ids` to the context; the logits [vocab_size] after the last of them.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn feed(&mut self, ids: &[u32]) -> Result<&[f32], ModelError> {
        let [id] = ids else {
            self.settle();
            return self.session.prefill(ids);
        };
        if let Some(run) = &mut self.run
            && run.drafts.get(run.right) == Some(id)
        {
            run.right += 1;
            self.stats.accepted += 1;
            let right = run.right;
            return Ok(self.row(right));
        }
        self.settle();
        if self.session.is_empty() {
            return self.session.prefill(ids);
        }
        let len = self.session.len() + 1;
        let drafts = self.depth().min(self.limit.saturating_sub(len));
        let start = Instant::now();
        let drafts = self.session.speculate(*id, drafts)?;
        self.stats.forwards += 1;
        self.stats.drafted += drafts.len() as u64;
        self.run = Some(Run {
            drafts,
            right: 0,
            len,
            took: start.elapsed(),
        });
        Ok(self.row(0))
    }

    /// The logits after token `i` of the last pass.
    fn row(&self, i: usize) -> &[f32] {
        let logits = self.session.logits();
        let vocabulary = logits.len() / self.run.as_ref().map_or(1, |run| run.drafts.len() + 1);
        &logits[i * vocabulary..][..vocabulary]
    }

    fn depth(&self) -> usize {
        match self.mode {
            Mode::Auto => self.auto.drafts(),
            Mode::Off => 0,
            Mode::Drafts(n) => n,
        }
    }

    /// Takes the drafts out of the context that have not come true.
    fn settle(&mut self) {
        let Some(run) = self.run.take() else { return };
        self.session.truncate(run.len + run.right);
        // A pass that was cut short by the end of the context says nothing about its depth.
        if self.mode == Mode::Auto && run.drafts.len() == self.auto.drafts() {
            self.auto.passed(1 + run.right as u64, run.took);
        }
    }

    /// Ends the text: the context has what was fed, and nothing else.
    pub fn finish(mut self) -> Stats {
        self.settle();
        Stats {
            depth: match self.mode {
                Mode::Auto => self.auto.depth(),
                _ => self.mode.most(),
            },
            ..self.stats
        }
    }
}
