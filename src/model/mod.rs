//! The `glm_moe_dsa` model: loading, layers, forward pass.
//!
//! [`Model`] holds the resident weights, [`Session`] one context and what is needed to go through it. A token's
//! way: `forward` embeds it, takes it through each layer's `attention` (with its `indexer` and the cache `kv`) and
//! `mlp` or `moe` (with its `router`), and ends in logits.

pub mod attention;
pub mod clock;
pub mod error;
pub mod forward;
pub mod indexer;
pub mod kv;
pub mod load;
pub mod mlp;
pub mod moe;
pub mod ops;
pub mod rope;
pub mod router;
mod scratch;
mod topk;

pub use clock::Phase;
pub use error::ModelError;
pub use forward::{Session, SessionOptions, Stats};
pub use load::{LoadOptions, Model, Sparsity};
