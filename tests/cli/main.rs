//! The binary as a user or a script meets it: exit codes, one error line, one JSON object, the reference's numbers.

#[path = "../common/mod.rs"]
mod common;

mod broken;
mod chat;
mod child;
mod convert;
mod convert_ends;
mod decode;
mod demo;
mod ends;
mod hostile_shards;
mod hostile_text;
mod identical;
mod kv;
mod kv_chat;
mod kv_refused;
mod long;
mod lookahead;
mod manual;
mod mtp;
mod plan;
mod profile;
mod pty;
mod reference;
mod sandbox;
mod simulate;
mod synth;
mod text;
mod trace;
mod usage;
mod usage_history;
mod vanished;
mod variables;
