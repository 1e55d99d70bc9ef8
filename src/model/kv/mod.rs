//! Keeps what attention remembers of earlier tokens, in pages that sequences share.
//!
//! A token leaves, per layer, its compressed key-value and rotated key (`kv_lora_rank + qk_rope_head_dim` values), and in layers with an
//! indexer also the indexer's key. A page has the rows of [`PAGE`] tokens in all layers, each layer's contiguous, so that attention works
//! through blocks that fit the L2 cache and a context grows without being copied.
//!
//! The prediction layer has separate pages. Its row t depends on token t + 1 and is stored at slot t + 1: then a page of it, too,
//! depends on its tokens and earlier ones only.

mod layout;
mod page;
mod prefix;
mod span;
mod swap;
mod table;
mod view;

pub use layout::{KvShape, LayerWidths, PAGE, PageLayout};
pub use page::{PagePool, pages_for};
pub use prefix::PrefixTree;
pub use span::{KvSpan, span_of};
pub use swap::SwapFile;
pub use table::{PageTable, Rows};
pub use view::{KvSink, KvSource, KvView, KvWriter};
