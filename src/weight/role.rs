//! What a weight is for, by its name: that decides how it may be quantised.

use crate::quant::Activations;

/// What a matrix is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The embedding or the head: one row a token of the vocabulary.
    Embedding,
    /// The router of a sparse layer, which chooses: never rounded.
    Router,
    /// Any other resident matrix.
    Dense,
}

/// The role of the resident matrix `name`.
pub fn role(name: &str) -> Role {
    if name == EMBEDDING || name == HEAD {
        Role::Embedding
    } else if name.ends_with(".mlp.gate.weight") {
        Role::Router
    } else {
        Role::Dense
    }
}

/// Name of the embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the head, where it is not the embedding.
pub const HEAD: &str = "lm_head.weight";

/// How the products of the resident matrix `name` take activations when the others take them as `wanted`.
///
/// What chooses stays exact: the router, the indexer, and the head, which is bound by memory anyway. So does `kv_b`, of which one half is only
/// ever summed over rows, where there is nothing to round for.
pub fn activations_of(name: &str, wanted: Activations) -> Activations {
    let chooses = role(name) != Role::Dense || name.contains(".indexer.");
    if chooses || name.ends_with(".kv_b_proj.weight") {
        return Activations::Exact;
    }
    wanted
}
