//! From a directory to a model that runs: shards, config, memory plan, resident weights, expert store.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, ensure};
use colibri_ring::engine::{EngineKind, Options};
use colibri_ring::replica::DirectMode;
use colibri_uring::config::{Config, IndexerKind};
use colibri_uring::model::{LoadOptions, Model, Phase, Session, SessionOptions};
use colibri_uring::plan::{self, Experts, Needs, Wish};
use colibri_uring::pool::Pool;
use colibri_uring::shards::Shards;
use colibri_uring::stream::{Catalog, ExpertFiles, ExpertStore, Lookahead, StoreOptions};

use super::args::{DirectArg, DsaArg, EngineArg, LookaheadArg, ModelArgs};
use super::interrupt;
use super::size::human;
use super::stats::{EngineStats, Latency, Replica};

/// A loaded model.
#[derive(Debug)]
pub struct Opened {
    start: Instant,
    dirs: Vec<PathBuf>,
    shards: Shards,
    model: Model,
    pool: Pool,
}

impl Opened {
    /// Reads the config and the index, and loads the resident weights.
    pub fn open(args: &ModelArgs) -> anyhow::Result<Opened> {
        let start = Instant::now();
        let config = Config::load(&args.model[0])?;
        let shards = Shards::open_with(&args.model, engine(args.engine))?;
        let options = LoadOptions {
            dsa: args.dsa == DsaArg::On,
        };
        let model = Model::load(&shards, config, options)?;
        Ok(Opened {
            start,
            dirs: args.model.clone(),
            shards,
            model,
            pool: Pool::new(args.threads()),
        })
    }

    /// The resident part.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Seconds since opening began.
    pub fn seconds_since_start(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// An empty context of up to `context` tokens, with an expert store that fits beside it. From here on Ctrl-C asks the
    /// session to stop; before, there is nothing to keep, and it just ends the process.
    pub fn session(&self, args: &ModelArgs, context: usize) -> anyhow::Result<Session<'_>> {
        let config = self.model.config();
        let catalog = Catalog::new(&self.shards, config)?;
        let mut options = SessionOptions::default();
        let files = ExpertFiles::new(&self.shards, catalog, direct(args.direct))?;
        let top_k = config.num_experts_per_tok;
        let needs = self.needs(context, options.scratch_bytes)?;
        let footprints = files.footprints();
        let experts = Experts {
            footprints: &footprints,
            moe_layers: files.moe_layers(),
            top_k,
        };
        let wish = Wish {
            ram: args.ram.map(|size| size.0),
            cache_slots: args.cache_slots,
        };
        let available = plan::available(&plan::Roots::default())?.budget();
        let plan = plan::plan(&needs, experts, wish, available)?;
        if plan.budget > available {
            tracing::warn!(
                "--ram is more than the {} that are available",
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
        let store_options = StoreOptions {
            slots: plan.slots,
            lookahead: lookahead(args.lookahead),
            engine: Options {
                kind: engine(args.engine),
                ..Options::default()
            },
        };
        let store = ExpertStore::new(files, top_k, store_options)?;
        options.stop = Some(interrupt::install().context("cannot handle Ctrl-C")?);
        Ok(Session::new(&self.model, store, &self.pool, options))
    }

    fn needs(&self, context: usize, scratch: usize) -> anyhow::Result<Needs> {
        /// The program itself, its stacks, the queues of the ring.
        const PROGRAM: u64 = 24 << 20;
        /// Bytes of index for a tensor: name, shape, place, hash.
        const INDEX_ENTRY: u64 = 256;
        ensure!(context > 0, "there is nothing to do: no token is given");
        Ok(Needs {
            dense: self.model.resident_bytes(),
            kv: kv_bytes(self.model.config(), context as u64),
            scratch: (scratch as u64).saturating_add(PROGRAM),
            index: self.shards.len() as u64 * INDEX_ENTRY,
        })
    }
}

/// Bytes of KV cache for `context` tokens, with the keys of the layers that have an indexer.
fn kv_bytes(config: &Config, context: u64) -> u64 {
    let indexers = config
        .indexer
        .iter()
        .filter(|kind| **kind == IndexerKind::Full)
        .count();
    let values = (config.num_hidden_layers as u64)
        .saturating_mul(config.kv_width() as u64)
        .saturating_add((indexers as u64).saturating_mul(config.index_head_dim as u64));
    values.saturating_mul(4).saturating_mul(context)
}

fn engine(arg: EngineArg) -> EngineKind {
    match arg {
        EngineArg::Auto => EngineKind::Auto,
        EngineArg::Uring => EngineKind::Uring,
        EngineArg::Pread => EngineKind::Pread,
    }
}

fn direct(arg: DirectArg) -> DirectMode {
    match arg {
        DirectArg::Auto => DirectMode::Auto,
        DirectArg::On => DirectMode::On,
        DirectArg::Off => DirectMode::Off,
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
    let io_wait_name = Phase::ALL
        .iter()
        .find(|(phase, _)| *phase == Phase::IoWait)
        .map(|(_, name)| *name);
    let (mut io_wait_seconds, mut compute_seconds) = (0.0, 0.0);
    for (name, spent) in &phases {
        match Some(*name) == io_wait_name {
            true => io_wait_seconds += spent.as_secs_f64(),
            false => compute_seconds += spent.as_secs_f64(),
        }
    }
    let store = session.store_mut();
    let stream = store.stats().clone();
    let mut stats = EngineStats {
        engine: store.device().to_owned(),
        direct: store.direct(),
        expert_hits: stream.hits,
        expert_misses: stream.misses,
        speculative_reads: stream.speculative_reads,
        speculative_used: stream.speculative_used,
        io_wait_seconds,
        compute_seconds,
        phase_seconds: phases
            .iter()
            .map(|(name, spent)| ((*name).to_owned(), spent.as_secs_f64()))
            .collect(),
        ..EngineStats::default()
    };
    if let Some(reads) = store.read_stats() {
        let latency = &reads.latency_us;
        stats.ring_enters = reads.enters;
        stats.expert_bytes_read = reads.sources.iter().map(|source| source.bytes).sum();
        stats.latency_us = Latency {
            p50: latency.value_at_quantile(0.5),
            p90: latency.value_at_quantile(0.9),
            p99: latency.value_at_quantile(0.99),
            max: latency.max(),
        };
        stats.replicas = (reads.sources.iter().zip(&opened.dirs).enumerate())
            .map(|(i, (source, dir))| Replica {
                dir: dir.clone(),
                files: opened.files_of(i),
                bytes: source.bytes,
                reads: source.reads,
                errors: source.errors,
            })
            .collect();
    }
    stats
}

impl Opened {
    /// Number of shards in the directory with this index.
    fn files_of(&self, dir: usize) -> u64 {
        let files = 0..self.shards.files().len();
        files
            .filter(|&file| self.shards.dir_of(file) == dir)
            .count() as u64
    }
}
