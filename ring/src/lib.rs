//! Batched reads of file ranges into registered huge-page slabs.
//!
//! `colibri-ring` knows files, byte ranges, slabs and drives. It never hears of a layer or an expert:
//! its caller asks for a set of [`extent::Range`]s to be read into a slab, with a priority, and is told
//! when each part of that slab is complete.

pub mod arena;
pub mod bulk;
mod command;
pub mod device;
pub mod drive;
pub mod driver;
pub mod engine;
mod error;
pub mod extent;
pub mod file;
pub mod headers;
mod inline;
pub mod limits;
mod options;
mod pin;
mod pread;
pub mod probe;
pub mod record;
pub mod replica;
pub mod schedule;
pub mod sim;
mod thread;
pub mod tokio_read;
mod uring;
mod window;
