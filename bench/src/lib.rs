//! Benches and storage experiments of colibri-uring. Each bench is a file under `benches/`; the SSDs that storage
//! experiments need are made by [`lab`].

pub mod binary;
pub mod fio;
pub mod lab;
pub mod policies;
