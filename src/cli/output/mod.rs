//! Prints results, progress and errors, and writes report files.

pub mod error;
pub mod file;
pub mod findings;
pub mod formats;
pub mod memory;
pub mod open_line;
pub mod pluralize;
pub mod printer;
pub mod progress;
pub mod report_files;
pub mod size;
pub mod stats;
pub mod terminal;
pub mod trace_outputs;
