//! Batched reads of file ranges into registered huge-page slabs.
//!
//! `colibri-ring` knows files, byte ranges, slabs and drives. It never hears of a layer or an expert:
//! its caller asks for a set of [`extent::Range`]s to be read into a slab, with a priority, and is told
//! when each part of that slab is complete.

pub mod file;
pub mod headers;
pub mod limits;
