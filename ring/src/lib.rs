//! Batched reads of file ranges into registered huge-page slabs.
//!
//! `colibri-ring` knows files, byte ranges, slabs and drives. It never hears of a layer or an expert:
//! its caller asks for a set of [`extent::Range`]s to be read into a slab, with a priority, and is told
//! when each part of that slab is complete.
//!
//! ```
//! use std::sync::Arc;
//!
//! use colibri_ring::arena::{Class, SlabId};
//! use colibri_ring::engine::{Engine, Options};
//! use colibri_ring::extent::{Layout, Range};
//! use colibri_ring::file::File;
//! use colibri_ring::replica::{DirectMode, Files, Replica};
//! use colibri_ring::schedule::{Event, Priority};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // One file. A second replica of it would be a copy on another drive.
//! let file = Arc::new(File::open("Cargo.toml")?);
//! let files = Files::new(vec![vec![Replica::new(file, 0)]], DirectMode::Auto)?;
//! // Four slabs of 1 MiB, and a thread that owns the ring.
//! let class = Class { bytes: 1 << 20, count: 4 };
//! let mut engine = Engine::new(&files, &[class], Options::default())?;
//!
//! // Two ranges at any offset, of which the first is useful before the second is there.
//! let range = |offset, len, part| Range { file: 0, offset, len, part };
//! let layout = Layout::new(&[range(1, 7, 0), range(100, 50, 1)], files.align())?;
//! engine.read(SlabId(0), Priority::Demand, layout);
//! engine.flush();
//! loop {
//!     match engine.wait()? {
//!         Event::Part(slab, 0) => assert_eq!(engine.payload(slab, 0), b"package"),
//!         Event::Part(..) => {}
//!         Event::Full(slab) => break engine.release(slab),
//!         Event::Failed(_, error) => return Err(error.into()),
//!         Event::Dropped(_) => unreachable!("nobody has abandoned it"),
//!     }
//! }
//! # Ok(())
//! # }
//! ```

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
