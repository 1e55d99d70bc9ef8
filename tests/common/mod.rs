//! What the tests on fixtures share.
#![allow(dead_code)] // each test binary uses a part of it

use std::path::{Path, PathBuf};

use colibri_ring::engine::Options;
use colibri_ring::replica::DirectMode;
use colibri_uring::config::Config;
use colibri_uring::model::{LoadOptions, Model};
use colibri_uring::shards::Shards;
use colibri_uring::stream::slots::{Budget, slots};
use colibri_uring::stream::{Catalog, ExpertFiles, ExpertStore, Lookahead, StoreOptions};
use serde_json::Value;

/// A model and what the reference says about it.
pub struct Fixture {
    pub name: String,
    pub expected: Value,
    pub config: Config,
    pub shards: Shards,
}

/// The fixture of that name.
pub fn fixture(name: &str) -> Fixture {
    open(&root().join(name))
}

/// Where the fixtures are: `COLIBRI_FIXTURES`, else those of the repository.
pub fn root() -> PathBuf {
    match std::env::var_os("COLIBRI_FIXTURES") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures"),
    }
}

/// Every directory with an `expected.json`; its subdirectories, if any, are a split model.
pub fn fixtures() -> Vec<Fixture> {
    let root = root();
    let mut dirs = entries(&root);
    dirs.retain(|dir| dir.join("expected.json").is_file());
    assert!(!dirs.is_empty(), "no fixtures in {}", root.display());
    dirs.iter().map(|dir| open(dir)).collect()
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut dirs: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    dirs.sort();
    dirs
}

fn open(dir: &Path) -> Fixture {
    let name = dir.file_name().unwrap().to_str().unwrap().to_string();
    let mut parts = entries(dir);
    parts.retain(|part| part.is_dir());
    if parts.is_empty() {
        parts.push(dir.to_path_buf());
    }
    let text = std::fs::read(dir.join("expected.json")).unwrap();
    Fixture {
        expected: serde_json::from_slice(&text).unwrap(),
        config: Config::load(&parts[0]).unwrap_or_else(|e| panic!("{name}: {e}")),
        shards: Shards::open(&parts).unwrap_or_else(|e| panic!("{name}: {e}")),
        name,
    }
}

impl Fixture {
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

    pub fn ids(&self, path: &str) -> Vec<u32> {
        let list = self.expected.pointer(path).unwrap().as_array().unwrap();
        list.iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    pub fn floats(&self, path: &str) -> Vec<f32> {
        let list = self.expected.pointer(path).unwrap().as_array().unwrap();
        list.iter().map(|x| x.as_f64().unwrap() as f32).collect()
    }
}
