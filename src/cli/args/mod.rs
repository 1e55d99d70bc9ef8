//! Parses flags and the values they take.

pub mod command_line;
pub mod copies;
pub mod drives;
pub mod files;
pub mod kv;
pub mod model;
pub mod prompt;
pub mod sampling;
pub mod size;
pub mod template;
pub mod usage;
pub mod values;
