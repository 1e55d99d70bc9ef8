//! Describes how a model is opened and run, without any type of a command line.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use colibri_ring::{DirectMode, EngineKind};

use crate::model::LoadOptions;
use crate::model::draft::Mode;
use crate::quant::Activations;
use crate::quant::encode::Packing;
use crate::stream::Lookahead;

/// How [`Model::open`](crate::runtime::Model::open) opens a model: what holds for all runners that share it.
///
/// Only `dsa`, `dense`, `round_experts` and `activations` change a number that the model computes.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// Further directories of a model that is split over drives.
    pub more_dirs: Vec<PathBuf>,
    /// Directories on other drives with copies of the model's files, at most [`MAX_MIRRORS`](crate::shards::MAX_MIRRORS).
    pub mirrors: Vec<PathBuf>,
    /// Ratio of the bytes that are read from the model's directories (first) and from each mirror; a source with 0 is read only where no
    /// other copy is left. `None` reads from each source as fast as it delivers.
    pub mirror_weights: Option<Vec<u32>>,
    /// What reads headers and experts.
    pub engine: EngineKind,
    /// Whether reads go around the page cache.
    pub direct: DirectMode,
    /// Compute threads; `None` for one on each CPU.
    pub threads: Option<usize>,
    /// Sparse attention where the model has an indexer.
    pub dsa: bool,
    /// Format that resident float and FP8 matrices are quantised to at load; `None` keeps them.
    pub dense: Option<Packing>,
    /// Format that float and FP8 experts are rounded to whenever they are computed; `None` keeps them. Previews a conversion; slow.
    pub round_experts: Option<Packing>,
    /// How products with packed matrices take activations.
    pub activations: Activations,
    /// How many tokens the prediction layer drafts for each pass. `Auto` leaves the layer out where it is missing, damaged or too large.
    pub drafts: Mode,
    /// Whether contexts are saved in or restored from KV files, which are then compared with all resident weights. Without it they load a
    /// little faster, and the comparison is by samples.
    pub contexts: bool,
    /// Called while the first runner is loaded.
    pub progress: Option<LoadProgress>,
}

impl Default for ModelOptions {
    fn default() -> ModelOptions {
        ModelOptions {
            more_dirs: Vec::new(),
            mirrors: Vec::new(),
            mirror_weights: None,
            engine: EngineKind::Auto,
            direct: DirectMode::Auto,
            threads: None,
            dsa: true,
            dense: None,
            round_experts: None,
            activations: Activations::Exact,
            drafts: Mode::Auto,
            contexts: true,
            progress: None,
        }
    }
}

impl ModelOptions {
    /// Compute threads to use.
    pub fn threads(&self) -> usize {
        self.threads.unwrap_or_else(crate::cpus::default_threads)
    }

    /// The choices that loading depends on.
    pub(super) fn load_options(&self) -> LoadOptions {
        LoadOptions {
            dsa: self.dsa,
            dense: self.dense,
            activations: self.activations,
            threads: self.threads(),
            direct: self.direct != DirectMode::Off,
            digest: self.contexts,
        }
    }
}

/// How far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadStage {
    /// Resident weights are being read.
    Weights {
        /// Bytes read.
        done: u64,
        /// Bytes of all resident weights.
        all: u64,
    },
    /// Weights, store and slabs are complete. Compute threads start next.
    Complete,
}

/// A function that is told how far loading has come, by several threads.
#[derive(Clone)]
pub struct LoadProgress(Arc<dyn Fn(LoadStage) + Send + Sync>);

impl LoadProgress {
    /// Calls `observer`.
    pub fn new(observer: impl Fn(LoadStage) + Send + Sync + 'static) -> LoadProgress {
        LoadProgress(Arc::new(observer))
    }

    pub(super) fn call(&self, stage: LoadStage) {
        (self.0)(stage);
    }
}

impl fmt::Debug for LoadProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoadProgress")
    }
}

/// Tokens of a context where none are given, if the model allows as many.
const DEFAULT_CONTEXT: usize = 8192;
/// Tokens of a prompt that are computed at once where none are given, if memory allows.
const DEFAULT_PROMPT: usize = 2048;

/// How [`Model::runner`](crate::runtime::Model::runner) plans memory and reads experts. None of it changes a number.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Tokens of a sequence's context; `None` for 8192, or what the model allows.
    pub context: Option<usize>,
    /// Sequences that memory is planned for, each with a whole context.
    pub sequences: usize,
    /// Tokens of a prompt that scratch is planned for; `None` for 2048, or the context.
    pub prompt: Option<usize>,
    /// Tokens that go through a layer at once at most.
    pub slice: usize,
    /// Where sequences are swapped to; `None` for the system's temporary directory.
    pub swap_dir: Option<PathBuf>,
    /// Bytes of memory for everything but weights that another runner has loaded; `None` for what is available.
    pub ram: Option<u64>,
    /// Expert slabs for each sparse layer; 0 is the minimum, `None` as many as fit.
    pub cache_slots: Option<u64>,
    /// How many experts of the next layer are read before its router decides.
    pub lookahead: Lookahead,
    /// Whether `.coli_usage` in the model's first directory is used: the counts of experts of earlier runs.
    pub usage: bool,
    /// Share of the slabs, from 0 to 1, that pins the experts that earlier runs used most.
    pub pin_share: f64,
    /// Whether to record what is read and computed when, for a trace.
    pub record: bool,
    /// When this becomes true, a running call soon ends with [`ModelError::Stopped`](crate::model::ModelError::Stopped).
    pub stop: Option<Arc<AtomicBool>>,
}

impl Default for RunOptions {
    fn default() -> RunOptions {
        RunOptions {
            context: None,
            sequences: 1,
            prompt: None,
            slice: usize::MAX,
            swap_dir: None,
            ram: None,
            cache_slots: None,
            lookahead: Lookahead::Auto,
            usage: true,
            pin_share: 0.25,
            record: false,
            stop: None,
        }
    }
}

impl RunOptions {
    /// Tokens of the context and of its prompt, for a model that allows `max` tokens.
    pub(super) fn tokens(&self, max: usize) -> (usize, usize) {
        let context = self.context.unwrap_or_else(|| max.min(DEFAULT_CONTEXT));
        let prompt = self.prompt.unwrap_or_else(|| context.min(DEFAULT_PROMPT));
        (context, prompt)
    }
}
