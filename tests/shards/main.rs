//! Tests the index of shards through its public interface.

mod directories;
mod files;
mod hostile;
mod properties;
mod reads;
