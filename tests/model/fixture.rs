//! A fixture, opened.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::Arc;

use colibri_ring::{DirectMode, Options};
use colibri_uring::arch::Architecture;
use colibri_uring::model::{
    LoadOptions, ModelError, Runner, RunnerOptions, Sequence, Weights, prediction,
};
use colibri_uring::pool::Pool;
use colibri_uring::shards::Shards;
use colibri_uring::stream::slots::{Budget, slots};
use colibri_uring::stream::{Catalog, ExpertFiles, ExpertStore, Lookahead, StoreOptions};
use serde_json::Value;

use crate::common::{self, Saved};

/// A model and what the reference says about it.
pub struct Fixture {
    pub name: String,
    pub expected: Value,
    pub config: Architecture,
    pub shards: Shards,
    saved: Saved,
}

/// The fixture of the repository with that name.
pub fn fixture(name: &str) -> Fixture {
    Fixture::open(Saved::named(name))
}

/// Every model that [`common::all`] finds.
pub fn fixtures() -> Vec<Fixture> {
    common::all().into_iter().map(Fixture::open).collect()
}

impl Fixture {
    pub fn open(saved: Saved) -> Fixture {
        let name = saved.name.clone();
        Fixture {
            expected: saved.expected.clone(),
            config: Architecture::load(&saved.dirs[0]).unwrap_or_else(|e| panic!("{name}: {e}")),
            shards: Shards::open(&saved.dirs).unwrap_or_else(|e| panic!("{name}: {e}")),
            name,
            saved,
        }
    }

    pub fn model(&self) -> Arc<Weights> {
        self.model_with(LoadOptions::default())
    }

    pub fn model_with(&self, options: LoadOptions) -> Arc<Weights> {
        Weights::load(&self.shards, self.config.clone(), options)
            .unwrap_or_else(|e| panic!("{}: {e}", self.name))
            .into()
    }

    pub fn store(&self) -> ExpertStore {
        self.store_with(Lookahead::Auto)
    }

    pub fn store_with(&self, lookahead: Lookahead) -> ExpertStore {
        self.store_of(Budget::SlotsPerLayer(1), lookahead, Options::default())
    }

    pub fn store_of(&self, budget: Budget, lookahead: Lookahead, engine: Options) -> ExpertStore {
        let catalog = Catalog::new(&self.shards, &self.config);
        let catalog = catalog.unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let files = ExpertFiles::new(&self.shards, catalog, DirectMode::Auto).unwrap();
        let top_k = self.config.router.top_k;
        let slots = slots(&files.footprints(), files.moe_layers(), top_k, budget).unwrap();
        let options = StoreOptions {
            slots,
            lookahead,
            engine,
        };
        ExpertStore::new(files, top_k, options).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    /// With its prediction layer, which is used then.
    pub fn drafting(mut self) -> Fixture {
        self.config = prediction(&self.shards, &self.config).unwrap();
        self
    }

    /// Its directory.
    pub fn home(&self) -> PathBuf {
        let dir = &self.saved.dirs[0];
        match dir.join("expected.json").exists() {
            true => dir.clone(),
            false => dir.parent().unwrap().to_path_buf(),
        }
    }

    pub fn ids(&self, path: &str) -> Vec<u32> {
        self.saved.ids(path)
    }

    pub fn floats(&self, path: &str) -> Vec<f32> {
        self.saved.floats(path)
    }
}

/// Logits, to be compared to the last bit.
pub fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// A runner with one sequence.
pub struct Solo {
    pub runner: Runner,
    pub sequence: Sequence,
}

impl Solo {
    pub fn new(
        model: &Arc<Weights>,
        store: ExpertStore,
        pool: &Arc<Pool>,
        options: RunnerOptions,
    ) -> Solo {
        let mut runner = Runner::new(Arc::clone(model), store, Arc::clone(pool), options);
        let sequence = runner.sequence();
        Solo { runner, sequence }
    }

    pub fn prefill(&mut self, ids: &[u32]) -> Result<&[f32], ModelError> {
        self.runner.prefill(&mut self.sequence, ids)
    }

    pub fn decode(&mut self, id: u32) -> Result<&[f32], ModelError> {
        self.runner.decode(&mut self.sequence, id)
    }

    pub fn score(
        &mut self,
        ids: &[u32],
        each: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        self.runner.score(&mut self.sequence, ids, each)
    }

    pub fn draft(&mut self, id: u32, n: usize) -> Result<Vec<u32>, ModelError> {
        self.runner.draft(&mut self.sequence, id, n)
    }

    pub fn speculate(&mut self, id: u32, n: usize) -> Result<Vec<u32>, ModelError> {
        self.runner.speculate(&mut self.sequence, id, n)
    }

    pub fn settle_drafts(&mut self) -> Result<(), ModelError> {
        self.runner.settle_drafts(&mut self.sequence)
    }
}

impl Deref for Solo {
    type Target = Sequence;

    fn deref(&self) -> &Sequence {
        &self.sequence
    }
}

impl DerefMut for Solo {
    fn deref_mut(&mut self) -> &mut Sequence {
        &mut self.sequence
    }
}
