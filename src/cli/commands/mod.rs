//! Runs the commands, one file each: a command's own flags, and the calls into the library.

pub mod chat;
pub mod convert;
pub mod decode;
pub mod demo;
pub mod doctor;
pub mod generation;
pub mod inspect;
pub mod kv;
pub mod load;
pub mod manual;
pub mod mirror;
pub mod plan;
pub mod profile;
pub mod score;
pub mod serve;
pub mod simulate;
pub mod synth;
pub mod tokenize;
