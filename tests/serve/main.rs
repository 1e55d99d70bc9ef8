//! Many requests at once: the engine that puts them into common passes, and the server.

mod client;
#[path = "../common/mod.rs"]
#[allow(dead_code)]
mod common;
mod drawn;
mod engine;
mod hostile;
mod http;
mod kept;
#[path = "../common/rng.rs"]
mod rng;
mod server;
mod stress;
mod tools;
mod union;
