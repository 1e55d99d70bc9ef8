//! Turns a model directory into text: plans memory, encodes prompts, generates, samples, keeps contexts.

pub mod chat;
pub mod demo;
pub mod dialect;
mod error;
pub mod generate;
pub mod grammar;
pub mod kv_file;
mod open;
mod options;
pub mod plan;
pub mod sample;
pub mod template;
mod text_runner;
pub mod tokenizer;

pub use error::OpenError;
pub use open::{Model, Source};
pub use options::{LoadProgress, LoadStage, ModelOptions, RunOptions};
pub use text_runner::{TextGeneration, TextRunner, Token};
