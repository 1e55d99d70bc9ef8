//! Opens a model directory and makes runners of it: index, memory plan, resident weights, expert store.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytesize::ByteSize;
use colibri_ring::Options;

use crate::arch::{Architecture, TensorId};
use crate::model::draft::Mode;
use crate::model::{
    ModelError, PAGE, PredictionError, Runner, RunnerOptions, Weights, check_context, prediction,
};
use crate::pool::Pool;
use crate::runtime::error::OpenError;
use crate::runtime::kv_file::Fingerprint;
use crate::runtime::options::{LoadStage, ModelOptions, RunOptions};
use crate::runtime::plan::{
    self, MemoryInputs, MemoryOverrides, Plan, PlanError, PlanRequest, Roots,
};
use crate::runtime::text_runner::TextRunner;
use crate::runtime::tokenizer::{LazyTokenizer, Tokenizer, TokenizerError};
use crate::shards::{Findings, Severity, ShardError, Shards};
use crate::stream::usage::{History, Identity};
use crate::stream::{Catalog, ExpertFiles, ExpertStore, StoreOptions, demand_trace};
use crate::weight;

/// A model directory: hyperparameters and index. The first runner loads the resident weights; later ones share them.
#[derive(Debug)]
pub struct Model {
    options: ModelOptions,
    /// With the prediction layer, where it is going to be used.
    config: Architecture,
    shards: Shards,
    findings: Findings,
    tokenizer: Arc<LazyTokenizer>,
    weights: Mutex<Option<Arc<Weights>>>,
}

/// A directory that experts are read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Its path.
    pub dir: PathBuf,
    /// Shards in it that belong to the model.
    pub files: usize,
}

impl Model {
    /// Reads the hyperparameters and the index of the model in `dir`. Loads no weights.
    ///
    /// # Errors
    /// [`OpenError`]: a file that cannot be read or does not describe a supported model, or drafts that are insisted on and not possible.
    /// A damaged mirror is a warning.
    pub fn open(dir: impl AsRef<Path>, options: &ModelOptions) -> Result<Model, OpenError> {
        let dirs = [&[dir.as_ref().to_owned()], &options.more_dirs[..]].concat();
        let drives = options.mirrors.len() + 1;
        if let Some(weights) = &options.mirror_weights
            && weights.len() != drives
        {
            let weights = weights.len();
            return Err(OpenError::MirrorWeights { weights, drives });
        }
        let mut config = Architecture::load(&dirs[0])?;
        let mut shards = Shards::open_partial(&dirs, &options.mirrors, options.engine)?;
        let findings = weight::findings(&shards, &config)?;
        let errors = findings.errors();
        if !errors.is_empty() {
            return Err(OpenError::NotWhole(errors));
        }
        let warnings = findings.only(&[Severity::Warning]);
        if !warnings.is_empty() {
            tracing::warn!("{warnings}");
        }
        shards.refuse_other_weights();
        for fault in shards.faults() {
            tracing::warn!("{fault}");
        }
        if options.round_experts.is_some() && config.experts.in_pairs() {
            let model_type = config.model_type;
            return Err(OpenError::RoundedPairs { model_type });
        }
        if options.drafts != Mode::Off {
            match (prediction(&shards, &config), options.drafts) {
                (Ok(with), _) => config = with,
                (
                    Err(PredictionError::Family { .. } | PredictionError::Absent { .. }),
                    Mode::Auto,
                ) => {}
                (Err(error), Mode::Auto) => tracing::warn!("no drafts: {error}"),
                (Err(error), _) => return Err(OpenError::Drafts(error)),
            }
        }
        Ok(Model {
            options: options.clone(),
            config,
            shards,
            findings,
            tokenizer: Arc::new(LazyTokenizer::new(&dirs[0])),
            weights: Mutex::new(None),
        })
    }

    /// The hyperparameters.
    pub fn config(&self) -> &Architecture {
        &self.config
    }

    /// The index.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Warnings and notes about its tensors and files: none keeps it from running.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// The model's `tokenizer.json`, read at the first call.
    ///
    /// # Errors
    /// [`TokenizerError::Missing`], and a file that cannot be used.
    pub fn tokenizer(&self) -> Result<&Tokenizer, TokenizerError> {
        self.tokenizer.get()
    }

    /// Identifies the model and every option that changes a number, for KV files.
    ///
    /// # Errors
    /// A shard that cannot be read.
    pub fn fingerprint(&self) -> Result<Fingerprint, ShardError> {
        let options = self.options.load_options();
        Fingerprint::of(
            &self.shards,
            &self.config,
            &options,
            self.options.round_experts,
        )
    }

    /// The directories and mirrors that experts are read from, in the order of the statistics of reads.
    pub fn sources(&self) -> Vec<Source> {
        let shards = &self.shards;
        let files =
            |has: &dyn Fn(usize) -> bool| (0..shards.files().len()).filter(|f| has(*f)).count();
        let dirs = shards.dirs().iter().enumerate().map(|(i, dir)| Source {
            dir: dir.clone(),
            files: files(&|file| shards.dir_of(file) == i),
        });
        let mirrors = shards.mirrors().iter().enumerate().map(|(i, dir)| Source {
            dir: dir.clone(),
            files: files(&|file| shards.copies(file).iter().any(|copy| copy.mirror == i)),
        });
        dirs.chain(mirrors).collect()
    }

    /// What a runner needs in memory, and what is available. Loads nothing.
    ///
    /// # Errors
    /// A context longer than the model allows, and experts that are incomplete or cannot be read with O_DIRECT.
    pub fn memory(&self, options: &RunOptions) -> Result<MemoryInputs, OpenError> {
        let mut config = self.config.clone();
        Ok(self.measure(&mut config, options, false)?.0)
    }

    /// The memory of a runner, and the files of its experts. Weights that are `loaded` count as free. Otherwise removes the prediction
    /// layer from `config` where it is optional and does not fit.
    fn measure(
        &self,
        config: &mut Architecture,
        options: &RunOptions,
        loaded: bool,
    ) -> Result<(MemoryInputs, ExpertFiles), OpenError> {
        let (context, prompt) = options.tokens(config.max_position_embeddings);
        check_context(config, context)?;
        let catalog = Catalog::new(&self.shards, config)?;
        let files = ExpertFiles::new(&self.shards, catalog, self.options.direct)?;
        let request = PlanRequest {
            context,
            sequences: options.sequences,
            prompt: prompt.min(options.slice),
            threads: self.options.threads(),
            dsa: self.options.dsa,
            drafts: self.options.drafts.most(),
            dense: self.options.dense,
            round_experts: self.options.round_experts,
            record: options.record,
            overrides: MemoryOverrides {
                ram: options.ram,
                cache_slots: options.cache_slots,
            },
        };
        let mut inputs = plan::survey(&self.shards, config, &files, request, &Roots::default());
        if loaded {
            inputs.needs.dense = 0;
            return Ok((inputs, files));
        }
        let optional = self.options.drafts == Mode::Auto && config.prediction.is_some();
        if optional && matches!(inputs.plan(), Err(PlanError::DoesNotFit { .. })) {
            tracing::info!("no drafts: there is no memory for the prediction layer");
            config.prediction = None;
            return self.measure(config, options, loaded);
        }
        Ok((inputs, files))
    }

    /// Plans memory, loads the resident weights unless another runner has, and makes the expert store and its slabs. With
    /// [`Mode::Auto`], a prediction layer that cannot be loaded is left out with a warning.
    ///
    /// # Errors
    /// [`OpenError`]: among others a model that does not fit into memory, and a tensor that is missing or damaged.
    pub fn runner(&self, options: &RunOptions) -> Result<TextRunner, OpenError> {
        if options.context == Some(0) {
            return Err(OpenError::NoTokens);
        }
        // Held while loading, so that two runners at once load once.
        let mut shared = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let mut config = shared.as_ref().map_or(&self.config, |w| w.config()).clone();
        let (weights, plan, files) = loop {
            let (inputs, files) = self.measure(&mut config, options, shared.is_some())?;
            let plan = checked_plan(&inputs)?;
            if let Some(weights) = &*shared {
                break (weights.clone(), plan, files);
            }
            match self.load_weights(&config) {
                Ok(weights) => break (Arc::new(weights), plan, files),
                Err(error) if self.can_leave_out_prediction(&config, &error) => {
                    tracing::warn!("no drafts: {error}");
                    config.prediction = None;
                }
                Err(error) => return Err(error.into()),
            }
        };
        *shared = Some(weights.clone());
        drop(shared);
        self.assemble(weights, &plan, files, options)
    }

    fn load_weights(&self, config: &Architecture) -> Result<Weights, ModelError> {
        let progress = |done, all| self.report(LoadStage::Weights { done, all });
        let options = self.options.load_options();
        let shards = &self.shards;
        if (0..shards.files().len()).any(|file| shards.is_synthetic(file)) {
            tracing::warn!(
                "the weights of {} are synthetic, zeros for the most part: the text means nothing",
                shards.dirs()[0].display()
            );
        }
        Weights::load_with(shards, config.clone(), options, &progress)
    }

    fn report(&self, stage: LoadStage) {
        if let Some(progress) = &self.options.progress {
            progress.call(stage);
        }
    }

    /// Whether an error is about a tensor of the prediction layer, and that is optional.
    fn can_leave_out_prediction(&self, config: &Architecture, error: &ModelError) -> bool {
        let tensor = match error {
            ModelError::Weight(error) => error.tensor(),
            _ => None,
        };
        let id = tensor.and_then(|name| weight::id_of(config, name));
        let layer = id.and_then(TensorId::layer);
        self.options.drafts == Mode::Auto
            && config.prediction.is_some()
            && layer == Some(config.num_hidden_layers())
    }

    /// Makes what a runner has besides the weights.
    fn assemble(
        &self,
        weights: Arc<Weights>,
        plan: &Plan,
        mut files: ExpertFiles,
        options: &RunOptions,
    ) -> Result<TextRunner, OpenError> {
        if let Some(ratio) = &self.options.mirror_weights {
            files.pin(&self.shards, ratio);
        }
        let config = weights.config();
        let record = demand_trace::entries_in(plan.needs.record);
        let store_options = StoreOptions {
            slots: plan.slots.clone(),
            lookahead: options.lookahead,
            engine: Options {
                kind: self.options.engine,
                search: Some(Options::SEARCH),
                record,
                ..Options::default()
            },
        };
        let identity = Identity::of(&self.shards, config);
        let history = (options.usage).then(|| History::open(&self.shards.dirs()[0], identity));
        let mut store = ExpertStore::new(files, config.router.top_k, store_options)?;
        if let Some(usage) = history.as_ref().and_then(History::usage) {
            store.pin(usage, options.pin_share)?;
        }
        store.set_activations(self.options.activations);
        self.report(LoadStage::Complete);
        let pool = Arc::new(Pool::new(self.options.threads()));
        let (context, _) = options.tokens(config.max_position_embeddings);
        let runner_options = RunnerOptions {
            scratch_bytes: usize::try_from(plan.needs.scratch).unwrap_or(usize::MAX),
            slice: options.slice,
            kv_tokens: Some(
                context
                    .next_multiple_of(PAGE)
                    .saturating_mul(options.sequences),
            ),
            swap_dir: options.swap_dir.clone(),
            round_experts: self.options.round_experts,
            stop: options.stop.clone(),
        };
        let mut runner = Runner::new(weights, store, pool, runner_options);
        if record > 0 {
            runner.record_timeline(record);
        }
        let tokenizer = self.tokenizer.clone();
        Ok(TextRunner::new(
            runner,
            tokenizer,
            self.options.drafts,
            history,
        ))
    }
}

/// The plan for `inputs`, logged.
fn checked_plan(inputs: &MemoryInputs) -> Result<Plan, PlanError> {
    let plan = inputs.plan()?;
    let size = |bytes| ByteSize::b(bytes).display().iec();
    if let Ok(available) = &inputs.available
        && plan.total > available.budget()
    {
        tracing::warn!(
            "{} are planned, and only {} are available: the process may be killed",
            size(plan.total),
            size(available.budget())
        );
    }
    tracing::info!(
        "memory: {} of {}: {} of resident weights, {} of expert slabs, {} of KV cache, {} of scratch",
        size(plan.total),
        size(plan.budget),
        size(plan.needs.dense),
        size(plan.slots.bytes()),
        size(plan.needs.kv),
        size(plan.needs.scratch),
    );
    Ok(plan)
}

/// Threads may share a model, and each may have runners of it.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    fn moved<T: Send>() {}
    shared::<Model>();
    moved::<TextRunner>();
};
