//! Names the parts of a forward pass.

/// A part of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Embedding rows.
    Embed,
    /// Projections, scores and values of attention, with its norm.
    Attention,
    /// Keys, scores and choice of the indexers.
    Indexer,
    /// The router of a layer and the predictions for the next one, with the norm before them.
    Router,
    /// Arithmetic of the routed experts.
    Experts,
    /// Waiting for the reads of experts.
    IoWait,
    /// Shared experts.
    Shared,
    /// MLPs of dense layers.
    Dense,
    /// Final norm and vocabulary projection.
    Head,
    /// Input and head of the prediction layer. The rest of that layer counts as in any layer.
    Draft,
}

impl Phase {
    /// All phases with their names.
    pub const ALL: [(Phase, &'static str); 10] = [
        (Phase::Embed, "embed"),
        (Phase::Attention, "attention"),
        (Phase::Indexer, "indexer"),
        (Phase::Router, "router"),
        (Phase::Experts, "experts"),
        (Phase::IoWait, "io_wait"),
        (Phase::Shared, "shared"),
        (Phase::Dense, "dense"),
        (Phase::Head, "head"),
        (Phase::Draft, "draft"),
    ];
}
