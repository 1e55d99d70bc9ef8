//! Opens a shard and reads the tensors that its header describes.
#![no_main]

use std::cell::LazyCell;

use colibri_fuzz::ModelDir;
use colibri_uring::shards::{Cache, Shards};
use libfuzzer_sys::fuzz_target;

thread_local! {
    static DIR: LazyCell<ModelDir> = LazyCell::new(|| ModelDir::copy_of("f32-smallest"));
}

fuzz_target!(|data: &[u8]| DIR.with(|dir| {
    dir.write("model.safetensors", data);
    let Ok(shards) = Shards::open(&[dir.path().into()]) else {
        return;
    };
    for tensor in shards.iter() {
        // A tensor that the index accepts lies within the file.
        assert!(tensor.bytes <= data.len() as u64);
        shards
            .read_raw(tensor.name, Cache::Keep)
            .expect("a tensor within the file");
        let _ = shards.read_f32(tensor.name, Cache::Keep);
    }
}));
