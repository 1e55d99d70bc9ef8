//! Turns a model directory into text: plans memory, encodes prompts, generates, samples, keeps contexts.

pub mod chat;
pub mod demo;
pub mod generate;
pub mod kv_file;
pub mod plan;
pub mod sample;
pub mod template;
pub mod tokenizer;
