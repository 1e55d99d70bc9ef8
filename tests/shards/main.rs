//! Directories of shards, from the outside: what is refused, what is read, and what must hold for any header.

mod directories;
mod files;
mod hostile;
mod properties;
mod reads;
