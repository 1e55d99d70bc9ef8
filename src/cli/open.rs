//! From a directory to a model that runs: shards, config, memory plan, resident weights, expert store.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Context, ensure};
use colibri_ring::{Options, Stats};
use colibri_uring::config::Config;
use colibri_uring::model::draft::Mode;
use colibri_uring::model::{
    ModelError, Phase, PredictionError, Runner, RunnerOptions, Weights, check_context, prediction,
};
use colibri_uring::pool::Pool;
use colibri_uring::quant::encode::Packing;
use colibri_uring::runtime::kv_file::Fingerprint;
use colibri_uring::runtime::plan::{
    self, MemoryInputs, MemoryOverrides, Plan, PlanError, PlanRequest, Roots,
};
use colibri_uring::shards::Shards;
use colibri_uring::stream::demand_trace;
use colibri_uring::stream::usage::{History, Identity, Usage};
use colibri_uring::stream::{Catalog, ExpertFiles, ExpertStore, StoreOptions};
use colibri_uring::tools::report::machine;
use colibri_uring::weight::shapes::layer_of;

use crate::cli::args::model::{DsaArg, ModelArgs, check_mirrors, weights};
use crate::cli::args::size::human;
use crate::cli::interrupt::{self, Loading};
use crate::cli::output::progress;
use crate::cli::output::stats::{EngineStats, Latency, PrefetchStats, Replica};

/// What has failed when signals cannot be handled.
const HANDLE: &str = "cannot handle Ctrl-C";

/// Tokens that memory is planned for.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    /// Of the whole context.
    pub context: usize,
    /// Of the part of the prompt that has to be computed, which is done at once as far as memory allows.
    pub prompt: usize,
}

impl Tokens {
    /// All of them are the prompt.
    pub fn all_at_once(tokens: usize) -> Tokens {
        Tokens {
            context: tokens,
            prompt: tokens,
        }
    }
}

/// A model of which the config and the index are known, and nothing is loaded.
#[derive(Debug)]
pub struct ModelIndex {
    start: Instant,
    config: Config,
    shards: Shards,
    drafts: Mode,
    /// In what ratio the drives are read.
    weights: Option<Vec<u32>>,
    recorded: bool,
    loading: Loading,
}

impl ModelIndex {
    /// Reads the config and the index.
    pub fn open(args: &ModelArgs) -> anyhow::Result<ModelIndex> {
        check_mirrors(&args.mirror)?;
        let weights = weights(&args.given, args.mirror_weights.as_ref(), &args.mirror)?;
        let start = Instant::now();
        let loading = Loading::begin().context(HANDLE)?;
        let config = Config::load(&args.model[0])?;
        let shards = Shards::open_with(&args.model, &args.mirror, args.engine.into())?;
        // A bad mirror costs speed and not the run.
        for fault in shards.faults() {
            tracing::warn!("{fault}");
        }
        Ok(ModelIndex {
            start,
            config,
            shards,
            drafts: Mode::Off,
            weights: weights.map(<[u32]>::to_vec),
            recorded: false,
            loading,
        })
    }

    /// Whether to record what is read and computed when.
    pub fn recording(mut self, wanted: bool) -> ModelIndex {
        self.recorded = wanted;
        self
    }

    /// Uses the model's layer for multi-token prediction, if there are going to be drafts: in mode auto only where it is complete, and
    /// as long as there is memory for it.
    pub fn drafting(mut self, drafts: Mode) -> anyhow::Result<ModelIndex> {
        self.drafts = drafts;
        if drafts == Mode::Off {
            return Ok(self);
        }
        match (prediction(&self.shards, &self.config), drafts) {
            (Ok(config), _) => self.config = config,
            (Err(PredictionError::Absent { .. }), Mode::Auto) => {}
            (Err(error), Mode::Auto) => tracing::warn!("no drafts: {error}"),
            (Err(error), _) => return Err(error).context("cannot draft"),
        }
        Ok(self)
    }

    /// The hyperparameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the numbers of a cache depend on.
    pub fn fingerprint(&self, args: &ModelArgs) -> anyhow::Result<Fingerprint> {
        let options = args.load_options();
        Ok(Fingerprint::of(
            &self.shards,
            &self.config,
            &options,
            args.expert_bits.map(Packing::from),
        )?)
    }

    /// What the model would need for a context. Nothing is loaded.
    pub fn survey(mut self, args: &ModelArgs, tokens: Tokens) -> anyhow::Result<MemoryInputs> {
        Ok(self.measure(args, tokens)?.0)
    }

    /// The same, and the experts.
    fn measure(
        &mut self,
        args: &ModelArgs,
        tokens: Tokens,
    ) -> anyhow::Result<(MemoryInputs, ExpertFiles)> {
        check_context(&self.config, tokens.context)?;
        let catalog = Catalog::new(&self.shards, &self.config)?;
        let files = ExpertFiles::new(&self.shards, catalog, args.direct.into())?;
        let survey = survey(args, tokens, self, &files);
        let optional = self.drafts == Mode::Auto && self.config.prediction.is_some();
        if optional && matches!(survey.plan(), Err(PlanError::DoesNotFit { .. })) {
            tracing::info!("no drafts: there is no memory for the prediction layer");
            self.config.prediction = None;
            return self.measure(args, tokens);
        }
        Ok((survey, files))
    }

    /// Plans the memory for a context, then loads the resident weights and makes the slabs. In mode auto, a prediction layer that cannot be
    /// loaded is left out. At the end, before there are compute threads, Ctrl-C stops ending the process and asks the runner to
    /// stop.
    pub fn load(
        mut self,
        args: &ModelArgs,
        tokens: Tokens,
    ) -> anyhow::Result<(LoadedModel, ExpertStore)> {
        ensure!(
            tokens.context > 0,
            "there is nothing to do: no token is given"
        );
        let (survey, mut files) = self.measure(args, tokens)?;
        let plan = plan_memory(&survey)?;
        if let Some(weights) = &self.weights {
            files.pin(&self.shards, weights);
        }
        let options = args.load_options();
        let bar = progress::bytes(plan.needs.dense);
        let weights =
            Weights::load_with(&self.shards, self.config.clone(), options, &|done, all| {
                bar.set_length(all);
                bar.set_position(done);
            });
        bar.finish_and_clear();
        let weights = match weights {
            Err(error) if self.drafts == Mode::Auto && self.is_of_prediction(&error) => {
                tracing::warn!("no drafts: {error}");
                self.config.prediction = None;
                return self.load(args, tokens);
            }
            weights => weights?,
        };
        let ModelIndex {
            start,
            config,
            shards,
            loading,
            ..
        } = self;
        let top_k = config.num_experts_per_tok;
        let identity = Identity::of(&shards, &config);
        let record = demand_trace::entries_in(plan.needs.record);
        let store_options = StoreOptions {
            slots: plan.slots,
            lookahead: args.lookahead.into(),
            engine: Options {
                kind: args.engine.into(),
                search: Some(Options::SEARCH),
                record,
                ..Options::default()
            },
        };
        let history = (!args.no_usage).then(|| History::open(&args.model[0], identity));
        let mut store = ExpertStore::new(files, top_k, store_options)?;
        if let Some(usage) = history.as_ref().and_then(History::usage) {
            store.pin(usage, args.pin_share)?;
        }
        store.set_activations(args.activations.into());
        // In this order: a signal in between would find nobody who asks.
        let stop = interrupt::install().context(HANDLE)?;
        drop(loading);
        let pool = Arc::new(Pool::new(args.threads()));
        let load_seconds = start.elapsed().as_secs_f64();
        Ok((
            LoadedModel {
                shards,
                weights: Arc::new(weights),
                pool,
                context: tokens.context,
                history,
                round_experts: args.expert_bits.map(Packing::from),
                scratch_bytes: usize::try_from(plan.needs.scratch)?,
                slice: args.slice(),
                load_seconds,
                record,
                stop,
            },
            store,
        ))
    }

    /// Whether an error is about a tensor of the prediction layer, and that is used.
    fn is_of_prediction(&self, error: &ModelError) -> bool {
        let tensor = match error {
            ModelError::Weight(error) => error.tensor(),
            _ => None,
        };
        let layer = tensor.and_then(layer_of).map(|(layer, _)| layer);
        self.config.prediction.is_some() && layer == Some(self.config.num_hidden_layers)
    }
}

/// What the model needs, and what there is for it.
fn survey(args: &ModelArgs, tokens: Tokens, of: &ModelIndex, files: &ExpertFiles) -> MemoryInputs {
    let ask = PlanRequest {
        context: tokens.context,
        prompt: tokens.prompt.min(args.slice()),
        threads: args.threads(),
        dsa: args.dsa == DsaArg::On,
        drafts: of.drafts.most(),
        dense: args.dense_bits.map(Packing::from),
        round_experts: args.expert_bits.map(Packing::from),
        record: of.recorded,
        wish: MemoryOverrides {
            ram: args.ram.map(|size| size.0),
            cache_slots: args.cache_slots,
        },
    };
    plan::survey(&of.shards, &of.config, files, ask, &Roots::default())
}

/// The slabs and the scratch that fit beside everything else.
fn plan_memory(survey: &MemoryInputs) -> anyhow::Result<Plan> {
    let plan = survey.plan()?;
    if let Ok(available) = &survey.available
        && plan.total > available.budget()
    {
        tracing::warn!(
            "{} are planned, and only {} are available: the process may be killed",
            human(plan.total),
            human(available.budget())
        );
    }
    tracing::info!(
        "memory: {} of {}: {} of resident weights, {} of expert slabs, {} of KV cache, {} of scratch",
        human(plan.total),
        human(plan.budget),
        human(plan.needs.dense),
        human(plan.slots.bytes()),
        human(plan.needs.kv),
        human(plan.needs.scratch),
    );
    Ok(plan)
}

/// A loaded model.
#[derive(Debug)]
pub struct LoadedModel {
    shards: Shards,
    weights: Arc<Weights>,
    pool: Arc<Pool>,
    /// Tokens that there are pages for.
    context: usize,
    history: Option<History>,
    round_experts: Option<Packing>,
    scratch_bytes: usize,
    slice: usize,
    load_seconds: f64,
    /// How many entries are recorded.
    record: usize,
    /// Somebody has asked to stop.
    stop: Arc<AtomicBool>,
}

impl LoadedModel {
    /// Names of the directories that experts are read from, in the order of the statistics.
    pub fn sources(&self) -> Vec<String> {
        let dirs = self.shards.dirs().iter().chain(self.shards.mirrors());
        dirs.map(|dir| dir.display().to_string()).collect()
    }

    /// Its directories, without mirrors.
    pub fn name(&self) -> String {
        machine::listed(self.shards.dirs())
    }

    /// On what it runs, with the drives of all its directories and mirrors.
    pub fn facts(&self) -> Vec<(String, String)> {
        machine::facts(&self.shards.with_copies())
    }

    /// How long opening and loading took.
    pub fn load_seconds(&self) -> f64 {
        self.load_seconds
    }

    /// Adds what a session used to the history of the model. After an error it is not asked to: the drive may be what failed.
    pub fn keep_usage(&self, runner: &mut Runner) {
        if let Some(history) = &self.history {
            history.keep(runner.store_mut().usage());
        }
    }

    /// An empty context, of which a call soon ends when somebody has asked to stop.
    pub fn runner(&self, store: ExpertStore) -> Runner {
        let options = RunnerOptions {
            stop: Some(self.stop.clone()),
            scratch_bytes: self.scratch_bytes,
            slice: self.slice,
            round_experts: self.round_experts,
            kv_tokens: Some(self.context),
            ..RunnerOptions::default()
        };
        let (weights, pool) = (Arc::clone(&self.weights), Arc::clone(&self.pool));
        let mut runner = Runner::new(weights, store, pool, options);
        if self.record > 0 {
            runner.record_timeline(self.record);
        }
        runner
    }
}

/// What reading and computing has cost so far.
pub fn engine_stats(runner: &mut Runner, opened: &LoadedModel) -> EngineStats {
    let phases = runner.stats().phases;
    let seconds = |waiting: bool| -> f64 {
        let of_kind = phases
            .iter()
            .filter(|(phase, ..)| (*phase == Phase::IoWait) == waiting);
        of_kind.map(|(_, _, spent)| spent.as_secs_f64()).sum()
    };
    let store = runner.store_mut();
    let stream = store.stats();
    let mut stats = EngineStats {
        engine: store.device().to_owned(),
        activations: store.activations(),
        expert_hits: stream.hits,
        expert_misses: stream.misses,
        speculative_reads: stream.speculative_reads,
        speculative_used: stream.speculative_used,
        pinned: stream.pinned,
        usage_runs: (opened.history.as_ref())
            .and_then(History::usage)
            .map_or(0, Usage::runs),
        lookahead: stream.lookahead.iter().map(PrefetchStats::from).collect(),
        io_wait_seconds: seconds(true),
        compute_seconds: seconds(false),
        phase_seconds: phases
            .iter()
            .map(|(_, name, spent)| ((*name).to_owned(), spent.as_secs_f64()))
            .collect(),
        ..EngineStats::default()
    };
    if let Some(reads) = store.read_stats() {
        let latency = &reads.latency_us;
        stats.direct = reads.direct;
        stats.ring_enters = reads.syscalls;
        stats.window_bytes = reads.windows.clone();
        stats.expert_bytes_read = reads.bytes();
        stats.latency_us = Latency {
            p50: latency.value_at_quantile(0.5),
            p90: latency.value_at_quantile(0.9),
            p99: latency.value_at_quantile(0.99),
            max: latency.max(),
        };
        stats.replicas = opened.replicas(&reads);
    }
    stats
}

impl LoadedModel {
    /// What was read from each directory of the model and from each mirror.
    fn replicas(&self, reads: &Stats) -> Vec<Replica> {
        let shards = &self.shards;
        let files = 0..shards.files().len();
        let dirs = shards.dirs().iter().enumerate().map(|(i, dir)| {
            let has = |file: &usize| shards.dir_of(*file) == i;
            (dir, files.clone().filter(has).count())
        });
        let mirrors = shards.mirrors().iter().enumerate().map(|(i, dir)| {
            let has = |file: &usize| shards.copies(*file).iter().any(|copy| copy.mirror == i);
            (dir, files.clone().filter(has).count())
        });
        (dirs.chain(mirrors).enumerate())
            .map(|(source, (dir, files))| {
                // The last mirrors have no entry when they serve no file.
                let read = reads.sources.get(source).copied().unwrap_or_default();
                Replica {
                    dir: dir.display().to_string(),
                    files: files as u64,
                    bytes: read.bytes,
                    reads: read.reads,
                    errors: read.errors,
                }
            })
            .collect()
    }
}
