//! `decode`: continues a prompt.

use std::process::ExitCode;

use anyhow::ensure;
use colibri_uring::runtime::generate::{Finish, Source};
use colibri_uring::runtime::sample::{Sampler, Sampling};
use colibri_uring::runtime::tokenizer::check_ids;
use colibri_uring::runtime::{RunOptions, demo};
use serde::Serialize;

use crate::cli::args::template;
use crate::cli::commands::generation::{GenerationOutcome, GenerationRun};
use crate::cli::commands::kv::Turn;
use crate::cli::commands::load::{self, LoadedModel};
use crate::cli::output::printer::{Printer, nowhere, print_json, stdout};
use crate::cli::output::stats::{EngineStats, Mtp, Stats, peak_rss_bytes};
use crate::cli::output::trace_outputs::TraceOutputs;

mod args;
mod input;
mod recording;
mod schema;
mod summary;

pub use args::DecodeArgs;
use input::Input;
pub use input::SavedText;
use recording::{measured, recorder};
use summary::{rate, summarise};

/// The JSON object.
#[derive(Debug, Serialize)]
struct Report<'a> {
    prompt_ids: &'a [u32],
    token_ids: &'a [u32],
    text: Option<String>,
    finish_reason: &'static str,
    stats: Stats,
}

/// Loads the model, generates and prints.
pub fn run(args: &DecodeArgs) -> anyhow::Result<ExitCode> {
    args.check_chat()?;
    let drafts = args.drafts();
    let opened = load::open(&args.model, drafts, args.kv.kv.is_some())?;
    // Before the file of --kv, which an error here must not touch.
    let (traces, routing) = TraceOutputs::create(
        args.traces.trace.as_deref(),
        args.traces.report.as_deref(),
        args.save_routing.as_deref(),
        args.kv.kv.as_deref(),
    )?;
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
    let new = input.new_tokens(args, config, turn.as_ref().and_then(Turn::saved_text))?;
    let source = match &input.replay {
        Some(ids) => {
            check_ids(ids, config.vocab_size)?;
            Source::Replay(ids.clone())
        }
        None => {
            let defaults = Sampling {
                // The demo model repeats itself at temperature 0.
                temperature: if input.demonstrates { 0.7 } else { 0.0 },
                ..Sampling::default()
            };
            let mut sampler = Sampler::new(args.sampling.over(defaults));
            sampler.observe(&input.prompt);
            let mut stop = config.eos_token_ids.clone();
            if let (true, Some(tokenizer)) = (args.chat, &input.tokenizer) {
                stop.extend(template::end_of_message(tokenizer, &args.model.model[0])?);
                input.ends.retain(|id| !stop.contains(id));
                stop.extend(&input.ends);
            }
            if let Some(path) = &args.json_schema {
                let constraint = schema::constraint(
                    path,
                    input.tokenizer.as_ref(),
                    &args.model.model[0],
                    config.vocab_size,
                    &stop,
                )?;
                sampler = sampler.constrained(constraint);
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
    let LoadedModel {
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
    let printer = match args.json {
        true => Printer::new(nowhere(), input.tokenizer.as_ref()),
        false => Printer::new(stdout(), input.tokenizer.as_ref()).on_stdout(),
    };
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
        silent: &input.ends,
    }
    .run(&mut runner, &mut sequence);
    let (new, finish) = (&generated.ids, generated.finish);
    // Print even if saving fails, and save even if printing fails. A prompt that failed leaves the file unchanged.
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
    // Before the statistics, so that they count nothing beyond the recording.
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
        let shown = match generated.ids.split_last() {
            Some((last, said)) if input.ends.contains(last) => said,
            _ => &generated.ids,
        };
        let text = input.tokenizer.as_ref().map(|t| t.decode(shown));
        print_json(&Report {
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
