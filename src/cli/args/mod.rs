//! Parses flags and the values they take.

pub mod environment;
pub mod explicit_flags;
pub mod model;
pub mod prompt;
pub mod sampling;
pub mod size;
pub mod template;
pub mod usage;

pub use usage::WrongUsage;
