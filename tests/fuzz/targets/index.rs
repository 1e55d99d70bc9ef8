//! Opens a model by a `model.safetensors.index.json`.
#![no_main]

use std::cell::LazyCell;

use colibri_fuzz::ModelDir;
use colibri_uring::shards::Shards;
use libfuzzer_sys::fuzz_target;

thread_local! {
    static DIR: LazyCell<ModelDir> = LazyCell::new(|| ModelDir::copy_of("f32-smallest"));
}

fuzz_target!(|data: &[u8]| DIR.with(|dir| {
    dir.write("model.safetensors.index.json", data);
    if let Ok(shards) = Shards::open(&[dir.path().into()]) {
        assert!(shards.len() > 0);
    }
}));
