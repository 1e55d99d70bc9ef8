//! Generates tokens from a prompt, one at a time.

use std::time::{Duration, Instant};

use crate::model::draft::{DraftStats, Drafter};
use crate::model::{ModelError, Runner, Sequence};
use crate::runtime::sample::{SampleError, Sampler};
use crate::runtime::tokenizer::TokenizerError;

/// Why no more tokens follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// As many as were asked for.
    Length,
    /// The model chose one of its stop tokens, which is the last one.
    Stop,
    /// The stop flag was set, an error ended the text, or the caller asked for no more tokens.
    Interrupted,
}

/// Where the next token comes from.
#[derive(Debug)]
pub enum Source {
    /// Drawn from the logits; ends at one of `stop` or after `max` tokens.
    Sample {
        /// Draws them.
        sampler: Box<Sampler>,
        /// How many at most.
        max: usize,
        /// Ids that end the text.
        stop: Vec<u32>,
    },
    /// These, whatever the logits say: every one of them is fed to the model separately, so that two runs do the same work.
    Replay(Vec<u32>),
}

/// A generated text and its cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The new tokens.
    pub ids: Vec<u32>,
    /// Why there are no more.
    pub finish: Finish,
    /// Time for the prompt.
    pub prefill: Duration,
    /// Time for everything after it.
    pub decode: Duration,
    /// Tokens that were fed to the model in that time. (The last one never is.)
    pub decoded: usize,
}

/// Computes the logits of a text as it grows.
pub trait Feed {
    /// What can go wrong, when tokens are sampled too.
    type Error: From<SampleError>;

    /// Appends ids to the text and lends the logits `[vocabulary]` after the last one; `None` when it was interrupted.
    ///
    /// # Errors
    /// Whatever ends the text.
    fn feed(&mut self, ids: &[u32]) -> Result<Option<&[f32]>, Self::Error>;
}

/// Why a token could not be generated.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The logits could not be computed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// No token could be drawn from them.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The tokenizer cannot be loaded, or fails on a token.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// A sequence of a runner, fed with drafts.
#[derive(Debug)]
pub struct SequenceFeed<'a> {
    /// The runner.
    pub runner: &'a mut Runner,
    /// The sequence. It may end with drafts until [`Drafter::finish`].
    pub sequence: &'a mut Sequence,
    /// The drafts.
    pub drafter: Drafter,
}

impl SequenceFeed<'_> {
    /// Ends the text: the sequence has the tokens that were fed, and no drafts.
    pub fn finish(self) -> DraftStats {
        self.drafter.finish(self.sequence)
    }
}

impl Feed for SequenceFeed<'_> {
    type Error = GenerateError;

    fn feed(&mut self, ids: &[u32]) -> Result<Option<&[f32]>, GenerateError> {
        match self.drafter.feed(self.runner, self.sequence, ids) {
            Ok(logits) => Ok(Some(logits)),
            Err(ModelError::Stopped) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Yields the tokens of a text as they are generated. The first error is the last item.
#[derive(Debug)]
pub struct Generation<'p, F> {
    feed: F,
    /// The prompt, until it is fed.
    prompt: Option<&'p [u32]>,
    source: Source,
    generated: Generated,
    /// Tokens that the caller has. The others were forced by a grammar and fed together.
    given: usize,
    /// Tokens that the feed has.
    fed: usize,
    /// Why no token comes after those of `generated`.
    failed: Option<SampleError>,
    start: Instant,
    done: bool,
}

impl<'p, F: Feed> Generation<'p, F> {
    /// The text that follows `prompt` (at least one id).
    pub fn new(feed: F, prompt: &'p [u32], source: Source) -> Generation<'p, F> {
        Generation {
            feed,
            prompt: Some(prompt),
            source,
            generated: Generated {
                ids: Vec::new(),
                finish: Finish::Interrupted,
                prefill: Duration::ZERO,
                decode: Duration::ZERO,
                decoded: 0,
            },
            given: 0,
            fed: 0,
            failed: None,
            start: Instant::now(),
            done: false,
        }
    }

    /// What the text is fed to.
    pub fn source(&self) -> &F {
        &self.feed
    }

    /// Ends the text: its tokens, and what it was fed to.
    pub fn finish(mut self) -> (Generated, F) {
        self.generated.decode = self.start.elapsed() - self.generated.prefill;
        (self.generated, self.feed)
    }

    /// The next token, or why there is none.
    fn advance(&mut self) -> Result<Result<u32, Finish>, F::Error> {
        if self.given == self.generated.ids.len()
            && let Some(finish) = self.extend()?
        {
            return Ok(Err(finish));
        }
        let id = self.generated.ids[self.given];
        self.given += 1;
        Ok(Ok(id))
    }

    /// Appends at least one token, or says why there is none.
    fn extend(&mut self) -> Result<Option<Finish>, F::Error> {
        if let Some(error) = self.failed.take() {
            return Err(error.into());
        }
        let ids = &mut self.generated.ids;
        let mut ended = false;
        if let Source::Sample { sampler, max, stop } = &mut self.source {
            if ids.last().is_some_and(|last| stop.contains(last)) {
                return Ok(Some(Finish::Stop));
            }
            // The logits after the last token are not needed.
            if ids.len() == *max && *max > 0 {
                return Ok(Some(Finish::Length));
            }
            ids.extend(sampler.forced(*max - ids.len())?);
            ended = ids.len() == *max || ids.last().is_some_and(|last| stop.contains(last));
        }
        let end = ids.len() - usize::from(ended && !ids.is_empty());
        let new = &ids[self.fed.min(end)..end];
        let logits = match self.prompt.take() {
            Some(prompt) => {
                self.start = Instant::now();
                let fed = match new {
                    [] => self.feed.feed(prompt),
                    _ => self.feed.feed(&[prompt, new].concat()),
                };
                self.generated.prefill = self.start.elapsed();
                fed
            }
            None if new.is_empty() => Ok(None),
            None => {
                let logits = self.feed.feed(new);
                if let Ok(Some(_)) = logits {
                    self.generated.decoded += new.len();
                }
                logits
            }
        };
        // What was not computed was not generated.
        let Ok(Some(logits)) = logits else {
            ids.truncate(self.given);
            return logits.map(|_| Some(Finish::Interrupted));
        };
        self.fed = end;
        if ended {
            return Ok(ids.is_empty().then_some(Finish::Length));
        }
        let next = match &mut self.source {
            Source::Sample { sampler, .. } => match sampler.sample(logits) {
                Ok(id) => Some(id),
                Err(error) if self.given == ids.len() => return Err(error.into()),
                Err(error) => {
                    self.failed = Some(error);
                    return Ok(None);
                }
            },
            Source::Replay(replay) => replay.get(ids.len()).copied(),
        };
        ids.extend(next);
        Ok((self.given == ids.len()).then_some(Finish::Length))
    }
}

impl<F: Feed> Iterator for Generation<'_, F> {
    type Item = Result<u32, F::Error>;

    fn next(&mut self) -> Option<Result<u32, F::Error>> {
        if self.done {
            return None;
        }
        let next = self.advance();
        self.done = !matches!(next, Ok(Ok(_)));
        match next {
            Ok(Ok(id)) => Some(Ok(id)),
            Ok(Err(finish)) => {
                self.generated.finish = finish;
                None
            }
            Err(error) => Some(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::grammar::{Grammar, Grammars};
    use crate::runtime::sample::Sampling;
    use crate::runtime::tokenizer::Tokenizer;

    /// A model that counts: after id i comes i + 1. Remembers what it was fed, and is interrupted at a given call.
    struct Counting {
        logits: Vec<f32>,
        fed: Vec<Vec<u32>>,
        interrupted_at: usize,
        refused: Option<u32>,
    }

    #[derive(Debug, PartialEq)]
    struct Refused(u32);

    impl From<SampleError> for Refused {
        fn from(error: SampleError) -> Refused {
            panic!("{error}");
        }
    }

    impl Feed for Counting {
        type Error = Refused;

        fn feed(&mut self, ids: &[u32]) -> Result<Option<&[f32]>, Refused> {
            let last = ids[ids.len() - 1];
            self.fed.push(ids.to_vec());
            self.logits = vec![0.0; 16];
            self.logits[last as usize + 1] = 1.0;
            match self.refused {
                Some(refused) if refused == last => Err(Refused(last)),
                _ => Ok((self.fed.len() < self.interrupted_at).then_some(&self.logits[..])),
            }
        }
    }

    fn counting(interrupted_at: usize) -> Counting {
        Counting {
            logits: Vec::new(),
            fed: Vec::new(),
            interrupted_at,
            refused: None,
        }
    }

    fn run(source: Source, interrupted_at: usize) -> (Generated, Vec<Vec<u32>>, Vec<u32>) {
        let mut generation = Generation::new(counting(interrupted_at), &[3, 4], source);
        let seen = generation.by_ref().map(Result::unwrap).collect();
        assert!(generation.next().is_none());
        let (generated, feed) = generation.finish();
        (generated, feed.fed, seen)
    }

    fn greedy(max: usize, stop: Vec<u32>) -> Source {
        Source::Sample {
            sampler: Box::new(Sampler::new(Sampling::default())),
            max,
            stop,
        }
    }

    #[test]
    fn ends_at_the_length_without_feeding_the_last_token() {
        let (generated, fed, seen) = run(greedy(3, vec![]), usize::MAX);
        assert_eq!(generated.ids, [5, 6, 7]);
        assert_eq!(seen, [5, 6, 7]);
        assert_eq!(fed, [vec![3, 4], vec![5], vec![6]]);
        assert_eq!((generated.finish, generated.decoded), (Finish::Length, 2));
        assert!(run(greedy(0, vec![]), usize::MAX).0.ids.is_empty());
    }

    #[test]
    fn ends_with_a_stop_token() {
        let (generated, fed, _) = run(greedy(10, vec![6, 9]), usize::MAX);
        assert_eq!(generated.ids, [5, 6]);
        assert_eq!((generated.finish, fed.len()), (Finish::Stop, 2));
    }

    #[test]
    fn an_interruption_keeps_what_there_is() {
        let (generated, ..) = run(greedy(10, vec![]), 3);
        assert_eq!(generated.ids, [5, 6]);
        assert_eq!(
            (generated.finish, generated.decoded),
            (Finish::Interrupted, 1)
        );
        let (generated, ..) = run(greedy(10, vec![]), 1);
        assert_eq!(
            (generated.finish, generated.ids),
            (Finish::Interrupted, vec![])
        );
    }

    #[test]
    fn a_replay_feeds_every_id_on_its_own() {
        let (generated, fed, seen) = run(Source::Replay(vec![1, 9, 2]), usize::MAX);
        assert_eq!(seen, [1, 9, 2]);
        assert_eq!(fed, [vec![3, 4], vec![1], vec![9], vec![2]]);
        assert_eq!((generated.finish, generated.decoded), (Finish::Length, 3));
    }

    #[test]
    fn an_error_leaves_the_tokens_before_it() {
        for (refused, ids, decoded) in [(6, &[5, 6][..], 1), (4, &[], 0)] {
            let feed = Counting {
                refused: Some(refused),
                ..counting(usize::MAX)
            };
            let mut generation = Generation::new(feed, &[3, 4], greedy(10, vec![]));
            let items: Vec<_> = generation.by_ref().collect();
            assert_eq!(items.last(), Some(&Err(Refused(refused))));
            let (generated, _) = generation.finish();
            assert_eq!(generated.ids, ids);
            assert_eq!(generated.finish, Finish::Interrupted);
            assert_eq!(generated.decoded, decoded);
        }
    }

    #[test]
    fn a_caller_may_stop_at_any_token() {
        let mut generation = Generation::new(counting(usize::MAX), &[3, 4], greedy(10, vec![]));
        assert_eq!(generation.by_ref().take(2).count(), 2);
        let (generated, feed) = generation.finish();
        assert_eq!(
            (generated.ids, generated.finish),
            (vec![5, 6], Finish::Interrupted)
        );
        assert_eq!((feed.fed.len(), generated.decoded), (2, 1));
    }

    /// A model of the tokens of the fixture, whose logits are all equal.
    struct Even {
        logits: Vec<f32>,
        fed: Vec<Vec<u32>>,
    }

    impl Feed for Even {
        type Error = SampleError;

        fn feed(&mut self, ids: &[u32]) -> Result<Option<&[f32]>, SampleError> {
            self.fed.push(ids.to_vec());
            Ok(Some(&self.logits))
        }
    }

    #[test]
    fn forced_tokens_are_fed_together() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/chat");
        let tokenizer = Tokenizer::load(dir.as_ref()).unwrap().unwrap();
        let grammars = Grammars::new(&tokenizer, 704, &[0]).unwrap();
        let grammar = Grammar::Regex("the garden (a|o) and the garden".to_owned());
        let run = |max: usize| {
            let constraint = grammars.compile(&grammar).unwrap();
            let sampler = Sampler::new(Sampling::default()).constrained(constraint);
            let source = Source::Sample {
                sampler: Box::new(sampler),
                max,
                stop: vec![0],
            };
            let feed = Even {
                logits: vec![0.0; 704],
                fed: Vec::new(),
            };
            let mut generation = Generation::new(feed, &[3, 4], source);
            let seen: Vec<u32> = generation.by_ref().map(Result::unwrap).collect();
            let (generated, feed) = generation.finish();
            assert_eq!(seen, generated.ids);
            let all: Vec<u32> = feed.fed.concat();
            assert_eq!(all[..2], [3, 4]);
            // All but the last.
            assert_eq!(all[2..], seen[..seen.len().saturating_sub(1)]);
            assert_eq!(generated.decoded + feed.fed[0].len(), all.len());
            (generated, feed.fed)
        };
        let (whole, fed) = run(100);
        assert_eq!(whole.finish, Finish::Stop);
        let text = tokenizer.decode(&whole.ids).unwrap();
        assert!(text.ends_with(" and the garden"), "{text}");
        assert!(
            fed[0].len() > 3 && fed.len() < whole.ids.len() / 2,
            "{fed:?}"
        );
        for max in 0..whole.ids.len() {
            let (cut, _) = run(max);
            assert_eq!(cut.ids, whole.ids[..max]);
            assert_eq!(cut.finish, Finish::Length);
        }
    }
}
