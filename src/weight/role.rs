//! What a weight is for, by its name: that decides how it may be quantised.

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
