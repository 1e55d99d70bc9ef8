//! `chat`: talks with a model.

use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::{Context, bail};
use clap::Args;
use colibri_uring::model::Sequence;
use colibri_uring::model::draft::Mode;
use colibri_uring::runtime::chat::{ChatError, Conversation, Format, Turn};
use colibri_uring::runtime::generate::{Finish, Generated, Source};
use colibri_uring::runtime::sample::Generation;
use colibri_uring::runtime::sample::{Sampler, Sampling};
use colibri_uring::runtime::template::TemplateError;
use colibri_uring::runtime::tokenizer::{Tokenizer, TokenizerError, check_ids};
use colibri_uring::runtime::{Model, TextRunner};

use crate::cli::args::kv::ChatKvArgs;
use crate::cli::args::model::{DraftArgs, ModelArgs};
use crate::cli::args::sampling::SamplingArgs;
use crate::cli::args::template::{self, TemplateArgs};
use crate::cli::commands::generation::{GenerationOutcome, GenerationRun};
use crate::cli::commands::kv::KvStore;
use crate::cli::commands::load::{self, LoadedModel};
use crate::cli::interrupt::{self, Interrupts};
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::printer::{Printer, stdout};
use crate::cli::output::stats::EngineStats;

mod command;
mod input;
mod kv_store;
mod status;

use command::Line;
use input::{Input, Lines};

use status::{ContextUsage, Counters, say};

/// Chat with a model: each line is a message, and the model remembers the conversation
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    colibri-uring chat --model /models/GLM-5.2 --ram 24GiB --context 16384\n  \
    colibri-uring chat --model DIR --system \"You answer in one sentence.\" --template-var enable_thinking=false\n  \
    printf 'Hello\\nAnd in French?\\n' | colibri-uring chat --model DIR > answers.txt\n  \
    colibri-uring chat --model DIR --kv plans.kv   # continues the conversation in that file\n\
Type /help in a conversation to list its commands. Your lines are saved in ~/.local/state/colibri-uring/history.")]
pub struct ChatArgs {
    #[command(flatten)]
    template: TemplateArgs,
    /// Use no chat template: your lines and the model's are one text
    ///
    /// This suits a model that was not trained to chat.
    #[arg(long, conflicts_with_all = ["chat_template", "template_var"], help_heading = "Prompt")]
    raw: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    draft: DraftArgs,
    /// Tokens of context to reserve memory for [default: 8192, or the model's maximum]
    #[arg(short, long, value_name = "N", help_heading = "Memory")]
    context: Option<usize>,
    /// Tokens of an answer, at most [default: as many as fit]
    ///
    /// The default is 128 for answers that may never end: with --raw, for the demo model, and without any stop token.
    #[arg(short, value_name = "N", help_heading = "Sampling")]
    n: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    kv: ChatKvArgs,
}

/// Tokens of context without --context.
const DEFAULT_CONTEXT: usize = 8192;
/// Tokens of an answer that may never end, without -n.
const DEFAULT_ANSWER: usize = 128;
/// Tokens of one forward pass, if memory allows. Messages are rarely longer.
const PREFILL: usize = 2048;

/// Loads the model and answers until the input ends.
pub fn run(args: &ChatArgs) -> anyhow::Result<ExitCode> {
    let dir = &args.model.model[0];
    let Some(tokenizer) = Tokenizer::load(dir)? else {
        bail!(TokenizerError::Missing { dir: dir.clone() });
    };
    let format = match args.raw {
        true => Format::Raw,
        false => args
            .template
            .format(dir)
            .map_err(|error| match error.downcast_ref() {
                Some(TemplateError::Missing { .. }) => {
                    error.context("cannot chat (chat --raw needs no template)")
                }
                _ => error,
            })?,
    };
    let sampling = args.sampling.over(Generation::load(dir)?.sampling());
    let opened = load::open(&args.model, args.draft.mtp.0, !args.kv.no_kv)?;
    let config = opened.model().config();
    let max = config.max_position_embeddings;
    let mut saved = kv_store::open(&args.kv, || Ok(opened.model().fingerprint()?))?;
    let before = saved.as_ref().map_or(0, |saved| saved.file().ids().len());
    let context = match args.context {
        None => max.min(DEFAULT_CONTEXT.max(before.saturating_add(PREFILL))),
        Some(n) if before > 0 && n <= before => bail!(
            "--context {n} is too little for the saved conversation, which has {}: give more, another --kv, --no-kv, or \
             --kv-reset",
            pluralize(before, "token")
        ),
        Some(n) if (2..=max).contains(&n) => n,
        Some(n) => bail!(
            "--context {n} is not possible: the model allows 2 to {max} tokens (max_position_embeddings)"
        ),
    };
    let mut stop = config.eos_token_ids.clone();
    if !args.raw {
        stop.extend(template::end_of_message(&tokenizer, dir)?);
    }
    let endless = args.raw || args.model.demo || stop.is_empty();
    let mut conversation = Conversation::new(&tokenizer, format, args.template.system.clone());
    stop.extend(conversation.end_tokens());
    let vocab = config.vocab_size;
    let options = args.model.run_options(context, context.min(PREFILL));
    let LoadedModel { model, runner, .. } = opened.load(options)?;
    let interrupts = Interrupts::install().context("cannot handle Ctrl-C")?;
    let mut runner = runner;
    let mut sequence = runner.sequence();
    if let Some(saved) = &mut saved {
        kv_store::resume(saved, &mut runner, &mut sequence, &mut conversation)?;
    }
    let mut chat = Chat {
        conversation,
        saved,
        tokenizer: &tokenizer,
        model: &model,
        runner,
        sequence,
        sampling,
        drafts: args.draft.mtp.0,
        stop,
        vocab,
        context,
        longest: match args.n {
            Some(n) => n,
            None if endless => DEFAULT_ANSWER,
            None => usize::MAX,
        },
        longest_given: args.n.is_some(),
        interrupts,
    };
    let ended = chat.talk(&mut Lines::open());
    if ended.is_ok() {
        chat.runner.save_usage();
    }
    ended
}

struct Chat<'a> {
    conversation: Conversation<'a>,
    /// The file of the conversation.
    saved: Option<KvStore>,
    tokenizer: &'a Tokenizer,
    model: &'a Model,
    runner: TextRunner,
    sequence: Sequence,
    sampling: Sampling,
    drafts: Mode,
    stop: Vec<u32>,
    vocab: usize,
    /// Tokens of the context.
    context: usize,
    /// Longest answer, in tokens.
    longest: usize,
    /// Whether `longest` is from -n.
    longest_given: bool,
    interrupts: Interrupts,
}

impl Chat<'_> {
    /// Reads and answers until the end of the input. The exit code is 1 if a script's message could not be answered.
    fn talk(&mut self, lines: &mut Lines) -> anyhow::Result<ExitCode> {
        let interactive = lines.interactive();
        if interactive {
            say(&format!(
                "context of {}; type /help for commands, Ctrl-C stops an answer, Ctrl-D leaves",
                pluralize(self.context, "token")
            ));
        }
        let (mut code, mut leaving) = (ExitCode::SUCCESS, false);
        loop {
            self.interrupts.idle.store(true, Ordering::SeqCst);
            // SIGTERM between two answers.
            if self.interrupts.terminated.load(Ordering::SeqCst) {
                return Ok(interrupt::exit_code());
            }
            // Ctrl-C is a signal until the next line is read, and a key from then on.
            if leaving && self.interrupts.asked.load(Ordering::SeqCst) {
                return Ok(code);
            }
            let input = lines.next()?;
            self.interrupts.idle.store(false, Ordering::SeqCst);
            let line = match input {
                Input::End => return Ok(code),
                Input::Interrupted if leaving => return Ok(code),
                Input::Interrupted => {
                    leaving = true;
                    self.interrupts.asked.store(false, Ordering::SeqCst);
                    say("Ctrl-C once more leaves, like Ctrl-D");
                    continue;
                }
                Input::Line(line) => line,
            };
            leaving = false;
            match Line::parse(&line) {
                Line::Empty => {}
                Line::Quit => return Ok(code),
                Line::Help => say(command::HELP),
                Line::Stats => self.stats(),
                Line::Reset => {
                    self.conversation.reset();
                    kv_store::forget(&mut self.saved);
                    say("a new conversation");
                }
                Line::Unknown(word) => say(&format!(
                    "there is no command {word}; /help lists the commands. Type a space first to send it as a message"
                )),
                Line::Message(text) => {
                    let answered = self.answer(&text, interactive)?;
                    let terminated = self.interrupts.terminated.load(Ordering::SeqCst);
                    match answered {
                        Answered::Interrupted if terminated || !interactive => {
                            return Ok(interrupt::exit_code());
                        }
                        Answered::Refused if !interactive => code = ExitCode::FAILURE,
                        _ => {}
                    }
                }
            }
        }
    }

    fn room(&self) -> ContextUsage {
        ContextUsage {
            used: self.sequence.len(),
            of: self.context,
        }
    }

    fn stats(&mut self) {
        let stats = EngineStats::new(&mut self.runner, self.model);
        let tokens = self.runner.stats().tokens;
        let messages = self.conversation.messages().len();
        say(&status::report(&stats, tokens, messages, self.room()));
    }

    fn answer(&mut self, text: &str, interactive: bool) -> anyhow::Result<Answered> {
        let turn = match self.conversation.ask(text, self.context) {
            Ok(turn) => turn,
            Err(error @ ChatError::Full { alone, .. }) => {
                say(&format!("{error}; {}", self.remedy(alone)));
                return Ok(Answered::Refused);
            }
            Err(error) => return Err(error.into()),
        };
        check_ids(&turn.ids, self.vocab)?;
        self.interrupts.asked.store(false, Ordering::SeqCst);
        let before = Counters::from(&EngineStats::new(&mut self.runner, self.model));
        let GenerationOutcome {
            generated, failed, ..
        } = self.generate(&turn);
        let after = Counters::from(&EngineStats::new(&mut self.runner, self.model));
        let prefilled = turn.rest().len();
        let all = turn.ids.len() + generated.ids.len();
        // Even if printing failed.
        self.add_answer(turn, &generated)?;
        if let Some(error) = failed {
            return Err(error);
        }
        say(&status::line(
            &generated,
            prefilled,
            before,
            after,
            self.room(),
        ));
        match generated.finish {
            Finish::Interrupted if interactive => say(match generated.ids.is_empty() {
                true => "stopped before the answer: the message is removed",
                false => "stopped: what there is stays in the conversation",
            }),
            Finish::Length if all >= self.context => {
                say("the context is full; /reset begins a new conversation");
            }
            Finish::Length if !self.longest_given => say(&format!(
                "cut after {}, as it might never end; -n allows more",
                pluralize(self.longest, "token")
            )),
            _ => {}
        }
        Ok(match generated.finish {
            Finish::Interrupted => Answered::Interrupted,
            Finish::Length | Finish::Stop => Answered::Complete,
        })
    }

    /// What to do about a message that does not fit, and that has `alone` tokens in a new conversation.
    fn remedy(&self, alone: usize) -> String {
        let max = self.model.config().max_position_embeddings;
        match alone {
            _ if alone < self.context => "/reset begins a new conversation".to_owned(),
            _ if alone < max => format!(
                "shorten it, or start with --context {} or more (the model allows {max})",
                alone.saturating_add(DEFAULT_ANSWER).min(max)
            ),
            _ => format!("shorten it, as the model allows {max} tokens of context"),
        }
    }

    /// Feeds the new part of the conversation and prints the answer. An error ends the answer early.
    fn generate(&mut self, turn: &Turn) -> GenerationOutcome {
        let mut sampler = Sampler::new(Sampling {
            // The seed depends on the position, so that an answer depends only on the conversation before it.
            seed: (self.sampling.seed).wrapping_add(turn.ids.len() as u64),
            ..self.sampling
        });
        sampler.observe(&turn.ids);
        let source = Source::Sample {
            sampler: Box::new(sampler),
            max: self.longest.min(self.context - turn.ids.len()),
            stop: self.stop.clone(),
        };
        let printer = Printer::new(stdout(), Some(self.tokenizer)).on_stdout();
        self.sequence.truncate(turn.reused);
        let written = GenerationRun {
            prompt: turn.rest(),
            source,
            drafts: self.drafts,
            limit: self.context,
            printer,
            opening: None,
            // Stop tokens are not part of the answer.
            silent: &self.stop,
        }
        .run(&mut self.runner, &mut self.sequence);
        tracing::debug!("drafts: {:?}", written.drafted);
        written
    }

    /// Adds the answer to the conversation and saves it. The sequence's rows serve the next message.
    fn add_answer(&mut self, turn: Turn, generated: &Generated) -> anyhow::Result<()> {
        let said = match (generated.finish, generated.ids.split_last()) {
            (Finish::Stop, Some((_, said))) => said,
            _ => &generated.ids,
        };
        match said.is_empty() && generated.finish == Finish::Interrupted {
            true => self.conversation.withdraw(turn, self.sequence.len()),
            false => {
                self.conversation.answer(turn, said, self.sequence.len())?;
                let (runner, sequence) = (&mut self.runner, &mut self.sequence);
                kv_store::save(&mut self.saved, runner, sequence, &self.conversation);
            }
        }
        Ok(())
    }
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answered {
    Complete,
    Interrupted,
    /// The message does not fit in the context.
    Refused,
}
