//! Reads a usage history. Built for fuzzing, the library takes its checksum for right.
#![no_main]

use std::cell::LazyCell;

use colibri_fuzz::ModelDir;
use colibri_uring::Architecture;
use colibri_uring::shards::Shards;
use colibri_uring::stream::usage::{self, Identity};
use libfuzzer_sys::fuzz_target;

thread_local! {
    static MODEL: LazyCell<(ModelDir, Identity)> = LazyCell::new(|| {
        let dir = ModelDir::copy_of("f32-smallest");
        let shards = Shards::open(&[dir.path().into()]).expect("the fixture");
        let arch = Architecture::load(dir.path()).expect("the fixture");
        let identity = Identity::of(&shards, &arch);
        (dir, identity)
    });
}

fuzz_target!(|data: &[u8]| MODEL.with(|model| {
    let (dir, identity) = &**model;
    dir.write(usage::FILE_NAME, data);
    if let Some(usage) = usage::read(dir.path(), identity) {
        for (layer, expert, share) in usage.hottest() {
            assert!(share.is_finite() && usage.count(layer, expert) > 0.0);
        }
    }
}));
