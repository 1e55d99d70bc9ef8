//! The model as a library: loading, the arithmetic against the reference, the stream of experts, files that change
//! under it. With `COLIBRI_FIXTURES` set, the reference checks run on the models of that directory instead.

#[path = "../common/mod.rs"]
mod common;
mod fixture;
mod kv_file;
mod load;
mod mixes;
mod mtp;
mod open;
mod packed;
mod reference;
#[path = "../common/rng.rs"]
mod rng;
mod sequences;
mod simulated;
mod stream;
mod truncated;
