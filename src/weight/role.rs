//! Decides by a tensor's role how it may be quantised.

use crate::arch::{Part, TensorId};
use crate::quant::Activations;

/// What a resident tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The embedding or the head: one row a token of the vocabulary.
    Embedding,
    /// The router of a sparse layer, which selects, and biases of experts: never rounded.
    Router,
    /// Any other resident tensor.
    Dense,
}

/// The role of a resident tensor.
pub fn role(id: TensorId) -> Role {
    match id {
        TensorId::Embedding | TensorId::Head => Role::Embedding,
        TensorId::Layer(_, Part::Router | Part::ExpertGateUpBias | Part::ExpertDownBias) => {
            Role::Router
        }
        _ => Role::Dense,
    }
}

/// How the products of a resident matrix take activations when the others take them as `wanted`.
///
/// What selects stays exact: the router, the indexer, and the head, which is bound by memory anyway. So does
/// [`Part::KvUp`], of which one half is only ever summed over rows, where there is nothing to round for.
pub fn activations_of(id: TensorId, wanted: Activations) -> Activations {
    let part = id.part();
    let indexer = part.is_some_and(|part| Part::INDEXER.contains(&part));
    if role(id) != Role::Dense || indexer || part == Some(Part::KvUp) {
        return Activations::Exact;
    }
    wanted
}
