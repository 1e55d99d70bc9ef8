//! Measures drives and models, and makes models: what stands beside a run.

pub mod convert;
pub mod measure;
pub mod profile;
pub mod report;
pub mod simulate;
pub mod stage;
pub mod synth;
pub mod trace;
pub mod verify;
