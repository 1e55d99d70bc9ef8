//! Runs mixture-of-experts language models far larger than memory: dense weights stay resident, routed
//! experts are streamed from SSD through io_uring just before they are needed.
//!
//! Dependencies point one way: `cli` -> `model` -> `stream` -> `shards` -> `colibri-ring`. `quant` and
//! `pool` are leaves; `weight` joins `quant` and `shards`.

pub mod chat;
pub mod config;
pub mod convert;
pub mod demo;
pub mod draft;
pub mod generate;
pub mod kv_file;
pub mod measure;
pub mod model;
pub mod plan;
pub mod pool;
pub mod profile;
pub mod quant;
pub mod report;
pub mod sample;
pub mod shards;
pub mod simulate;
pub mod stage;
pub mod stream;
pub mod synth;
pub mod template;
pub mod temporary;
pub mod tokenizer;
pub mod trace;
pub mod verify;
pub mod weight;
