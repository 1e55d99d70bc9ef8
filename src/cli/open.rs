//! From a directory to a model that runs: shards, config, memory plan, resident weights, expert store.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::{Args, FromArgMatches};
use colibri_ring::engine::Options;
use colibri_ring::replica::Stats;
use colibri_uring::config::Config;
use colibri_uring::model::{
    LoadOptions, Model, Phase, Session, SessionOptions, kv_bytes, resident_bytes, scores_bytes,
};
use colibri_uring::plan::{self, Experts, Needs, Wish};
use colibri_uring::pool::Pool;
use colibri_uring::shards::Shards;
use colibri_uring::stream::slots::Slots;
use colibri_uring::stream::{Catalog, ExpertFiles, ExpertStore, Lookahead, StoreOptions};

use super::args::{DsaArg, LookaheadArg, ModelArgs, check_mirrors, check_weights};
use super::interrupt;
use super::size::human;
use super::stats::{EngineStats, Foreseen, Latency, Replica};

/// A model of which the config and the index are known, and nothing is loaded.
#[derive(Debug)]
pub struct Indexed {
    start: Instant,
    config: Config,
    shards: Shards,
}

impl Indexed {
    /// Reads the config and the index.
    pub fn open(args: &ModelArgs) -> anyhow::Result<Indexed> {
        check_mirrors(&args.mirror);
        check_weights(args.mirror_weights.as_ref(), &args.mirror);
        let start = Instant::now();
        let config = Config::load(&args.model[0])?;
        let shards = Shards::open_with(&args.model, &args.mirror, args.engine.into())?;
        Ok(Indexed {
            start,
            config,
            shards,
        })
    }

    /// The hyperparameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Plans the memory for a context of up to `context` tokens, then loads the resident weights and makes the slabs.
    pub fn load(self, args: &ModelArgs, context: usize) -> anyhow::Result<(Opened, ExpertStore)> {
        let Indexed {
            start,
            config,
            shards,
        } = self;
        let catalog = Catalog::new(&shards, &config)?;
        let mut files = ExpertFiles::new(&shards, catalog, args.direct.into())?;
        if let Some(weights) = &args.mirror_weights {
            files.pin(&shards, &weights.0);
        }
        let slots = plan_slots(args, context, &shards, &config, &files)?;
        let top_k = config.num_experts_per_tok;
        let options = LoadOptions {
            dsa: args.dsa == DsaArg::On,
        };
        let model = Model::load(&shards, config, options)?;
        let store_options = StoreOptions {
            slots,
            lookahead: lookahead(args.lookahead),
            engine: Options {
                kind: args.engine.into(),
                ..Options::default()
            },
        };
        let store = ExpertStore::new(files, top_k, store_options)?;
        let pool = Pool::new(args.threads());
        let load_seconds = start.elapsed().as_secs_f64();
        Ok((
            Opened {
                shards,
                model,
                pool,
                load_seconds,
            },
            store,
        ))
    }
}

/// How many slabs decoding with the models' directories would have if nothing else were said on the command line.
pub fn default_slabs(
    model: &[PathBuf],
    shards: &Shards,
    config: &Config,
    files: &ExpertFiles,
) -> anyhow::Result<u64> {
    /// Tokens: a short conversation.
    const CONTEXT: usize = 4096;
    let mut given = vec!["".into(), "--model".into()];
    given.extend(model.iter().map(|dir| dir.as_os_str().to_owned()));
    let command = ModelArgs::augment_args(clap::Command::new(""));
    let args = ModelArgs::from_arg_matches(&command.try_get_matches_from(given)?)?;
    let slots = plan_slots(&args, CONTEXT, shards, config, files)?;
    Ok(slots.classes.iter().map(|class| class.count as u64).sum())
}

/// The slabs that fit beside everything else.
fn plan_slots(
    args: &ModelArgs,
    context: usize,
    shards: &Shards,
    config: &Config,
    files: &ExpertFiles,
) -> anyhow::Result<Slots> {
    /// The program itself, its stacks, the queues of the ring.
    const PROGRAM: u64 = 24 << 20;
    /// Bytes of index for a tensor: name, shape, place, hash.
    const INDEX_ENTRY: u64 = 256;
    ensure!(context > 0, "there is nothing to do: no token is given");
    let scratch = SessionOptions::default().scratch_bytes as u64;
    let needs = Needs {
        dense: resident_bytes(shards, config),
        kv: kv_bytes(config, args.dsa == DsaArg::On, context),
        scratch: scratch
            .saturating_add(PROGRAM)
            .saturating_add(scores_bytes(args.threads(), context)),
        index: shards.len() as u64 * INDEX_ENTRY,
    };
    let footprints = files.footprints();
    let experts = Experts {
        footprints: &footprints,
        moe_layers: files.moe_layers(),
        top_k: config.num_experts_per_tok,
    };
    let wish = Wish {
        ram: args.ram.map(|size| size.0),
        cache_slots: args.cache_slots,
    };
    // What is not known bounds nothing that was given explicitly.
    let available = match (plan::available(&plan::Roots::default()), args.ram) {
        (Ok(available), _) => available.budget(),
        (Err(_), Some(ram)) => ram.0,
        (Err(e), None) => return Err(e).context("give --ram"),
    };
    let plan = plan::plan(&needs, experts, wish, available)?;
    if plan.total > available {
        tracing::warn!(
            "{} are planned, and only {} are available: the process may be killed",
            human(plan.total),
            human(available)
        );
    }
    tracing::info!(
        "memory: {} of {}: {} of resident weights, {} of expert slabs, {} of KV cache",
        human(plan.total),
        human(plan.budget),
        human(needs.dense),
        human(plan.slots.bytes()),
        human(needs.kv),
    );
    Ok(plan.slots)
}

/// A loaded model.
#[derive(Debug)]
pub struct Opened {
    shards: Shards,
    model: Model,
    pool: Pool,
    load_seconds: f64,
}

impl Opened {
    /// How long opening and loading took.
    pub fn load_seconds(&self) -> f64 {
        self.load_seconds
    }

    /// An empty context. From here on Ctrl-C asks the session to stop; before, there is nothing to keep, and it just
    /// ends the process.
    pub fn session(&self, store: ExpertStore) -> anyhow::Result<Session<'_>> {
        let stop = interrupt::install().context("cannot handle Ctrl-C")?;
        let options = SessionOptions {
            stop: Some(stop),
            ..SessionOptions::default()
        };
        Ok(Session::new(&self.model, store, &self.pool, options))
    }
}

fn lookahead(arg: LookaheadArg) -> Lookahead {
    match arg {
        LookaheadArg::Auto => Lookahead::Auto,
        LookaheadArg::Off => Lookahead::Off,
        LookaheadArg::Experts(n) => Lookahead::Experts(n as usize),
    }
}

/// What reading and computing has cost so far.
pub fn engine_stats(session: &mut Session, opened: &Opened) -> EngineStats {
    let phases = session.stats().phases;
    let seconds = |waiting: bool| -> f64 {
        let of_kind = phases
            .iter()
            .filter(|(phase, ..)| (*phase == Phase::IoWait) == waiting);
        of_kind.map(|(_, _, spent)| spent.as_secs_f64()).sum()
    };
    let store = session.store_mut();
    let stream = store.stats();
    let mut stats = EngineStats {
        engine: store.device().to_owned(),
        expert_hits: stream.hits,
        expert_misses: stream.misses,
        speculative_reads: stream.speculative_reads,
        speculative_used: stream.speculative_used,
        lookahead: stream.lookahead.iter().map(Foreseen::from).collect(),
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
        stats.ring_enters = reads.enters;
        stats.expert_bytes_read = reads.sources.iter().map(|source| source.bytes).sum();
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

impl Opened {
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
