//! Measures drives and models, makes models, and copies them.

pub mod convert;
pub mod measure;
mod ordered_reads;
pub mod profile;
pub mod report;
pub mod simulate;
pub mod stage;
pub mod synth;
pub mod trace;
pub mod verify;
