//! A shard that becomes shorter after it has been opened: an error that names tensor, file and offset, nothing computed
//! from what was not read, and a store that still works when the file is whole again.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use colibri_ring::{DirectMode, EngineKind, Options};
use colibri_uring::arch::Architecture;
use colibri_uring::model::{LoadOptions, RunnerOptions, Weights};
use colibri_uring::pool::Pool;
use colibri_uring::shards::Shards;
use colibri_uring::stream::slots::{Budget, slots};
use colibri_uring::stream::{
    Catalog, ExpertFiles, ExpertStore, Lookahead, Ready, StoreOptions, StreamError, Urgency,
};
use tempfile::TempDir;

use crate::common::Saved;
use crate::fixture::Solo;

const MODEL: &str = "f32-no-indexer";

struct Opened {
    dir: TempDir,
    config: Architecture,
    shards: Shards,
}

fn open() -> Opened {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(&Saved::named(MODEL).dirs[0]).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let shards = Shards::open(&[dir.path().to_path_buf()]).unwrap();
    let config = Architecture::load(dir.path()).unwrap();
    Opened {
        dir,
        config,
        shards,
    }
}

impl Opened {
    fn store(&self, kind: EngineKind, direct: DirectMode) -> ExpertStore {
        let catalog = Catalog::new(&self.shards, &self.config).unwrap();
        let files = ExpertFiles::new(&self.shards, catalog, direct).unwrap();
        let top_k = self.config.router.top_k;
        let budget = Budget::SlotsPerLayer(0);
        let slots = slots(&files.footprints(), files.moe_layers(), top_k, budget).unwrap();
        let options = StoreOptions {
            slots,
            lookahead: Lookahead::Auto,
            engine: Options {
                kind,
                ..Options::default()
            },
        };
        ExpertStore::new(files, top_k, options).unwrap()
    }

    fn shards(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        let mut paths: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
        paths.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
        paths
    }

    /// Cuts every shard, and returns them as they were.
    fn truncate(&self, len: u64) -> Vec<(PathBuf, Vec<u8>)> {
        let keep = |path: PathBuf| {
            let whole = fs::read(&path).unwrap();
            resize(&path, len);
            (path, whole)
        };
        self.shards().into_iter().map(keep).collect()
    }
}

fn resize(path: &Path, len: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len(len).unwrap();
}

/// Tries until it succeeds: reads that were under way when the file came back may still fail, each slab once.
fn again<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    (0..32).find_map(|_| attempt()).expect("the file is whole")
}

/// Demands `ids` and takes everything.
fn demand(store: &mut ExpertStore, layer: usize, ids: &[u32]) -> Result<usize, StreamError> {
    store.request(layer, ids, Urgency::Demand)?;
    let mut whole = 0;
    while let Some(ready) = store.next()? {
        whole += usize::from(matches!(ready, Ready::Down { .. }));
    }
    Ok(whole)
}

#[test]
fn a_demand_fails_by_name_and_succeeds_when_the_file_is_back() {
    for kind in [EngineKind::Auto, EngineKind::Pread] {
        for direct in [DirectMode::Auto, DirectMode::Off] {
            let opened = open();
            let mut store = opened.store(kind, direct);
            let layer = opened.config.sparse_layers().next().unwrap();
            assert_eq!(demand(&mut store, layer, &[0, 1]).unwrap(), 2);
            let whole = opened.truncate(0);
            for _ in 0..10 {
                // More than there are slabs, so that some wait for one while others fail.
                let error = demand(&mut store, layer, &[2, 3, 4, 5, 6]).unwrap_err();
                let text = error.to_string();
                for part in [
                    "mlp.experts.",
                    "_proj.weight",
                    ".safetensors",
                    "offset",
                    "end",
                ] {
                    assert!(text.contains(part), "{text}");
                }
                assert_eq!(text.lines().count(), 1);
            }
            // A prefetch that fails is no error.
            store.request(layer, &[2], Urgency::Prefetch).unwrap();
            for (path, bytes) in whole {
                fs::write(path, bytes).unwrap();
            }
            for ids in [[2, 3, 4], [4, 5, 6], [0, 1, 2]] {
                let whole = again(|| demand(&mut store, layer, &ids).ok());
                assert_eq!(whole, 3);
            }
        }
    }
}

#[test]
fn a_sequence_forgets_the_token_that_failed() {
    let opened = open();
    let model = Weights::load(
        &opened.shards,
        opened.config.clone(),
        LoadOptions::default(),
    );
    let (model, pool) = (Arc::new(model.unwrap()), Arc::new(Pool::new(2)));
    let new = || {
        let store = opened.store(EngineKind::Auto, DirectMode::Auto);
        Solo::new(&model, store, &pool, RunnerOptions::default())
    };
    let ids = [3, 4, 5, 6, 7, 8, 9, 10];
    let expected = new().prefill(&ids).unwrap().to_vec();
    let mut solo = new();
    solo.prefill(&ids[..2]).unwrap();
    let whole = opened.truncate(0);
    let error = solo.prefill(&ids[2..]).unwrap_err().to_string();
    assert!(error.contains("cannot read tensor"), "{error}");
    assert_eq!(solo.len(), 2);
    for (path, bytes) in whole {
        fs::write(path, bytes).unwrap();
    }
    let logits = again(|| Some(solo.prefill(&ids[2..]).ok()?.to_vec()));
    assert!(logits == expected);
}
