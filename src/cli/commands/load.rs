//! Loads the model of a command, with a progress bar.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::Context;
use colibri_uring::model::draft::Mode;
use colibri_uring::runtime::{
    LoadProgress, LoadStage, Model, ModelOptions, RunOptions, TextRunner,
};
use indicatif::ProgressBar;

use crate::cli::args::model::ModelArgs;
use crate::cli::interrupt::{self, Loading};
use crate::cli::output::progress;

/// An opened model. Until it is loaded or dropped, SIGINT and SIGTERM end the process.
pub struct OpenedModel {
    model: Model,
    start: Instant,
    bar: Arc<OnceLock<ProgressBar>>,
    _loading: Loading,
}

/// A loaded model, and how long it took since it was opened.
pub struct LoadedModel {
    pub model: Model,
    pub runner: TextRunner,
    pub load_seconds: f64,
}

/// Opens the model that the flags name. `contexts` tells whether a KV file is used.
pub fn open(args: &ModelArgs, drafts: Mode, contexts: bool) -> anyhow::Result<OpenedModel> {
    let options = args.model_options()?;
    let start = Instant::now();
    let loading = Loading::begin().context("cannot handle Ctrl-C")?;
    let bar = Arc::new(OnceLock::<ProgressBar>::new());
    let shown = bar.clone();
    let observe = move |stage| match stage {
        LoadStage::Weights { done, all } => {
            shown
                .get_or_init(|| progress::bytes(all))
                .set_position(done);
        }
        LoadStage::Complete => interrupt::loaded(),
    };
    let options = ModelOptions {
        drafts,
        contexts,
        progress: Some(LoadProgress::new(observe)),
        ..options
    };
    Ok(OpenedModel {
        model: Model::open(&args.model[0], &options)?,
        start,
        bar,
        _loading: loading,
    })
}

impl OpenedModel {
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Loads it for a run with a stop flag of its own.
    pub fn load_with(self, options: &RunOptions) -> anyhow::Result<(Model, TextRunner)> {
        let runner = self.model.runner(options);
        if let Some(bar) = self.bar.get() {
            bar.finish_and_clear();
        }
        Ok((self.model, runner?))
    }

    /// Loads it. From then on, SIGINT and SIGTERM ask to stop.
    pub fn load(self, options: RunOptions) -> anyhow::Result<LoadedModel> {
        let start = self.start;
        let (model, runner) = self.load_with(&RunOptions {
            stop: Some(interrupt::stop_flag()),
            ..options
        })?;
        Ok(LoadedModel {
            model,
            runner,
            load_seconds: start.elapsed().as_secs_f64(),
        })
    }
}
