//! Drafts tokens with the model's prediction layer, verifies them in one pass, and decides how many to draft.
//!
//! `predict` runs the layer, `drafter` feeds a sequence with drafts, `auto` decides on their number.

mod auto;
mod drafter;
mod predict;
mod scratch;

pub use auto::{Auto, MAX_DEPTH};
pub use drafter::{DraftStats, Drafter, Mode};
pub(super) use scratch::DraftScratch;
