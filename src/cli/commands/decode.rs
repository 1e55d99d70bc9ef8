//! `decode`: continue a prompt.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::ensure;
use clap::builder::FalseyValueParser;
use clap::{ArgGroup, Args};
use colibri_uring::model::draft::Mode;
use colibri_uring::runtime::generate::{Finish, Source};
use colibri_uring::runtime::sample::{Sampler, Sampling};
use colibri_uring::runtime::tokenizer::check_ids;
use colibri_uring::runtime::{RunOptions, demo};
use serde::Serialize;

use crate::cli::args::WrongUsage;
use crate::cli::args::model::{DraftArgs, Ids, ModelArgs};
use crate::cli::args::prompt::PromptArgs;
use crate::cli::args::sampling::SamplingArgs;
use crate::cli::args::template::{self, TemplateArgs};
use crate::cli::commands::generation::{GenerationOutcome, GenerationRun};
use crate::cli::commands::kv::{KvArgs, Turn};
use crate::cli::commands::load::{self, Loaded};
use crate::cli::output::printer::{Printer, nowhere};
use crate::cli::output::stats::{EngineStats, Mtp, Stats, peak_rss_bytes};
use crate::cli::output::trace_outputs::TraceArgs;

mod input;
mod recording;
mod summary;

use input::Input;
use recording::{measured, recorder};
use summary::{rate, summarise};

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
    pub model: ModelArgs,
    /// Whether the demo model's own prompt is taken when none is given, without looking for one anywhere.
    #[arg(skip)]
    pub demonstrate: bool,
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
    traces: TraceArgs,
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

impl DecodeArgs {
    /// Whether the flag of this field is on the command line.
    fn given(&self, field: &str) -> bool {
        self.model.given.has(field)
    }

    /// Fails when flags are given that have no meaning without `--chat`. In the environment they are for other commands too.
    fn check_chat(&self) -> Result<(), WrongUsage> {
        for (field, flag) in [("system", "--system"), ("template_var", "--template-var")] {
            if self.given(field) && !self.chat {
                return Err(WrongUsage(format!("{flag} needs --chat")));
            }
        }
        Ok(())
    }

    /// The file of `--save-routing`. Its variable gives way to drafts that are asked for on the command line.
    fn save_routing(&self) -> Option<&Path> {
        let drafts = self.given("mtp") && self.draft.mtp.0 != Mode::Off;
        let gives_way = drafts && !self.given("save_routing");
        self.save_routing.as_deref().filter(|_| !gives_way)
    }

    /// How many tokens are drafted. The variable of `--mtp` gives way to what takes one token a pass.
    fn drafts(&self) -> Mode {
        let one_at_a_time = match (&self.replay, self.save_routing()) {
            (Some(_), _) => "--replay",
            (None, Some(_)) => "--save-routing",
            (None, None) => return self.draft.mtp.0,
        };
        if self.given("mtp") && matches!(self.draft.mtp.0, Mode::Drafts(_)) {
            tracing::warn!("{one_at_a_time} takes one token a pass: --mtp is ignored");
        }
        Mode::Off
    }
}

/// Loads the model, generates and prints.
pub fn run(args: &DecodeArgs) -> anyhow::Result<ExitCode> {
    args.check_chat()?;
    let drafts = args.drafts();
    let opened = load::open(&args.model, drafts)?;
    // Before the file of --kv, which stays as it is where one of these cannot be.
    let (traces, routing) = (args.traces).create(args.save_routing(), args.kv.kv.as_deref())?;
    let mut turn = Turn::open(&args.kv, || Ok(opened.model().fingerprint()?))?;
    let mut input = Input::read(args, turn.as_ref().is_some_and(Turn::goes_on))?;
    if let Some(turn) = &turn {
        input.prompt = turn.text(input.prompt);
        ensure!(
            !input.prompt.is_empty(),
            "there is nothing to go on with: the file of --kv has no text yet, and no prompt is given"
        );
    }
    let config = opened.model().config();
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
    let context = input.prompt.len().saturating_add(new);
    let reusable = turn.as_ref().map_or(0, |turn| turn.reusable(&input.prompt));
    let options = RunOptions {
        record: args.traces.wanted(),
        ..(args.model).run_options(context, input.prompt.len() - reusable)
    };
    let routing = routing
        .map(|file| recorder(&file, config).map(|recorder| (file, recorder)))
        .transpose()?;
    let Loaded {
        model,
        mut runner,
        load_seconds,
    } = opened.load(options)?;
    let routing = routing.map(|(file, recorder)| {
        runner.store_mut().record_routing(recorder);
        file
    });
    let mut sequence = runner.sequence();
    let reused = match &mut turn {
        Some(turn) => turn.restore(&mut runner, &mut sequence, &input.prompt)?,
        None => 0,
    };
    let out = if args.json {
        nowhere()
    } else {
        Box::new(io::stdout().lock())
    };
    let printer = Printer::new(out, input.tokenizer.as_ref())
        .on_terminal(!args.json && io::stdout().is_terminal());
    let GenerationOutcome {
        generated,
        drafted,
        prompt_phases,
        failed,
    } = GenerationRun {
        prompt: &input.prompt[reused..],
        source,
        drafts,
        limit: context,
        printer,
        opening: input.demonstrates.then_some(demo::PROMPT),
        silent: &[],
    }
    .run(&mut runner, &mut sequence);
    let (new, finish) = (&generated.ids, generated.finish);
    // What was generated is printed also if it cannot be saved, and saved also if it cannot be printed. A prompt that could not be
    // computed takes nothing away from what there is.
    let nothing = failed.is_some() && finish == Finish::Interrupted && new.is_empty();
    let saved = match &mut turn {
        Some(turn) if !nothing => turn.save(&mut runner, &mut sequence, &input.prompt, new, finish),
        _ => Ok(()),
    };
    if let Some(error) = failed {
        saved?;
        return Err(error);
    }
    runner.save_usage();
    let routed = match (routing, runner.store_mut().take_recorder()) {
        (Some(file), Some(mut recorder)) => {
            recorder.event(&measured(&prompt_phases, &runner, generated.decoded));
            file.keep(recorder.finish())
        }
        _ => Ok(()),
    };
    // Before the statistics, which then count nothing that it lacks.
    let recorded = traces.take(&mut runner, &model);
    let stats = Stats {
        load_seconds,
        prefill_seconds: generated.prefill.as_secs_f64(),
        prefilled_tokens: (sequence.len().min(input.prompt.len()) - reused) as u64,
        reused_tokens: reused as u64,
        kv: turn.as_ref().map(Turn::stats),
        decode_seconds: generated.decode.as_secs_f64(),
        tokens_per_second: rate(&generated),
        peak_rss_bytes: peak_rss_bytes(),
        mtp: Mtp::new(drafts, sequence.can_draft(), &drafted),
        engine: EngineStats::new(&mut runner, &model),
    };
    let pictured = traces.write(recorded, &model, &stats);
    let told = if args.json {
        let text = input.tokenizer.as_ref().map(|t| t.decode(&generated.ids));
        crate::cli::output::print_json(&Report {
            prompt_ids: &input.prompt,
            token_ids: &generated.ids,
            text: text.transpose()?,
            finish_reason: match generated.finish {
                Finish::Length => "length",
                Finish::Stop => "stop",
                Finish::Interrupted => "interrupted",
            },
            stats,
        })
    } else {
        summarise(&generated, &stats);
        Ok(())
    };
    saved?;
    routed?;
    pictured?;
    told?;
    Ok(match generated.finish {
        Finish::Interrupted => crate::cli::interrupt::exit_code(),
        _ => ExitCode::SUCCESS,
    })
}
