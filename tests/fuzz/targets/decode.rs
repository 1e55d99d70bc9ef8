//! Decodes with a model of which the fuzzer writes one file: `config.json` (first byte even) or the shard (odd).
#![no_main]

use std::cell::LazyCell;

use colibri_fuzz::OneOfTwo;
use colibri_uring::{Model, ModelOptions, RunOptions, Sampling};
use libfuzzer_sys::{Corpus, fuzz_target};

thread_local! {
    static FILES: LazyCell<OneOfTwo> = LazyCell::new(|| OneOfTwo::new("f32-smallest", ["config.json", "model.safetensors"]));
}

fuzz_target!(|data: &[u8]| -> Corpus {
    FILES.with(|files| {
        let Some(dir) = files.write(data) else {
            return Corpus::Reject;
        };
        let options = ModelOptions {
            threads: Some(1),
            ..ModelOptions::default()
        };
        let Ok(model) = Model::open(dir.path(), &options) else {
            return Corpus::Keep;
        };
        let options = RunOptions {
            context: Some(8),
            ram: Some(256 << 20),
            ..RunOptions::default()
        };
        let Ok(mut runner) = model.runner(&options) else {
            return Corpus::Keep;
        };
        let mut sequence = runner.sequence();
        for token in runner.generate(&mut sequence, &[1, 2], &Sampling::greedy(), 4) {
            if token.is_err() {
                return Corpus::Keep;
            }
        }
        Corpus::Keep
    })
});
