//! The `glm_moe_dsa` model: loading, layers, forward pass.
//!
//! [`Model`] holds the resident weights, [`Session`] one context and what is needed to go through it. A token's
//! way: `forward` embeds it, takes it through each layer's `attention` (with its `indexer` and the cache `kv`) and
//! `mlp` or `moe` (with its `router`), and ends in logits. `draft` continues it tentatively with the layer of `mtp`.

mod attention;
mod clock;
mod draft;
mod error;
mod forward;
mod indexer;
mod kv;
mod laps;
mod linear;
mod load;
mod mlp;
mod moe;
mod mtp;
mod needs;
pub mod ops;
mod pass;
mod progress;
mod rope;
mod rounding;
mod router;
mod scratch;
mod sizes;
mod topk;
mod users;

pub use clock::Phase;
pub use error::ModelError;
pub use forward::{Session, SessionOptions, Stats, check_context, reusable};
pub use kv::{KvCache, KvShape, LayerCache, LayerWidths, Rows};
pub use laps::{Lap, Laps, Walk};
pub use load::{LoadOptions, Model, Sparsity, resident_formats};
pub use mtp::{PredictionError, prediction};
pub use needs::{draft_bytes, kv_bytes, resident_bytes, scores_bytes};
pub use progress::Progress;
pub use rounding::Rounding;
pub use sizes::Sizes;
