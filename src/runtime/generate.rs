//! The loop that turns a prompt into tokens.

use std::time::{Duration, Instant};

use crate::runtime::sample::{SampleError, Sampler};

/// Why no more tokens follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// As many as were asked for.
    Length,
    /// The model chose one of its stop tokens, which is the last one.
    Stop,
    /// Someone asked to stop.
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
    /// These, whatever the logits say: every one of them is fed to the model on its own, so that two runs
    /// do the same work.
    Replay(Vec<u32>),
}

/// What came of it.
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
    /// Tokens that were fed to the model one at a time in that time. (The last sampled one never is.)
    pub decoded: usize,
}

/// Feeds `prompt` (at least one id) and then one token after the other. `feed` appends ids to the context and returns
/// the logits [vocabulary] after the last one, or `None` when it was interrupted; `token` is given every new token as soon as it
/// is known. The first error of either, or that no token can be sampled, ends the text like an interruption and is returned beside
/// what there is of it.
pub fn generate<E: From<SampleError>>(
    prompt: &[u32],
    source: Source,
    feed: impl FnMut(&[u32]) -> Result<Option<Vec<f32>>, E>,
    token: impl FnMut(u32) -> Result<(), E>,
) -> (Generated, Result<(), E>) {
    let start = Instant::now();
    let mut generated = Generated {
        ids: Vec::new(),
        finish: Finish::Interrupted,
        prefill: Duration::ZERO,
        decode: Duration::ZERO,
        decoded: 0,
    };
    let result = fill(&mut generated, prompt, source, feed, token);
    generated.decode = start.elapsed() - generated.prefill;
    (generated, result)
}

fn fill<E: From<SampleError>>(
    generated: &mut Generated,
    prompt: &[u32],
    source: Source,
    mut feed: impl FnMut(&[u32]) -> Result<Option<Vec<f32>>, E>,
    mut token: impl FnMut(u32) -> Result<(), E>,
) -> Result<(), E> {
    let start = Instant::now();
    let fed = feed(prompt);
    generated.prefill = start.elapsed();
    let mut logits = fed?;
    let (ids, decoded) = (&mut generated.ids, &mut generated.decoded);
    generated.finish = match source {
        Source::Sample {
            mut sampler,
            max,
            stop,
        } => loop {
            let Some(last) = &logits else {
                break Finish::Interrupted;
            };
            if ids.len() == max {
                break Finish::Length;
            }
            let id = sampler.sample(last)?;
            ids.push(id);
            token(id)?;
            if stop.contains(&id) {
                break Finish::Stop;
            }
            // The logits after the last token are nobody's.
            if ids.len() < max {
                logits = feed(&[id])?;
                *decoded += usize::from(logits.is_some());
            }
        },
        Source::Replay(replay) => {
            for id in replay {
                if logits.is_none() {
                    break;
                }
                ids.push(id);
                token(id)?;
                logits = feed(&[id])?;
                *decoded += usize::from(logits.is_some());
            }
            match logits {
                Some(_) => Finish::Length,
                None => Finish::Interrupted,
            }
        }
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::sample::Sampling;

    /// A model that counts: after id i comes i + 1. Remembers what it was fed and is interrupted at a given call.
    fn run(source: Source, interrupted_at: usize) -> (Generated, Vec<Vec<u32>>, Vec<u32>) {
        let (mut fed, mut seen) = (Vec::new(), Vec::new());
        let (generated, result) = generate::<SampleError>(
            &[3, 4],
            source,
            |ids| {
                fed.push(ids.to_vec());
                let mut logits = vec![0.0; 16];
                logits[ids[ids.len() - 1] as usize + 1] = 1.0;
                Ok((fed.len() < interrupted_at).then_some(logits))
            },
            |id| {
                seen.push(id);
                Ok(())
            },
        );
        result.unwrap();
        (generated, fed, seen)
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
    fn an_error_leaves_what_there_is() {
        #[derive(Debug, PartialEq)]
        struct Refused(u32);
        impl From<SampleError> for Refused {
            fn from(error: SampleError) -> Refused {
                panic!("{error}");
            }
        }
        let run = |refused_by_token, refused_by_feed| {
            generate(
                &[3, 4],
                greedy(10, vec![]),
                |ids| {
                    let last = ids[ids.len() - 1];
                    let mut logits = vec![0.0; 16];
                    logits[last as usize + 1] = 1.0;
                    (last != refused_by_feed)
                        .then_some(Some(logits))
                        .ok_or(Refused(last))
                },
                |id| (id != refused_by_token).then_some(()).ok_or(Refused(id)),
            )
        };
        for (by_token, by_feed, ids, decoded) in [
            (6, 99, &[5, 6][..], 1),
            (99, 6, &[5, 6], 1),
            (99, 4, &[], 0),
        ] {
            let (generated, result) = run(by_token, by_feed);
            assert_eq!(generated.ids, ids);
            assert_eq!(generated.finish, Finish::Interrupted);
            assert_eq!(generated.decoded, decoded);
            assert_eq!(result, Err(Refused(by_token.min(by_feed))));
        }
    }
}
