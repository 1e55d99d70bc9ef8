//! Names a routed expert.

/// A routed expert of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertKey {
    /// Index of the layer in the model.
    pub layer: usize,
    /// Expert id.
    pub expert: u32,
}
