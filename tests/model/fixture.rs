//! A fixture, opened.

use std::path::PathBuf;

use colibri_ring::{DirectMode, Options};
use colibri_uring::config::Config;
use colibri_uring::model::{LoadOptions, Model, prediction};
use colibri_uring::shards::Shards;
use colibri_uring::stream::slots::{Budget, slots};
use colibri_uring::stream::{Catalog, ExpertFiles, ExpertStore, Lookahead, StoreOptions};
use serde_json::Value;

use crate::common::{self, Saved};

/// A model and what the reference says about it.
pub struct Fixture {
    pub name: String,
    pub expected: Value,
    pub config: Config,
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
            config: Config::load(&saved.dirs[0]).unwrap_or_else(|e| panic!("{name}: {e}")),
            shards: Shards::open(&saved.dirs).unwrap_or_else(|e| panic!("{name}: {e}")),
            name,
            saved,
        }
    }

    pub fn model(&self) -> Model {
        Model::load(&self.shards, self.config.clone(), LoadOptions::default())
            .unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    pub fn store(&self) -> ExpertStore {
        self.store_with(Lookahead::Auto)
    }

    pub fn store_with(&self, lookahead: Lookahead) -> ExpertStore {
        let catalog = Catalog::new(&self.shards, &self.config);
        let catalog = catalog.unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let files = ExpertFiles::new(&self.shards, catalog, DirectMode::Auto).unwrap();
        let top_k = self.config.num_experts_per_tok;
        let budget = Budget::SlotsPerLayer(1);
        let slots = slots(&files.footprints(), files.moe_layers(), top_k, budget).unwrap();
        let options = StoreOptions {
            slots,
            lookahead,
            engine: Options::default(),
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
