//! Prints a text as it is generated: feeds the prompt, drafts and chooses tokens, prints each at once.

use std::io::Write;
use std::time::Duration;

use colibri_uring::model::draft::{DraftStats, Drafter, Mode};
use colibri_uring::model::{Phase, Runner, Sequence};
use colibri_uring::runtime::generate::{Generated, Generation, SequenceFeed, Source};

use crate::cli::output::printer::Printer;
use crate::cli::output::progress;

pub struct GenerationRun<'a, W> {
    /// Tokens that the sequence does not have.
    pub prompt: &'a [u32],
    pub source: Source,
    pub drafts: Mode,
    /// Longest context in tokens, the last one included, which is never fed.
    pub limit: usize,
    pub printer: Printer<'a, W>,
    /// Printed before the first token, when the bar over the prompt has left the line.
    pub opening: Option<&'a str>,
    /// Tokens that are not printed, even if they have a text.
    pub silent: &'a [u32],
}

/// A generated text and its cost.
pub struct GenerationOutcome {
    pub generated: Generated,
    pub drafted: DraftStats,
    /// Time by phase up to the first token.
    pub prompt_phases: Vec<(Phase, &'static str, Duration)>,
    /// The error that ended the text or its output early. `generated` has the tokens before it.
    pub failed: Option<anyhow::Error>,
}

impl<W: Write> GenerationRun<'_, W> {
    /// Continues `sequence`.
    pub fn run(mut self, runner: &mut Runner, sequence: &mut Sequence) -> GenerationOutcome {
        let reading = progress::reading(runner, self.prompt.len());
        let drafter = Drafter::new(sequence, self.drafts, self.limit - 1);
        let feed = SequenceFeed {
            runner,
            sequence,
            drafter,
        };
        let mut generation = Generation::new(feed, self.prompt, self.source);
        let mut next = generation.next();
        reading.finish_and_clear();
        let prompt_phases = generation.source().runner.stats().phases;
        let mut failed = None;
        while let Some(token) = next {
            let printed = token.map_err(anyhow::Error::from).and_then(|id| {
                if let Some(opening) = self.opening.take() {
                    self.printer.print(opening)?;
                }
                match self.silent.contains(&id) {
                    true => Ok(()),
                    false => self.printer.token(id),
                }
            });
            if let Err(error) = printed {
                failed = Some(error);
                break;
            }
            next = generation.next();
        }
        let (generated, feed) = generation.finish();
        GenerationOutcome {
            generated,
            drafted: feed.finish(),
            prompt_phases,
            failed: match failed {
                None => self.printer.finish().err(),
                Some(error) => {
                    self.printer.abandon();
                    Some(error)
                }
            },
        }
    }
}
