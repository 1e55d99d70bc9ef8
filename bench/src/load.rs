//! Loads the server as clients do: streams at once, prompts that arrive while others decode.

pub mod client;
pub mod server;
pub mod streams;
