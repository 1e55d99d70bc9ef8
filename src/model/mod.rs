//! Computes a `glm_moe_dsa` model: loading, layers, forward passes, drafts.
//!
//! [`Weights`] are the resident tensors. A [`Runner`] holds them with all that exists once, and takes steps of [`Sequence`]s through the
//! layers. A row's way: `forward` embeds it, takes it through each layer's `attention` (with its `indexer` and the pages of `kv`) and `mlp`
//! or `moe` (with its `router`), and ends in logits. `draft` continues a sequence tentatively with the layer of `mtp`.

mod assignments;
mod attention;
mod batch;
pub mod draft;
mod error;
mod forward;
mod indexer;
mod kv;
mod layer;
mod limits;
mod linear;
mod load;
mod mlp;
mod moe;
mod mtp;
mod needs;
pub mod ops;
mod pages;
mod pass;
mod phase;
mod progress;
mod rope;
mod rounding;
mod router;
mod runner;
mod scratch;
mod sequence;
mod timeline;
mod timer;
mod topk;

pub use batch::{Logits, PassLogits, Step};
pub use error::ModelError;
pub use kv::{KvShape, KvSink, KvSource, KvView, KvWriter, LayerWidths, PAGE};
pub use layer::{LoadOptions, Sparsity};
pub use limits::BatchLimits;
pub use load::{Weights, resident_formats};
pub use mtp::{PredictionError, prediction};
pub use needs::{kv_bytes, resident_bytes, scores_bytes, sequence_bytes};
pub use phase::Phase;
pub use progress::Progress;
pub use rounding::Rounding;
pub use runner::{Runner, RunnerOptions, RunnerStats, check_context};
pub use sequence::{Sequence, reusable, swap_victim};
pub use timeline::{ForwardPass, PhaseSpan, Timeline};
