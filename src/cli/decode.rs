//! `decode`: continue a prompt.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::builder::FalseyValueParser;
use clap::{ArgGroup, Args};
use colibri_uring::chat::Conversation;
use colibri_uring::config::Config;
use colibri_uring::demo;
use colibri_uring::draft::{Drafter, Mode};
use colibri_uring::generate::{Finish, Generated, Source, generate};
use colibri_uring::model::{ModelError, Phase, Session};
use colibri_uring::quant::Activations;
use colibri_uring::sample::{Sampler, Sampling};
use colibri_uring::stream::routing::{self, Recorder};
use colibri_uring::tokenizer::{Tokenizer, check_ids};
use serde::Serialize;

use super::args::{DraftArgs, Ids, ModelArgs};
use super::kv::{KvArgs, Turn};
use super::open::{self, Indexed, Tokens};
use super::output::Output;
use super::pictures::PictureArgs;
use super::printer::{Printer, nowhere};
use super::progress;
use super::prompt::{self, PromptArgs};
use super::sampling::SamplingArgs;
use super::size::human;
use super::stats::{Mtp, Stats, peak_rss_bytes};
use super::template::{self, TemplateArgs};

/// Continue a prompt, printing tokens as they are generated
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("input").args(["prompt", "prompt_file", "prompt_ids", "replay"])))]
#[command(after_help = "Examples:\n  \
    colibri-uring decode --model /models/GLM-5.2 --ram 24GiB -n 64 --prompt \"The hummingbird\"\n  \
    colibri-uring decode --model DIR --prompt-ids 3,14,159 -n 16 --json\n  \
    colibri-uring decode --model DIR --prompt-file prompt.txt --temperature 0.8 --top-p 0.95 --seed 7\n  \
    git log --oneline | colibri-uring decode --model DIR --chat --system \"Write release notes.\"\n  \
    colibri-uring decode --model DIR --kv talk.kv --prompt-file whole-talk.txt   # computes only what is new in it\n  \
    colibri-uring decode --model DIR --kv story.kv --kv-append --prompt \" Then\"   # goes on with the story")]
pub struct DecodeArgs {
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// Whether the demo model's own prompt is taken when none is given, without looking for one anywhere.
    #[arg(skip)]
    pub(super) demonstrate: bool,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    text: PromptArgs,
    /// Put the prompt as a message into the model's own chat template, to be answered
    #[arg(long, conflicts_with_all = ["prompt_ids", "replay", "kv_append"], env = "COLIBRI_CHAT", value_parser = FalseyValueParser::new())]
    chat: bool,
    #[command(flatten)]
    template: TemplateArgs,
    /// Token ids to continue
    #[arg(long, value_name = "IDS", env = "COLIBRI_PROMPT_IDS")]
    prompt_ids: Option<Ids>,
    /// File of token ids: the first 4 are the prompt, the others are fed one at a time, whatever the model would choose
    #[arg(long, value_name = "FILE", env = "COLIBRI_REPLAY")]
    replay: Option<PathBuf>,
    /// How many tokens to generate at most [default: 128, or as many as the model's context has room for]
    #[arg(short, value_name = "N", env = "COLIBRI_N", conflicts_with = "replay")]
    n: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    kv: KvArgs,
    /// Keep what the routers said in this file, for `simulate --routing`; nothing is drafted then
    #[arg(long, value_name = "FILE", env = "COLIBRI_SAVE_ROUTING")]
    save_routing: Option<PathBuf>,
    #[command(flatten)]
    pictures: PictureArgs,
    /// Print one JSON object, when all is done
    #[arg(long, env = "COLIBRI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

/// The JSON object.
#[derive(Debug, Serialize)]
struct Report<'a> {
    prompt_ids: &'a [u32],
    token_ids: &'a [u32],
    text: Option<String>,
    finish_reason: &'static str,
    stats: Stats,
}

/// Starts the file of `--save-routing`.
fn recorder(path: &Path, config: &Config) -> anyhow::Result<(Output, Recorder)> {
    let output = Output::create(path, "{\"routing\":")?;
    let header = routing::Header {
        routing: routing::VERSION,
        top_k: config.num_experts_per_tok,
        experts: config.n_routed_experts,
        layers: config.num_hidden_layers,
    };
    let recorder = Recorder::new(Box::new(output.writer()?), &header);
    Ok((output, recorder))
}

/// How long the arithmetic of `tokens` tokens took that came after the prompt.
fn measured(
    prompt: &Option<Vec<(Phase, &'static str, Duration)>>,
    session: &Session,
    tokens: usize,
) -> routing::Event {
    let total = session.stats().phases;
    let before = prompt.as_ref().unwrap_or(&total);
    let arithmetic = total.iter().zip(before);
    let seconds = arithmetic
        .filter(|((phase, ..), _)| *phase != Phase::IoWait)
        .map(|((_, name, spent), (.., before))| {
            ((*name).to_owned(), (*spent - *before).as_secs_f64())
        });
    routing::Event::Measured {
        tokens: tokens as u64,
        seconds: seconds.collect(),
    }
}

/// How many ids of a replay are the prompt.
const REPLAY_PROMPT: usize = 4;

/// A prompt, ready to be fed, and the tokenizer that its continuation is printed with.
#[derive(Debug)]
struct Input {
    prompt: Vec<u32>,
    replay: Option<Vec<u32>>,
    tokenizer: Option<Tokenizer>,
    /// The prompt is the demo model's own, and is printed before what continues it.
    demonstrates: bool,
}

impl Input {
    /// Reads and encodes the prompt, which may come after a text that is there already. Done before the model is loaded, so
    /// that a mistake shows at once.
    fn read(args: &DecodeArgs, after_text: bool) -> anyhow::Result<Input> {
        let dir = &args.model.model[0];
        let tokenizer = Tokenizer::load(dir)?;
        let mut demonstrates = false;
        let (prompt, replay) = if let Some(ids) = &args.prompt_ids {
            (ids.0.clone(), None)
        } else if let Some(path) = &args.replay {
            let mut ids = prompt::verbatim(path)?
                .parse::<Ids>()
                .map_err(anyhow::Error::msg)
                .with_context(|| format!("cannot replay {}", path.display()))?
                .0;
            ensure!(
                ids.len() > REPLAY_PROMPT,
                "cannot replay {}: it has {} token ids, and the first {REPLAY_PROMPT} are the prompt",
                path.display(),
                ids.len()
            );
            let rest = ids.split_off(REPLAY_PROMPT);
            (ids, Some(rest))
        } else if args.kv.kv_append && !args.text.is_given() {
            // The text in the file is the prompt.
            (Vec::new(), None)
        } else {
            // Without a command nobody has meant the standard input for this program.
            let given = if args.demonstrate {
                None
            } else {
                args.text.read()?
            };
            let text = match given {
                Some(text) => text,
                None if args.demonstrate || args.model.demo => {
                    demonstrates = true;
                    demo::PROMPT.to_owned()
                }
                None => super::wrong_usage(
                    "no prompt: give --prompt, --prompt-file, --prompt-ids or --replay, or a standard input that is not empty".into(),
                ),
            };
            let Some(tokenizer) = &tokenizer else {
                bail!("no tokenizer.json in {}: give --prompt-ids", dir.display());
            };
            match (args.chat, after_text) {
                (true, _) => (args.message(tokenizer, &text)?, None),
                // What begins a text has no place within one.
                (false, true) => (tokenizer.encode_plain(&text)?, None),
                (false, false) => (prompt::encode(tokenizer, dir, &text)?, None),
            }
        };
        Ok(Input {
            prompt,
            replay,
            tokenizer,
            demonstrates,
        })
    }

    /// Tokens that come after the prompt: those of a replay, or at most as many as are asked for and fit.
    ///
    /// # Errors
    /// That there is no room in the model's context, in numbers.
    fn new_tokens(&self, args: &DecodeArgs, config: &Config) -> anyhow::Result<usize> {
        let (prompt, context) = (self.prompt.len(), config.max_position_embeddings);
        let limit = "max_position_embeddings of the model";
        ensure!(
            prompt <= context,
            "the prompt has {prompt} tokens, and the context holds {context} ({limit})"
        );
        let room = context - prompt;
        match (self.replay.as_ref().map(Vec::len), args.n) {
            (Some(new), _) => {
                ensure!(
                    new <= room,
                    "the replay has {} tokens, and the context holds {context} ({limit})",
                    prompt.saturating_add(new)
                );
                Ok(new)
            }
            (None, Some(n)) => {
                ensure!(
                    n <= room,
                    "-n {n} is too much: after a prompt of {prompt} tokens there is room for {room}, as the context holds \
                     {context} ({limit})"
                );
                Ok(n)
            }
            (None, None) => Ok(room.min(DEFAULT_NEW)),
        }
    }
}

/// Tokens to generate where nobody says how many.
const DEFAULT_NEW: usize = 128;

impl DecodeArgs {
    /// The ids of a text as the only message of a conversation.
    fn message(&self, tokenizer: &Tokenizer, text: &str) -> anyhow::Result<Vec<u32>> {
        let format = self.template.format(&self.model.model[0])?;
        let system = self.template.system.clone();
        // How much fits is known when the config is.
        Ok(Conversation::new(tokenizer, format, system)
            .ask(text, usize::MAX)?
            .ids)
    }

    /// Ends the program when flags are given that have no meaning without `--chat`. In the environment they are for other commands too.
    fn check_chat(&self) {
        let named = |flag: &str, variable: &str| {
            if std::env::var_os(variable).is_none() {
                super::wrong_usage(format!("{flag} needs --chat"));
            }
        };
        if self.chat {
            return;
        }
        if self.template.system.is_some() {
            named("--system", "COLIBRI_SYSTEM");
        }
        if !self.template.template_var.is_empty() {
            named("--template-var", "COLIBRI_TEMPLATE_VAR");
        }
    }
}

/// Loads the model, generates and prints.
pub fn run(args: &DecodeArgs) -> anyhow::Result<ExitCode> {
    args.check_chat();
    let drafts = drafts(args);
    let indexed = Indexed::open(&args.model)?
        .drafting(drafts)?
        .recording(args.pictures.wanted());
    let mut turn = Turn::open(&args.kv, || indexed.fingerprint(&args.model))?;
    let mut input = Input::read(args, turn.as_ref().is_some_and(Turn::goes_on))?;
    if let Some(turn) = &turn {
        input.prompt = turn.text(input.prompt);
        ensure!(
            !input.prompt.is_empty(),
            "there is nothing to go on with: the file of --kv has no text yet, and no prompt is given"
        );
    }
    let config = indexed.config();
    check_ids(&input.prompt, config.vocab_size)?;
    let new = input.new_tokens(args, config)?;
    let source = match &input.replay {
        Some(ids) => {
            check_ids(ids, config.vocab_size)?;
            Source::Replay(ids.clone())
        }
        None => {
            let defaults = Sampling {
                // A small model repeats itself when it always says the likeliest.
                temperature: if input.demonstrates { 0.7 } else { 0.0 },
                ..Sampling::default()
            };
            let mut sampler = Sampler::new(args.sampling.over(defaults));
            sampler.observe(&input.prompt);
            let mut stop = config.eos_token_ids.clone();
            if let (true, Some(tokenizer)) = (args.chat, &input.tokenizer) {
                stop.extend(template::end_of_message(tokenizer, &args.model.model[0])?);
            }
            Source::Sample {
                sampler: Box::new(sampler),
                max: new,
                stop,
            }
        }
    };
    let tokens = Tokens {
        context: input.prompt.len().saturating_add(new),
        prompt: input.prompt.len() - turn.as_ref().map_or(0, |turn| turn.reusable(&input.prompt)),
    };
    let routing = (args.save_routing.as_deref())
        .map(|path| recorder(path, config))
        .transpose()?;
    let pictures = args.pictures.create()?;
    let (opened, mut store) = indexed.load(&args.model, tokens)?;
    let routing = routing.map(|(file, recorder)| {
        store.record_routing(recorder);
        file
    });
    let mut session = opened.session(store)?;
    let reused = match &mut turn {
        Some(turn) => turn.restore(&mut session, &input.prompt)?,
        None => 0,
    };
    let mut out = if args.json {
        nowhere()
    } else {
        Box::new(io::stdout().lock())
    };
    if input.demonstrates {
        out.write_all(demo::PROMPT.as_bytes())?;
    }
    let mut printer = Printer::new(out, input.tokenizer.as_ref())
        .on_terminal(!args.json && io::stdout().is_terminal());
    let mut prompt_phases = None;
    let unread = input.prompt.len() - reused;
    let reading = progress::reading(&mut session, unread);
    // The last token is never fed.
    let mut drafter = Drafter::new(&mut session, drafts, tokens.context - 1);
    let generated = generate(
        &input.prompt[reused..],
        source,
        |ids| {
            let logits = match drafter.feed(ids) {
                Ok(logits) => Some(logits.to_vec()),
                Err(ModelError::Stopped) => None,
                Err(error) => return Err(anyhow::Error::from(error)),
            };
            prompt_phases.get_or_insert_with(|| {
                reading.finish_and_clear();
                drafter.session().stats().phases
            });
            Ok(logits)
        },
        |id| printer.token(id),
    );
    reading.finish_and_clear();
    let drafted = drafter.finish();
    let generated = generated?;
    opened.keep_usage(&mut session);
    printer.finish()?;
    // What was generated is printed also if it cannot be saved.
    // Without it the next run drafts less.
    if turn.is_some()
        && let Err(error) = session.settle_drafts()
    {
        tracing::debug!("the prediction layer is not up to date: {error}");
    }
    let saved = turn.as_mut().map_or(Ok(()), |turn| {
        turn.save(&session, &input.prompt, &generated.ids, generated.finish)
    });
    if let (Some(file), Some(mut recorder)) = (routing, session.store_mut().take_recorder()) {
        recorder.event(&measured(&prompt_phases, &session, generated.decoded));
        file.keep(recorder.finish())?;
    }
    // Before the statistics, which then count nothing that it lacks.
    let recorded = pictures.take(&mut session, &opened);
    let stats = Stats {
        load_seconds: opened.load_seconds(),
        prefill_seconds: generated.prefill.as_secs_f64(),
        prefilled_tokens: (session.len().min(input.prompt.len()) - reused) as u64,
        reused_tokens: reused as u64,
        kv: turn.as_ref().map(Turn::stats),
        decode_seconds: generated.decode.as_secs_f64(),
        tokens_per_second: rate(&generated),
        peak_rss_bytes: peak_rss_bytes(),
        mtp: Mtp::new(drafts, session.can_draft(), &drafted),
        engine: open::engine_stats(&mut session, &opened),
    };
    let pictured = pictures.write(recorded, &opened, &stats);
    if args.json {
        let text = input.tokenizer.as_ref().map(|t| t.decode(&generated.ids));
        super::print_json(&Report {
            prompt_ids: &input.prompt,
            token_ids: &generated.ids,
            text: text.transpose()?,
            finish_reason: match generated.finish {
                Finish::Length => "length",
                Finish::Stop => "stop",
                Finish::Interrupted => "interrupted",
            },
            stats,
        })?;
    } else {
        summarise(&generated, &stats);
    }
    saved?;
    pictured?;
    Ok(match generated.finish {
        Finish::Interrupted => super::interrupt::exit_code(),
        _ => ExitCode::SUCCESS,
    })
}

/// How many tokens are drafted.
fn drafts(args: &DecodeArgs) -> Mode {
    let one_at_a_time = match (&args.replay, &args.save_routing) {
        (Some(_), _) => "--replay",
        (None, Some(_)) => "--save-routing",
        (None, None) => return args.draft.mtp.0,
    };
    if let Mode::Drafts(_) = args.draft.mtp.0 {
        tracing::warn!("{one_at_a_time} takes one token a pass: --mtp is ignored");
    }
    Mode::Off
}

fn rate(generated: &Generated) -> f64 {
    match generated.decoded {
        0 => 0.0,
        n => n as f64 / generated.decode.as_secs_f64().max(f64::MIN_POSITIVE),
    }
}

/// One line on stderr for people.
fn summarise(generated: &Generated, stats: &Stats) {
    let engine = &stats.engine;
    let demanded = (engine.expert_hits + engine.expert_misses).max(1);
    // Nobody to tell if stderr is closed.
    let _ = writeln!(
        io::stderr(),
        "[{} tokens, {:.2} tok/s; load {:.2} s, prefill {:.2} s; waited {:.2} s for the disk, computed {:.2} s; \
         {} of experts read by {}{}, {:.0}% were in memory; peak {}{}{}{}]",
        generated.ids.len(),
        stats.tokens_per_second,
        stats.load_seconds,
        stats.prefill_seconds,
        engine.io_wait_seconds,
        engine.compute_seconds,
        human(engine.expert_bytes_read),
        engine.engine,
        if engine.direct { " (O_DIRECT)" } else { "" },
        100.0 * engine.expert_hits as f64 / demanded as f64,
        human(stats.peak_rss_bytes),
        match engine.activations {
            Activations::Exact => "",
            Activations::Int8 => "; activations rounded to int8",
        },
        stats.kv.map_or_else(String::new, |kv| format!(
            "; {} tokens reused in {:.2} s, {} computed, saved in {:.2} s: {}",
            stats.reused_tokens,
            kv.restore_seconds,
            stats.prefilled_tokens,
            kv.save_seconds,
            human(kv.file_bytes),
        )),
        match &stats.mtp {
            mtp if mtp.drafted > 0 => format!(
                "; {} of {} drafts came true, {:.2} tokens a pass",
                mtp.accepted, mtp.drafted, mtp.tokens_per_forward
            ),
            _ => String::new(),
        },
    );
}
