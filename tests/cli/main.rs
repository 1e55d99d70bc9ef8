//! The binary as a user or a script meets it: exit codes, one error line, one JSON object, the reference's numbers.

#[path = "../common/mod.rs"]
mod common;

mod broken;
mod child;
mod decode;
mod ends;
mod hostile_shards;
mod hostile_text;
mod identical;
mod lookahead;
mod reference;
mod sandbox;
mod simulate;
mod usage;
mod usage_history;
