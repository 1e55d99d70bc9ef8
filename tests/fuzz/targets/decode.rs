//! Decodes with a model of which the fuzzer writes one file: `config.json` (first byte even) or the shard (odd).
#![no_main]

use std::cell::LazyCell;

use colibri_fuzz::ModelDir;
use colibri_uring::{Model, ModelOptions, RunOptions, Sampling};
use libfuzzer_sys::{Corpus, fuzz_target};

thread_local! {
    static DIR: LazyCell<(ModelDir, Vec<u8>, Vec<u8>)> = LazyCell::new(|| {
        let dir = ModelDir::copy_of("f32-smallest");
        let (config, shard) = (dir.read("config.json"), dir.read("model.safetensors"));
        (dir, config, shard)
    });
}

fuzz_target!(|data: &[u8]| -> Corpus {
    let Some((which, data)) = data.split_first() else {
        return Corpus::Reject;
    };
    DIR.with(|dir| {
        let (dir, config, shard) = &**dir;
        let changed = which % 2 == 0;
        dir.write("config.json", if changed { data } else { config });
        dir.write("model.safetensors", if changed { shard } else { data });
        let options = ModelOptions {
            threads: Some(1),
            ..ModelOptions::default()
        };
        let Ok(model) = Model::open(dir.path(), &options) else {
            return;
        };
        let options = RunOptions {
            context: Some(8),
            ram: Some(256 << 20),
            ..RunOptions::default()
        };
        let Ok(mut runner) = model.runner(&options) else {
            return;
        };
        let mut sequence = runner.sequence();
        for token in runner.generate(&mut sequence, &[1, 2], &Sampling::greedy(), 4) {
            if token.is_err() {
                return;
            }
        }
    });
    Corpus::Keep
});
