//! Estimates the memory of a model before any of it is loaded.

use crate::arch::{Architecture, Part, TensorId};
use crate::model::attention::MAX_GROUP;
use crate::model::kv::PageLayout;
use crate::model::mtp::MAX_UNSEEN;
use crate::quant::encode::Packing;
use crate::shards::{Shards, Tensor};
use crate::weight;

/// Bytes of the resident weights: every tensor of the architecture that is neither a routed expert nor of an unused layer.
/// Float and FP8 matrices become `dense`, if that is given.
pub fn resident_bytes(shards: &Shards, arch: &Architecture, dense: Option<Packing>) -> u64 {
    let resident = |tensor: &Tensor<'_>| {
        let id = weight::id_of(arch, tensor.name);
        id.is_some_and(|id| is_used(arch, id) && !id.is_expert())
    };
    weight::resident_bytes(shards, arch, shards.iter().filter(resident), dense)
}

/// Whether the model loads the tensor.
fn is_used(arch: &Architecture, id: TensorId) -> bool {
    let copy = matches!(id.part(), Some(Part::DraftEmbedding | Part::DraftHead));
    !copy && id.layer().is_none_or(|layer| layer < arch.layers())
}

/// Bytes of the KV pages of `tokens` tokens, those of the prediction layer included where it is used, and indexer keys where sparse
/// attention is `dsa`.
pub fn kv_bytes(arch: &Architecture, dsa: bool, tokens: usize) -> u64 {
    let indexed = (0..arch.layers())
        .filter(|layer| dsa && arch.is_indexed(*layer))
        .count();
    let width = arch.indexer.as_ref().map_or(0, |indexer| indexer.width);
    let keys = (indexed as u64).saturating_mul(PageLayout::bytes_for(width, tokens));
    (arch.layers() as u64)
        .saturating_mul(PageLayout::bytes_for(arch.kv_width(), tokens))
        .saturating_add(keys)
}

/// Bytes that `sequences` sequences in a pass, each with up to `drafts` drafts, take beyond weights, experts, pages and the scratch of
/// one sequence that drafts nothing: logits, and the hidden states that the prediction layer has not seen.
pub fn sequence_bytes(arch: &Architecture, sequences: usize, drafts: usize) -> u64 {
    let sequences = sequences as u64;
    let (rows, hidden) = match arch.prediction {
        // One more row for the draft that is being made.
        Some(_) => (
            sequences
                .saturating_mul(drafts as u64 + 1)
                .saturating_add(1),
            sequences.saturating_mul((MAX_UNSEEN * arch.hidden_size) as u64),
        ),
        None => (sequences.saturating_sub(1), 0),
    };
    let logits = rows.saturating_mul(arch.vocab_size as u64);
    logits.saturating_add(hidden).saturating_mul(4)
}

/// Bytes of attention scores that `threads` threads hold for a context of `tokens` tokens, all attended.
pub fn scores_bytes(threads: usize, tokens: usize) -> u64 {
    ((4 * MAX_GROUP * threads) as u64).saturating_mul(tokens as u64)
}
