//! Tests the binary: exit codes, one error line, one JSON object, the reference's numbers.

#[path = "../common/child.rs"]
mod child;
#[path = "../common/mod.rs"]
mod common;

mod chat;
mod convert;
mod convert_ends;
mod corrupt;
mod damaged;
mod decode;
mod demo;
mod determinism;
mod grammar;
mod help;
mod hostile_shards;
mod hostile_text;
mod kv;
mod kv_chat;
mod kv_refused;
mod long_context;
mod lookahead;
mod manual;
mod mtp;
mod plan;
mod process;
mod profile;
mod pty;
mod reference;
mod room;
mod sandbox;
mod signals;
mod simulate;
mod synth;
mod templates;
mod text;
mod trace;
mod usage;
mod usage_history;
mod variables;
mod warnings;
mod whole;
