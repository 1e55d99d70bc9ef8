//! Reads ranges of files into registered slabs of memory, through io_uring and around the page cache.
//!
//! A program that streams data much larger than memory (weights of a model, columns of a database) knows which bytes it needs next
//! and needs them at the speed of its drives. `colibri-ring` reads them in batches with O_DIRECT, keeps each drive's queue full,
//! reads urgent ranges before prefetched ones, and uses several copies of a file at the sum of their drives' bandwidths. It runs on
//! Linux; where io_uring is denied, threads with pread do the same.
//!
//! # How to stream a file
//!
//! Eight types are enough:
//!
//! | type | what it is |
//! |---|---|
//! | [`File`] | an open file, with and without O_DIRECT |
//! | [`Replica`] | a copy of a file on a drive |
//! | [`Files`] | the files of an engine: for each, its copies |
//! | [`Range`] | requested bytes of a file |
//! | [`Layout`] | the places of some ranges in a slab |
//! | [`Options`] | device, windows and chunk sizes |
//! | [`Engine`] | the slabs and the ring thread that fills them |
//! | [`Event`] | what happened to a slab |
//!
//! A slab is [`Free`](SlabState::Free) until [`Engine::read`] requests a [`Layout`] for it, then it is being filled, and full after
//! the event [`Event::Full`]. [`Engine::payload`] borrows the bytes of a range. [`Engine::release`] frees the slab for the next
//! read. This streams a file through four slabs, so that the drive reads three blocks while the program works on one:
//!
//! ```
//! use std::sync::Arc;
//!
//! use colibri_ring::{Class, DirectMode, Engine, Event, File, Files, Options, Priority, Range};
//! use colibri_ring::{Replica, SlabId};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let temp = tempfile::NamedTempFile::new()?;
//! # let path = temp.path();
//! # std::fs::write(path, vec![1; 1_000_000])?;
//! const BLOCK: u64 = 64 << 10;
//!
//! let file = Arc::new(File::open(path)?);
//! let size = file.size();
//! let files = Files::new(vec![vec![Replica::new(file, 0)]], DirectMode::Auto)?;
//! // A range may begin anywhere; its aligned read is up to two pages longer.
//! let class = Class { bytes: (BLOCK + 8192) as usize, count: 4 };
//! let mut engine = Engine::new(&files, &[class], Options::default())?;
//!
//! let mut blocks = (0..size).step_by(BLOCK as usize).map(|offset| Range {
//!     file: 0,
//!     offset,
//!     len: BLOCK.min(size - offset),
//!     part: 0,
//! });
//! let mut reading = 0;
//! for (slab, block) in (0..4).zip(&mut blocks) {
//!     engine.read(SlabId(slab), Priority::Demand, files.layout(&[block])?);
//!     reading += 1;
//! }
//! let mut sum = 0;
//! while reading > 0 {
//!     // Blocks arrive in any order.
//!     match engine.wait()? {
//!         Event::Full(slab) => {
//!             sum += engine.payload(slab, 0).iter().map(|byte| u64::from(*byte)).sum::<u64>();
//!             engine.release(slab);
//!             match blocks.next() {
//!                 Some(block) => {
//!                     engine.read(slab, Priority::Demand, files.layout(&[block])?);
//!                 }
//!                 None => reading -= 1,
//!             }
//!         }
//!         Event::Failed(_, error) => return Err(error.into()),
//!         Event::Part(..) | Event::Dropped(_) => {}
//!     }
//! }
//! assert_eq!(sum, 1_000_000);
//! # Ok(())
//! # }
//! ```
//!
//! # Parts, priorities and copies
//!
//! The ranges of a slab belong to one or two parts, of which the first can be used while the second is read. A
//! [`Prefetch`](Priority::Prefetch) waits until no demand does, uses a share of a drive's window, and can be
//! [promoted](Engine::promote) or [abandoned](Engine::abandon). A file may have copies on several drives: each drive reads in
//! proportion to its speed, and a read that fails on one copy goes to another. Each copy may use another device and its own
//! [`DirectMode`], here io_uring for a local drive and threads for a network mount:
//!
//! ```
//! use std::sync::Arc;
//!
//! use colibri_ring::{Class, DirectMode, Engine, EngineKind, Event, File, Files, Options, Priority};
//! use colibri_ring::{Range, Replica, SlabId};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let (local, mount) = (dir.path().join("local"), dir.path().join("mount"));
//! # std::fs::write(&local, vec![7; 300_000])?;
//! # std::fs::write(&mount, vec![7; 300_000])?;
//! let local = Replica::new(Arc::new(File::open(local)?), 0);
//! let mount = Replica {
//!     device: Some(EngineKind::Pread),
//!     direct: Some(DirectMode::Off),
//!     // The same number for both would mean that they share a drive.
//!     drive: 1_000_000,
//!     ..Replica::new(Arc::new(File::open(mount)?), 1)
//! };
//! let files = Files::new(vec![vec![local, mount]], DirectMode::Auto)?;
//! let class = Class { bytes: 512 << 10, count: 2 };
//! let mut engine = Engine::new(&files, &[class], Options::default())?;
//!
//! let range = |offset, len, part| Range { file: 0, offset, len, part };
//! let now = files.layout(&[range(0, 100, 0), range(150_000, 100_000, 1)])?;
//! let soon = files.layout(&[range(250_000, 50_000, 0)])?;
//! engine.read(SlabId(0), Priority::Demand, now);
//! engine.read(SlabId(1), Priority::Prefetch, soon);
//! // The first hundred bytes can be used before the others have come.
//! while !engine.ready(SlabId(0), 0) {
//!     engine.wait()?;
//! }
//! assert_eq!(engine.payload(SlabId(0), 0), [7; 100]);
//! // The prefetch becomes a demand.
//! engine.promote(SlabId(1));
//! while !engine.ready(SlabId(1), 0) {
//!     if let Event::Failed(_, error) = engine.wait()? {
//!         return Err(error.into());
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Errors
//!
//! A [`Range`] that ends after its file is refused by [`Files::layout`]. A read that fails on every copy is an [`Event::Failed`] of
//! its slab, and the engine goes on. A call that the kernel refuses for good is an [`EngineError`]; a [`KernelError`] names cause
//! and remedy.
//!
//! # Soundness
//!
//! The kernel writes into a slab while other code runs, so that safe code must not see these bytes. Only a checked [`Layout`] can be
//! read, only complete parts can be borrowed, and an engine that is dropped waits for its reads. Miri checks the engine with both
//! threads on a device that writes memory, the arena and the scheduler:
//! `MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test -p colibri-ring --lib -- engine:: arena schedule::`. It has no
//! system calls of io_uring. loom is not used: the two threads share only mutexes, condition variables and channels.

mod arena;
pub mod bulk;
mod command;
#[cfg(test)]
mod denied;
mod device;
mod devices;
mod direct;
mod drive;
mod driver;
mod engine;
mod error;
mod event;
pub mod extent;
mod file;
pub mod headers;
mod inline;
mod kernel;
pub mod limits;
mod mount;
mod options;
mod physical;
mod pread;
pub mod probe;
pub mod record;
mod region;
mod replica;
pub mod schedule;
mod shares;
pub mod sim;
mod speed;
mod stats;
mod thread;
pub mod tokio_read;
mod uring;
mod window;

pub use arena::{Class, SlabId};
pub use device::EngineKind;
pub use drive::Window;
pub use engine::{Engine, SlabState};
pub use error::EngineError;
pub use event::{Event, Priority, ReadError};
pub use extent::{Layout, Range, RangeError};
pub use file::{Advice, DirectAlign, File, FileError};
pub use kernel::{DeviceError, KernelCall, KernelError, is_refusal};
pub use mount::{Mount, mount_of};
pub use options::Options;
pub use physical::drive_of;
pub use region::ArenaError;
pub use replica::{DirectMode, DirectRefused, Files, Replica, Replicas};
pub use stats::{SourceStats, Stats};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
