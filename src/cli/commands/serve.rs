//! `serve`: answers requests over HTTP.

use std::fs;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use colibri_uring::runtime::sample::{Generation, Sampling};
use colibri_uring::runtime::template::{ChatTemplate, TemplateError};
use colibri_uring::runtime::tokenizer::Tokenizer;
use colibri_uring::runtime::{Model, RunOptions, TextRunner};
use colibri_uring::serve::http::{self, Access, App, Parts, Served};
use colibri_uring::serve::{Engine, EngineOptions, check_dir};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::cli::args::model::{DraftArgs, ModelArgs};
use crate::cli::args::template::end_of_message;
use crate::cli::commands::load;
use crate::cli::notify::{READY, STOPPING, notify};

/// Serve a model over HTTP with the OpenAI API
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
    colibri-uring serve --model /nvme0/GLM-5.2 --parallel 4
    curl http://127.0.0.1:8080/v1/completions -H 'content-type: application/json' \\
        -d '{\"prompt\": \"The hummingbird\", \"max_tokens\": 32}'

A request gives the same text alone and among others. SIGTERM finishes what runs; a second one ends at once.")]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    draft: DraftArgs,
    /// Address to listen on
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1",
        help_heading = "Server"
    )]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 8080,
        help_heading = "Server"
    )]
    port: u16,
    /// Requests computed together, at most
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..), help_heading = "Server")]
    parallel: u16,
    /// Tokens of a request, prompt and answer [default: 8192, or the model's maximum]
    #[arg(short, long, value_name = "T", value_parser = clap::value_parser!(u32).range(2..), help_heading = "Memory")]
    context: Option<u32>,
    /// Requests that may wait; more get status 429
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Server")]
    queue: u32,
    /// How long the tokens of running requests may wait for a new prompt, in milliseconds
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 500,
        help_heading = "Server"
    )]
    max_stall: u32,
    /// Directory in which beginnings of prompts are kept for the next start, and sequences are swapped
    #[arg(long, value_name = "DIR", help_heading = "Server")]
    kv_dir: Option<PathBuf>,
    /// File with the key that clients have to send; without one, only localhost is served
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    api_key_file: Option<PathBuf>,
    /// Name of the model for clients [default: its directory's]
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    alias: Option<String>,
    /// Log JSON lines
    #[arg(long, help_heading = "Server")]
    pub log_json: bool,
}

/// Tokens of a request without --context, if the model allows as many.
const DEFAULT_CONTEXT: usize = 8192;
/// Tokens of a prompt that are computed at once, if memory allows.
const PREFILL: usize = 2048;

/// Serves until a signal.
pub fn run(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let access = access(args)?;
    if let Some(dir) = &args.kv_dir {
        check_dir(dir).with_context(|| format!("cannot write to --kv-dir {}", dir.display()))?;
    }
    let app: &'static App = Box::leak(Box::new(App::new(access)));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the threads of the server")?;
    let address = format!("{}:{}", args.host, args.port);
    let listener = (runtime.block_on(TcpListener::bind(&address)))
        .with_context(|| format!("cannot listen on {address}"))?;
    let bound = listener.local_addr().context("cannot listen")?;
    let (end, ended) = watch::channel(false);
    let serving = runtime.spawn(http::serve(listener, http::router(app), ended));
    let served = load(args)?;
    app.ready(served);
    announce(bound, args.api_key_file.is_some());
    watch_signals(app, end)?;
    finish(&runtime, serving);
    app.join();
    Ok(ExitCode::SUCCESS)
}

fn access(args: &ServeArgs) -> anyhow::Result<Access> {
    let Some(path) = &args.api_key_file else {
        return Ok(Access::default());
    };
    let text = fs::read_to_string(path)
        .with_context(|| format!("cannot read the key in {}", path.display()))?;
    let key = text.trim();
    ensure!(
        !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic()),
        "{} has no key: write one line of ASCII characters without blanks, as `openssl rand -hex 32` prints it",
        path.display()
    );
    Ok(Access::with_key(key))
}

/// Loads the model and starts its engine.
fn load(args: &ServeArgs) -> anyhow::Result<Served> {
    let dir = &args.model.model[0];
    let opened = load::open(&args.model, args.draft.mtp.0, args.kv_dir.is_some())?;
    let config = opened.model().config().clone();
    let max = config.max_position_embeddings;
    let context = match args.context.map(|context| context as usize) {
        None => max.min(DEFAULT_CONTEXT),
        Some(context) if context <= max => context,
        Some(context) => bail!(
            "--context {context} is not possible: the model allows 2 to {max} tokens (max_position_embeddings)"
        ),
    };
    let tokenizer = Tokenizer::load(dir)?.map(|tokenizer| &*Box::leak(Box::new(tokenizer)));
    let template = match ChatTemplate::load(dir) {
        Ok(template) => Some(template),
        Err(TemplateError::Missing { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let mut stop = config.eos_token_ids.clone();
    if let Some(tokenizer) = tokenizer {
        let end = end_of_message(tokenizer, dir)?;
        stop.extend(end.filter(|id| !stop.contains(id)));
    }
    let generation = Generation::load(dir)?;
    let sampling = match generation == Generation::default() {
        // As in the OpenAI API.
        true => Sampling {
            temperature: 1.0,
            ..Sampling::default()
        },
        false => generation.sampling(),
    };
    let stopping = Arc::<AtomicBool>::default();
    let options = RunOptions {
        sequences: args.parallel.into(),
        stop: Some(Arc::clone(&stopping)),
        swap_dir: args.kv_dir.clone(),
        ..args.model.run_options(context, context.min(PREFILL))
    };
    let (model, runner): (Model, TextRunner) = opened.load_with(&options)?;
    let kept = match &args.kv_dir {
        Some(dir) => Some((dir.clone(), model.fingerprint()?.with(runner.weights()))),
        None => None,
    };
    let options = EngineOptions {
        kept,
        parallel: args.parallel.into(),
        queue: args.queue as usize,
        context,
        max_stall: Duration::from_millis(args.max_stall.into()),
        sources: model.sources(),
    };
    let engine = Engine::start(runner, stopping, options).context("cannot start the engine")?;
    let of_dir = || {
        let dir = fs::canonicalize(dir).unwrap_or_else(|_| dir.clone());
        dir.file_name()
            .map(|name| name.to_string_lossy().into_owned())
    };
    let name = match (&args.alias, args.model.demo) {
        (Some(alias), _) => alias.clone(),
        (None, true) => "demo".into(),
        (None, false) => of_dir().unwrap_or_else(|| "model".into()),
    };
    Ok(Served::new(Parts {
        engine,
        name,
        tokenizer,
        template,
        sampling,
        stop,
        vocabulary: config.vocab_size,
    }))
}

/// Says where the server is.
fn announce(address: SocketAddr, key: bool) {
    // A closed stderr is no reason to end.
    let mut stderr = io::stderr();
    let _ = writeln!(stderr, "listening on http://{address}");
    notify(READY);
    if !key && !address.ip().is_loopback() {
        tracing::warn!(
            "without --api-key-file, clients that use another name than localhost get status 403"
        );
    }
}

/// The first signal lets the running requests end, the second one ends them.
fn watch_signals(app: &'static App, end: watch::Sender<bool>) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot handle signals")?;
    thread::Builder::new()
        .name("drain".into())
        .spawn(move || {
            for (n, _) in signals.forever().enumerate() {
                if n == 0 {
                    tracing::info!("no more requests are taken; those that run are finished");
                    notify(STOPPING);
                    app.drain();
                    // Fails when the server has ended.
                    let _ = end.send(true);
                } else {
                    app.stop();
                }
            }
        })
        .context("cannot handle signals")?;
    Ok(())
}

/// Waits until all requests are answered.
fn finish(runtime: &Runtime, serving: tokio::task::JoinHandle<()>) {
    if let Err(error) = runtime.block_on(serving) {
        tracing::error!("the server has failed: {error}");
    }
}
