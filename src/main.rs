//! The `colibri-uring` command.
fn main() {}
