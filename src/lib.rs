//! Runs mixture-of-experts language models far larger than memory: dense weights stay resident, routed
//! experts are streamed from SSD through io_uring just before they are needed.
//!
//! Dependencies point one way: `cli` -> `tools` -> `runtime` -> `model` -> `stream` -> `shards` -> `colibri-ring`. `quant` and
//! `pool` are leaves; `weight` joins `quant` and `shards`.

pub mod atomic_file;
pub mod config;
pub mod memory;
pub mod model;
pub mod pool;
pub mod quant;
pub mod runtime;
pub mod shards;
pub mod stream;
pub mod tools;
pub mod weight;
