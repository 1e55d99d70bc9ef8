//! Compares cache policies on recorded or synthetic routing.

pub mod cache;
pub mod trace;
