//! The binary as a user or a script meets it: exit codes, one error line, one JSON object, the reference's numbers.

mod decode;
mod usage;
