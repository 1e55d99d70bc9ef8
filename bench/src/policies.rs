//! Which experts to keep: cache policies replayed over what routers said, without a disk.

pub mod cache;
pub mod trace;
