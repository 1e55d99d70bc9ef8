//! Many requests at once: the engine that puts them into common passes, and the server.

#[path = "../common/mod.rs"]
#[allow(dead_code)]
mod common;
mod engine;
mod http;
mod kept;
#[path = "../common/rng.rs"]
mod rng;
mod server;
mod tools;
