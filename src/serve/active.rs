//! Follows one request from its first prompt row to its last token.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::queue::Submission;
use super::request::{Drawn, Event, Finish, Request, ServeError, Summary};
use crate::model::draft::{Drafter, Mode};
use crate::model::{Logits, ModelError, Runner, Sequence};
use crate::runtime::sample::{SampleError, Sampler, log_softmax_at};

/// A request that is being served.
#[derive(Debug)]
pub struct Active {
    pub sequence: Sequence,
    pub events: UnboundedSender<Event>,
    request: Request,
    /// The prompt and the tokens so far. The sequence has a prefix of it.
    text: Vec<u32>,
    sampler: Sampler,
    /// Tokens with which a constraint makes the text begin. They are computed with the prompt, and reported after it.
    first_forced: Vec<u32>,
    drafter: Drafter,
    summary: Summary,
    admitted: Instant,
    first: Option<Instant>,
    /// Rows of the prompt whose probabilities have been reported.
    reported: usize,
    enough: Arc<AtomicBool>,
    ended: bool,
}

/// What an active request puts into a pass.
#[derive(Debug)]
pub struct Share {
    pub ids: Vec<u32>,
    pub logits: Logits,
    /// How many of `ids` are drafts.
    pub drafts: usize,
}

/// Tokens forced by a constraint that are computed as those of decoding requests are. More are computed as those of prompts are.
const FORCED: usize = 64;

impl Active {
    /// Takes up a request. Rows that earlier ones have computed are shared.
    ///
    /// # Errors
    /// [`ModelError`] as of [`Runner::match_prefix`], or the constraint has no beginning.
    pub fn new(
        runner: &mut Runner,
        submission: Submission,
        mode: Mode,
    ) -> Result<Active, ServeError> {
        let Submission {
            mut request,
            events,
            enough,
            at,
        } = submission;
        let mut sequence = runner.sequence();
        if mode == Mode::Off {
            sequence.stop_drafting();
        }
        let cached = match request.prompt_logprobs {
            true => 0,
            false => runner.match_prefix(&mut sequence, &request.ids)?,
        };
        let mut sampler = Sampler::new(request.sampling).adjusted(request.adjustments.clone());
        sampler.observe(&request.ids);
        if let Some(constraint) = request.constraint.take() {
            sampler = sampler.constrained(constraint);
        }
        let first_forced = match request.logprobs {
            None => sampler.forced(request.max_tokens)?,
            Some(_) => Vec::new(),
        };
        let limit = request.ids.len().saturating_add(request.max_tokens);
        let (done, all) = (cached, request.ids.len());
        let _ = events.send(Event::Prompt { done, all });
        let summary = Summary {
            prompt_tokens: request.ids.len(),
            cached_tokens: cached,
            queue: at.elapsed(),
            ..Summary::default()
        };
        Ok(Active {
            drafter: Drafter::new(&sequence, mode, limit.saturating_sub(1)),
            sequence,
            events,
            text: [&request.ids[..], &first_forced].concat(),
            first_forced,
            request,
            sampler,
            summary,
            admitted: Instant::now(),
            first: None,
            reported: 0,
            enough,
            ended: false,
        })
    }

    /// Whether it is at its end, or its client is gone.
    pub fn is_over(&self) -> bool {
        self.ended || self.events.is_closed()
    }

    /// Ends it where its client wants no more.
    pub fn end_if_enough(&mut self) {
        if !self.is_over() && self.enough.load(Ordering::Relaxed) {
            self.end(Finish::Stop);
        }
    }

    /// Whether it has all rows but that of its last token, and of a few that a constraint forced.
    pub fn decodes(&self) -> bool {
        self.summary.tokens > 0 && self.pending() <= 1 + FORCED
    }

    /// Tokens that the sequence does not have yet.
    pub fn pending(&self) -> usize {
        self.text.len() - self.sequence.len()
    }

    /// Tokens of the prompt, and of what was computed of it.
    pub fn progress(&self) -> (usize, usize) {
        let all = self.request.ids.len();
        (self.sequence.len().min(all), all)
    }

    /// Whether every row of the prompt needs logits, which only a few rows at a time have room for.
    pub fn wants_all_logits(&self) -> bool {
        self.request.prompt_logprobs && self.sequence.len() < self.request.ids.len()
    }

    /// The share of a decoding request: its last tokens, at most `rows`, and drafts if `alone`.
    ///
    /// # Errors
    /// As [`Runner::draft`].
    pub fn decode_share(
        &mut self,
        runner: &mut Runner,
        rows: usize,
        alone: bool,
    ) -> Result<Share, ModelError> {
        if self.pending() > 1 {
            return Ok(self.prompt_share(rows));
        }
        let id = self.text[self.text.len() - 1];
        // With more rows, drafts cost more than they save.
        let wanted = match alone {
            true => self.drafter.depth(self.text.len()),
            false => 0,
        };
        let drafts = match wanted.min(runner.limits().slice - 1) {
            0 => Vec::new(),
            n => runner.draft(&mut self.sequence, id, n)?,
        };
        Ok(Share {
            logits: match drafts.is_empty() {
                true => Logits::Last,
                false => Logits::All,
            },
            ids: [&[id], &drafts[..]].concat(),
            drafts: drafts.len(),
        })
    }

    /// The share of a prompt: at most `rows` tokens.
    pub fn prompt_share(&self, rows: usize) -> Share {
        let start = self.sequence.len();
        let ids = self.text[start..]
            .iter()
            .copied()
            .take(rows)
            .collect::<Vec<_>>();
        Share {
            logits: match start + ids.len() == self.text.len() {
                _ if self.wants_all_logits() => Logits::All,
                true => Logits::Last,
                false => Logits::None,
            },
            ids,
            drafts: 0,
        }
    }

    /// After a pass with `share`, which took `time`: takes tokens from its logits [rows, vocabulary].
    pub fn passed(
        &mut self,
        share: &Share,
        logits: &[f32],
        vocabulary: usize,
        time: Duration,
        alone: bool,
    ) {
        if self.request.prompt_logprobs && share.drafts == 0 {
            self.report_prompt(share, logits, vocabulary);
        }
        let row = |row: usize| &logits[row * vocabulary..][..vocabulary];
        if alone && self.decodes_with(share) {
            let drafts = share.ids[1..].to_vec();
            let len = self.sequence.len() - share.drafts;
            self.drafter.verify(drafts, len, time);
        }
        // More of the prompt follows.
        if self.sequence.len() < self.text.len() || share.logits == Logits::None {
            return;
        }
        if self.request.max_tokens == 0 {
            return self.end(Finish::Length);
        }
        let forced = std::mem::take(&mut self.first_forced);
        if !self.report_forced(&forced) {
            return;
        }
        let mut next = match share.logits {
            Logits::All if share.drafts == 0 => share.ids.len() - 1,
            _ => 0,
        };
        while let Some(id) = self.draw(row(next)) {
            let accepted = self.drafter.accept(id);
            // The next logits are those after the forced tokens.
            if self.force() {
                break;
            }
            match accepted {
                Some(row) => next = row,
                None => break,
            }
        }
        self.drafter.settle(&mut self.sequence);
    }

    /// Whether a share is the last token of a decoding request, with drafts or without.
    pub fn decodes_with(&self, share: &Share) -> bool {
        self.summary.tokens > 0 && share.ids.len() == 1 + share.drafts
    }

    /// Draws a token; `None` when it is the last one.
    fn draw(&mut self, logits: &[f32]) -> Option<u32> {
        let id = match self.choose(logits) {
            Ok(id) => id,
            Err(error) => {
                self.fail(error.into());
                return None;
            }
        };
        self.text.push(id);
        self.report(drawn(logits, id, self.request.logprobs))
            .then_some(id)
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        // With probabilities, each forced token needs logits.
        let forced = match self.request.logprobs {
            Some(_) => self.sampler.forced(1)?.first().copied(),
            None => None,
        };
        forced.map_or_else(|| self.sampler.sample(logits), Ok)
    }

    /// Appends the tokens that the constraint forces; false if there is none.
    fn force(&mut self) -> bool {
        if self.request.logprobs.is_some() {
            return false;
        }
        let left = self.request.max_tokens - self.summary.tokens;
        match self.sampler.forced(left) {
            Ok(forced) => {
                self.text.extend(&forced);
                self.report_forced(&forced);
                !forced.is_empty()
            }
            Err(error) => {
                self.fail(error.into());
                true
            }
        }
    }

    /// Reports forced tokens; false if the text ends with them.
    fn report_forced(&mut self, forced: &[u32]) -> bool {
        forced.iter().all(|&id| {
            let (logprob, top) = (None, Vec::new());
            self.report(Drawn { id, logprob, top })
        })
    }

    /// Reports the next token; false if the text ends with it.
    fn report(&mut self, token: Drawn) -> bool {
        self.summary.tokens += 1;
        if self.first.is_none() {
            let now = Instant::now();
            self.summary.prefill = now - self.admitted;
            self.first = Some(now);
        }
        let stops = self.request.stop.contains(&token.id);
        self.send(Event::Token(token));
        if stops {
            self.end(Finish::Stop);
        } else if self.summary.tokens >= self.request.max_tokens {
            self.end(Finish::Length);
        }
        !self.is_over()
    }

    /// Reports the probabilities of the tokens that follow each row of the share in the prompt.
    fn report_prompt(&mut self, share: &Share, logits: &[f32], vocabulary: usize) {
        let first = self.sequence.len() - share.ids.len();
        // After a swap that failed, rows come again.
        let known = self.reported.saturating_sub(first);
        let next = self.request.ids.iter().skip(first + known + 1);
        let rows = logits.chunks(vocabulary).skip(known).zip(next);
        self.reported = self.reported.max(self.sequence.len());
        let top = self.request.logprobs.or(Some(0));
        let drawn = rows
            .map(|(row, id)| drawn(row, *id, top))
            .collect::<Vec<_>>();
        if !drawn.is_empty() {
            self.send(Event::PromptLogprobs(drawn));
        }
    }

    /// Counts what a pass waited for reads.
    pub fn waited(&mut self, time: Duration) {
        self.summary.io_wait += time;
    }

    /// Tokens so far.
    pub fn tokens(&self) -> usize {
        self.summary.tokens
    }

    pub fn summary(&self) -> Summary {
        Summary {
            decode: self.first.map_or(Duration::ZERO, |first| first.elapsed()),
            ..self.summary
        }
    }

    /// Before a pass is repeated: makes the sequence lack the last token again, whose logits were lost.
    pub fn rewind(&mut self) {
        let known = self.text.len() - 1;
        if self.sequence.len() > known {
            self.sequence.truncate(known);
        }
    }

    fn end(&mut self, finish: Finish) {
        self.ended = true;
        self.send(Event::End(finish, self.summary()));
    }

    /// Ends it with an error.
    pub fn fail(&mut self, error: ServeError) {
        self.ended = true;
        self.send(Event::Failed(error));
    }

    /// A client that is gone is noticed by [`Active::is_over`].
    fn send(&self, event: Event) {
        let _ = self.events.send(event);
    }
}

/// A token with its probabilities.
fn drawn(logits: &[f32], id: u32, top: Option<usize>) -> Drawn {
    let Some(top) = top else {
        let (logprob, top) = (None, Vec::new());
        return Drawn { id, logprob, top };
    };
    let logprob = log_softmax_at(logits, id as usize) as f32;
    // The same sum for all: the difference of two logits is that of their logarithms.
    let of = |other: u32| logprob + (logits[other as usize] - logits[id as usize]);
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let likelier = |a: &u32, b: &u32| {
        let (x, y) = (logits[*a as usize], logits[*b as usize]);
        y.total_cmp(&x).then(a.cmp(b))
    };
    if top < ids.len() {
        ids.select_nth_unstable_by(top, likelier);
        ids.truncate(top);
    }
    ids.sort_unstable_by(likelier);
    Drawn {
        id,
        logprob: Some(logprob),
        top: ids.into_iter().map(|other| (other, of(other))).collect(),
    }
}
