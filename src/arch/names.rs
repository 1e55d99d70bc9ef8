//! Names tensors: from a layer and a part to the name in the checkpoint, and back.
//!
//! No other module spells a tensor name. A family supplies its spellings as a [`Names`] value.

/// A matrix of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Projection {
    /// [width, hidden].
    Gate,
    /// [width, hidden].
    Up,
    /// [hidden, width].
    Down,
}

impl Projection {
    /// All, in the order in which an expert is computed.
    pub const ALL: [Projection; 3] = [Projection::Gate, Projection::Up, Projection::Down];
}

/// A tensor of a layer, routed experts excepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Norm before attention.
    AttentionNorm,
    /// Norm before the MLP.
    MlpNorm,
    /// Hidden to the queries of all heads.
    Query,
    /// MLA: hidden to the query's rank.
    QueryDown,
    /// Bias of [`Part::QueryDown`].
    QueryDownBias,
    /// MLA: norm of the low-rank query. GQA: norm of the queries.
    QueryNorm,
    /// MLA: the query's rank to the heads.
    QueryUp,
    /// MLA: hidden to the compressed key-value and the rotated key.
    KvDown,
    /// Bias of [`Part::KvDown`].
    KvDownBias,
    /// MLA: norm of the compressed key-value.
    KvNorm,
    /// MLA: the compressed key-value to keys and values of the heads.
    KvUp,
    /// Bias of [`Part::Query`].
    QueryBias,
    /// GQA: hidden to keys.
    Key,
    /// Bias of [`Part::Key`].
    KeyBias,
    /// GQA: norm of the keys.
    KeyNorm,
    /// GQA: hidden to values.
    Value,
    /// Bias of [`Part::Value`].
    ValueBias,
    /// GQA: for each query head a score without a value.
    Sinks,
    /// Values of the heads to hidden.
    Output,
    /// Bias of [`Part::Output`].
    OutputBias,
    /// Indexer: the low-rank query to its heads.
    IndexQuery,
    /// Indexer: hidden to its key.
    IndexKey,
    /// Indexer: hidden to the weights of its heads.
    IndexWeights,
    /// Indexer: norm of its key.
    IndexNorm,
    /// Bias of [`Part::IndexNorm`].
    IndexNormBias,
    /// Gate of a dense MLP.
    Gate,
    /// Up projection of a dense MLP.
    Up,
    /// Down projection of a dense MLP.
    Down,
    /// Hidden to the scores of the routed experts.
    Router,
    /// Added to the scores for the selection only.
    RouterBias,
    /// Added to the logits of the routed experts.
    RouterLogitBias,
    /// Biases of gate and up of all routed experts, a row for each, a gate before each up.
    ExpertGateUpBias,
    /// Biases of down of all routed experts, a row for each.
    ExpertDownBias,
    /// Gate of the shared expert.
    SharedGate,
    /// Up projection of the shared expert.
    SharedUp,
    /// Down projection of the shared expert.
    SharedDown,
    /// Drafts: the normed embedding and hidden state to hidden.
    DraftInput,
    /// Drafts: norm of the embedding.
    DraftTokenNorm,
    /// Drafts: norm of the hidden state.
    DraftHiddenNorm,
    /// Drafts: norm before the head.
    DraftHeadNorm,
    /// Drafts: a copy of the embedding; the model's own is used instead.
    DraftEmbedding,
    /// Drafts: a copy of the head; the model's own is used instead.
    DraftHead,
}

impl Part {
    /// Whether it is the weight of a norm, which the values are multiplied by.
    pub fn is_norm(self) -> bool {
        matches!(
            self,
            Part::AttentionNorm
                | Part::MlpNorm
                | Part::QueryNorm
                | Part::KvNorm
                | Part::KeyNorm
                | Part::IndexNorm
                | Part::DraftTokenNorm
                | Part::DraftHiddenNorm
                | Part::DraftHeadNorm
        )
    }
}

/// A tensor of a model, independent of how its family spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorId {
    /// The token embedding.
    Embedding,
    /// The norm after the last layer.
    Norm,
    /// Hidden to logits; absent where the embedding is tied.
    Head,
    /// Part of a layer.
    Layer(usize, Part),
    /// A matrix of one routed expert: layer, expert, projection.
    Expert(usize, u32, Projection),
    /// The gates and ups of all experts of a layer in one tensor: for each expert its gate rows, then its up rows.
    FusedGateUp(usize),
    /// The downs of all experts of a layer in one tensor.
    FusedDown(usize),
}

impl TensorId {
    /// The layer, for tensors of one.
    pub fn layer(self) -> Option<usize> {
        match self {
            TensorId::Embedding | TensorId::Norm | TensorId::Head => None,
            TensorId::Layer(layer, _)
            | TensorId::Expert(layer, ..)
            | TensorId::FusedGateUp(layer)
            | TensorId::FusedDown(layer) => Some(layer),
        }
    }

    /// The part of a layer.
    pub fn part(self) -> Option<Part> {
        match self {
            TensorId::Layer(_, part) => Some(part),
            _ => None,
        }
    }

    /// Whether it holds routed experts.
    pub fn is_expert(self) -> bool {
        matches!(
            self,
            TensorId::Expert(..) | TensorId::FusedGateUp(_) | TensorId::FusedDown(_)
        )
    }
}

/// How a family spells routed experts, after the name of the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertNames {
    /// The module of all experts.
    pub module: &'static str,
    /// Gate, up and down of one expert, after its number.
    pub single: [&'static str; 3],
    /// Gates and ups of all experts.
    pub fused_gate_up: &'static str,
    /// Downs of all experts.
    pub fused_down: &'static str,
}

/// Names of experts in most families.
pub(super) const EXPERT_NAMES: ExpertNames = ExpertNames {
    module: "mlp.experts",
    single: ["gate_proj.weight", "up_proj.weight", "down_proj.weight"],
    fused_gate_up: "gate_up_proj",
    fused_down: "down_proj",
};

/// How a checkpoint spells its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// The module that holds embedding, layers and norm.
    pub trunk: &'static str,
    /// The embedding, in the trunk.
    pub embedding: &'static str,
    /// The last norm, in the trunk.
    pub norm: &'static str,
    /// The head, in full.
    pub head: &'static str,
    /// The list of layers, in the trunk.
    pub layers: &'static str,
    /// Parts, after the name of the layer.
    pub parts: &'static [(Part, &'static str)],
    /// Routed experts.
    pub experts: ExpertNames,
}

impl Names {
    /// Whether the family has the part.
    pub fn has(&self, part: Part) -> bool {
        self.parts.iter().any(|(known, _)| *known == part)
    }

    /// The full name of a tensor.
    ///
    /// # Panics
    /// When the family does not have the part.
    pub fn name(&self, id: TensorId) -> String {
        let Names { trunk, layers, .. } = self;
        let ExpertNames { module, single, .. } = self.experts;
        match id {
            TensorId::Embedding => format!("{trunk}.{}", self.embedding),
            TensorId::Norm => format!("{trunk}.{}", self.norm),
            TensorId::Head => self.head.to_owned(),
            TensorId::Layer(layer, part) => {
                let found = self.parts.iter().find(|(known, _)| *known == part);
                let (_, name) = found.expect("a part that the family has");
                format!("{trunk}.{layers}.{layer}.{name}")
            }
            TensorId::Expert(layer, expert, projection) => {
                let name = single[projection as usize];
                format!("{trunk}.{layers}.{layer}.{module}.{expert}.{name}")
            }
            TensorId::FusedGateUp(layer) => {
                let name = self.experts.fused_gate_up;
                format!("{trunk}.{layers}.{layer}.{module}.{name}")
            }
            TensorId::FusedDown(layer) => {
                let name = self.experts.fused_down;
                format!("{trunk}.{layers}.{layer}.{module}.{name}")
            }
        }
    }

    /// The tensor of this name; `None` for names that the family does not have.
    pub fn parse(&self, name: &str) -> Option<TensorId> {
        if name == self.head {
            return Some(TensorId::Head);
        }
        let rest = after(name, self.trunk)?;
        if rest == self.embedding {
            return Some(TensorId::Embedding);
        }
        if rest == self.norm {
            return Some(TensorId::Norm);
        }
        let (layer, rest) = after(rest, self.layers)?.split_once('.')?;
        let layer = number(layer)?;
        if let Some((part, _)) = self.parts.iter().find(|(_, known)| *known == rest) {
            return Some(TensorId::Layer(layer, *part));
        }
        let rest = after(rest, self.experts.module)?;
        if rest == self.experts.fused_gate_up {
            return Some(TensorId::FusedGateUp(layer));
        }
        if rest == self.experts.fused_down {
            return Some(TensorId::FusedDown(layer));
        }
        let (expert, rest) = rest.split_once('.')?;
        let expert = u32::try_from(number(expert)?).ok()?;
        let projection = self
            .experts
            .single
            .iter()
            .position(|known| *known == rest)?;
        Some(TensorId::Expert(layer, expert, Projection::ALL[projection]))
    }
}

/// What follows `module` and a dot.
fn after<'a>(name: &'a str, module: &str) -> Option<&'a str> {
    name.strip_prefix(module)?.strip_prefix('.')
}

/// A number as it is written in names: digits, no leading zero.
fn number(text: &str) -> Option<usize> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    plain.then(|| text.parse().ok())?
}
