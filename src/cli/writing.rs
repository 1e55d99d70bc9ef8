//! A text as it comes about: the prompt is fed, tokens are drafted and chosen, and each is printed at once.

use std::io::Write;
use std::time::Duration;

use colibri_uring::model::{ModelError, Phase, Session};
use colibri_uring::runtime::draft::{self, Drafter, Mode};
use colibri_uring::runtime::generate::{Generated, Source, generate};

use crate::cli::output::printer::Printer;
use crate::cli::output::progress;

/// What is to be written.
pub struct GenerationRun<'a, W> {
    /// Tokens that the session does not have.
    pub prompt: &'a [u32],
    pub source: Source,
    pub drafts: Mode,
    /// Tokens of the context at most, the last one included, which is never fed.
    pub limit: usize,
    pub printer: Printer<'a, W>,
    /// What is printed before the first token: not before the bar over the prompt is gone, which takes the line that it is on.
    pub opening: Option<&'a str>,
    /// Tokens that are not printed, even if they have a text.
    pub silent: &'a [u32],
}

/// What came of it.
pub struct GenerationOutcome {
    pub generated: Generated,
    pub drafted: draft::Stats,
    /// Time by phase up to the end of the prompt.
    pub prompt_phases: Vec<(Phase, &'static str, Duration)>,
    /// What ended the text early, or kept its end from being printed. What was generated before is there.
    pub failed: Option<anyhow::Error>,
}

impl<W: Write> GenerationRun<'_, W> {
    /// Continues the context of `session`.
    pub fn run(mut self, session: &mut Session) -> GenerationOutcome {
        let reading = progress::reading(session, self.prompt.len());
        let mut prompt_phases = None;
        let mut drafter = Drafter::new(session, self.drafts, self.limit - 1);
        let (generated, ended) = generate(
            self.prompt,
            self.source,
            |ids| {
                let fed = match drafter.feed(ids) {
                    Ok(logits) => Ok(Some(logits.to_vec())),
                    Err(ModelError::Stopped) => Ok(None),
                    Err(error) => Err(anyhow::Error::from(error)),
                };
                prompt_phases.get_or_insert_with(|| {
                    reading.finish_and_clear();
                    drafter.session().stats().phases
                });
                fed
            },
            |id| {
                if let Some(opening) = self.opening.take() {
                    self.printer.print(opening)?;
                }
                match self.silent.contains(&id) {
                    true => Ok(()),
                    false => self.printer.token(id),
                }
            },
        );
        GenerationOutcome {
            generated,
            drafted: drafter.finish(),
            prompt_phases: prompt_phases.unwrap_or_default(),
            failed: ended.and_then(|()| self.printer.finish()).err(),
        }
    }
}
