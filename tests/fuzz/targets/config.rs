//! Reads a `config.json` and plans the memory of the model that it describes.
#![no_main]

use std::path::Path;

use colibri_uring::Architecture;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|data: &[u8]| -> Corpus {
    let Ok(value) = serde_json::from_slice(data) else {
        return Corpus::Reject;
    };
    let path = Path::new("config.json");
    // Every key may also be one of generation_config.json.
    if let Ok(arch) = Architecture::from_json(path, &value, Some((path, &value))) {
        assert!(arch.layers() >= arch.num_hidden_layers());
        for layer in 0..arch.num_hidden_layers() {
            arch.mlp_of(layer);
            arch.is_indexed(layer);
        }
        arch.kv_width();
    }
    Corpus::Keep
});
