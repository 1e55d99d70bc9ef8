//! Reads recorded routing.
#![no_main]

use colibri_uring::stream::routing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = routing::read(data);
});
