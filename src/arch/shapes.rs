//! Lists the tensors of an architecture and their shapes.

use super::{Architecture, Attention, Gqa, Mla, MlpKind, Part, Projection, QkNorm, TensorId};

/// Layers beyond the last that a checkpoint may have for drafts.
const MAX_DRAFT_LAYERS: usize = 16;

/// Dimensions of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Values.
    Vector(usize),
    /// Rows (outputs) and columns (inputs).
    Matrix(usize, usize),
    /// Matrices, and rows and columns of each.
    Stack(usize, usize, usize),
}

impl Architecture {
    /// Whether `layer` comes after the decoder layers and may hold a layer for drafts.
    pub fn is_draft(&self, layer: usize) -> bool {
        let layers = self.num_hidden_layers();
        (layers..layers + MAX_DRAFT_LAYERS).contains(&layer)
    }

    /// The full name of a tensor.
    pub fn name(&self, id: TensorId) -> String {
        self.names.name(id)
    }

    /// The full name of a part of a layer.
    pub fn part_name(&self, layer: usize, part: Part) -> String {
        self.names.name(TensorId::Layer(layer, part))
    }

    /// The tensor of this name, if the architecture has it.
    pub fn find(&self, name: &str) -> Option<(TensorId, Shape)> {
        let id = self.names.parse(name)?;
        Some((id, self.shape(id)?))
    }

    /// The shape of a tensor; `None` where the architecture does not have it. Optional tensors also have a shape: biases, the
    /// head of a tied embedding, indexers of layers that share.
    pub fn shape(&self, id: TensorId) -> Option<Shape> {
        let (vocab, hidden) = (self.vocab_size, self.hidden_size);
        let (experts, width) = (self.experts.count, self.experts.width);
        let exists = |layer| layer < self.num_hidden_layers() || self.is_draft(layer);
        if id.layer().is_some_and(|layer| !exists(layer)) {
            return None;
        }
        Some(match id {
            TensorId::Embedding | TensorId::Head => Shape::Matrix(vocab, hidden),
            TensorId::Norm => Shape::Vector(hidden),
            TensorId::Expert(_, expert, _) if expert as usize >= experts => return None,
            // Single experts of this layout have no name.
            TensorId::Expert(..) if self.experts.in_pairs() => return None,
            TensorId::Expert(_, _, Projection::Down) => Shape::Matrix(hidden, width),
            TensorId::Expert(..) => Shape::Matrix(width, hidden),
            TensorId::FusedGateUp(_) => Shape::Stack(experts, 2 * width, hidden),
            TensorId::FusedDown(_) => Shape::Stack(experts, hidden, width),
            TensorId::Layer(layer, part) => return self.part_shape(layer, part),
        })
    }

    fn part_shape(&self, layer: usize, part: Part) -> Option<Shape> {
        let (vocab, hidden) = (self.vocab_size, self.hidden_size);
        let (dense, shared, experts) = (
            self.intermediate_size,
            self.shared_width,
            self.experts.count,
        );
        Some(match part {
            Part::AttentionNorm | Part::MlpNorm => Shape::Vector(hidden),
            Part::OutputBias => Shape::Vector(hidden),
            Part::Gate | Part::Up => Shape::Matrix(dense, hidden),
            Part::Down => Shape::Matrix(hidden, dense),
            Part::Router => Shape::Matrix(experts, hidden),
            Part::RouterBias | Part::RouterLogitBias => Shape::Vector(experts),
            Part::ExpertGateUpBias => Shape::Matrix(experts, 2 * self.experts.width),
            Part::ExpertDownBias => Shape::Matrix(experts, hidden),
            Part::SharedGate | Part::SharedUp => Shape::Matrix(shared, hidden),
            Part::SharedDown => Shape::Matrix(hidden, shared),
            Part::DraftInput
            | Part::DraftTokenNorm
            | Part::DraftHiddenNorm
            | Part::DraftHeadNorm
            | Part::DraftEmbedding
            | Part::DraftHead
                if !self.is_draft(layer) =>
            {
                return None;
            }
            Part::DraftInput => Shape::Matrix(hidden, 2 * hidden),
            Part::DraftTokenNorm | Part::DraftHiddenNorm | Part::DraftHeadNorm => {
                Shape::Vector(hidden)
            }
            Part::DraftEmbedding | Part::DraftHead => Shape::Matrix(vocab, hidden),
            _ => {
                return match &self.attention {
                    Attention::Mla(mla) => self.mla_shape(mla, part),
                    Attention::Gqa(gqa) => gqa_shape(gqa, hidden, part),
                };
            }
        })
    }

    /// The shape of a part of multi-head latent attention or of its indexer.
    fn mla_shape(&self, mla: &Mla, part: Part) -> Option<Shape> {
        let (hidden, index) = (self.hidden_size, self.indexer.as_ref());
        Some(match part {
            Part::Query if mla.q_rank.is_some() => return None,
            Part::Query => Shape::Matrix(mla.heads * mla.query_width(), hidden),
            Part::QueryDown => Shape::Matrix(mla.q_rank?, hidden),
            Part::QueryDownBias | Part::QueryNorm => Shape::Vector(mla.q_rank?),
            Part::QueryUp => Shape::Matrix(mla.heads * mla.query_width(), mla.q_rank?),
            Part::KvDown => Shape::Matrix(mla.cache_width(), hidden),
            Part::KvDownBias => Shape::Vector(mla.cache_width()),
            Part::KvNorm => Shape::Vector(mla.kv_rank),
            Part::KvUp => Shape::Matrix(mla.heads * (mla.nope + mla.value), mla.kv_rank),
            Part::Output => Shape::Matrix(hidden, mla.heads * mla.value),
            Part::IndexQuery => Shape::Matrix(index?.heads * index?.width, mla.q_rank?),
            Part::IndexKey => Shape::Matrix(index?.width, hidden),
            Part::IndexWeights => Shape::Matrix(index?.heads, hidden),
            Part::IndexNorm | Part::IndexNormBias => Shape::Vector(index?.width),
            _ => return None,
        })
    }

    /// The parts that a used layer needs, routed experts excepted.
    pub fn parts(&self, layer: usize) -> Vec<Part> {
        let mut parts = vec![Part::AttentionNorm, Part::MlpNorm];
        match &self.attention {
            Attention::Mla(mla) => parts.extend(mla.parts()),
            Attention::Gqa(gqa) => parts.extend(gqa.parts()),
        }
        if self.is_indexed(layer) {
            parts.extend(Part::INDEXER);
        }
        match self.mlp_of(layer) {
            MlpKind::Dense => parts.extend(Part::DENSE),
            MlpKind::Sparse => {
                parts.push(Part::Router);
                if self.router.bias {
                    parts.push(Part::RouterBias);
                }
                if self.router.logit_bias {
                    parts.push(Part::RouterLogitBias);
                }
                if self.experts.in_pairs() {
                    parts.extend([Part::ExpertGateUpBias, Part::ExpertDownBias]);
                }
                if self.shared_width > 0 {
                    parts.extend(Part::SHARED);
                }
            }
        }
        if self.is_draft(layer) {
            parts.extend(Part::DRAFT);
        }
        parts
    }
}

/// The shape of a part of grouped-query attention.
fn gqa_shape(gqa: &Gqa, hidden: usize, part: Part) -> Option<Shape> {
    let (query, key) = (gqa.query_width(), gqa.key_width());
    Some(match part {
        Part::Query => Shape::Matrix(query, hidden),
        Part::QueryBias => Shape::Vector(query),
        Part::Key | Part::Value => Shape::Matrix(key, hidden),
        Part::KeyBias | Part::ValueBias => Shape::Vector(key),
        Part::QueryNorm | Part::KeyNorm => Shape::Vector(match gqa.norm {
            QkNorm::None => return None,
            QkNorm::Head => gqa.width,
            QkNorm::Flat if part == Part::QueryNorm => query,
            QkNorm::Flat => key,
        }),
        Part::Sinks => Shape::Vector(gqa.heads),
        Part::Output => Shape::Matrix(hidden, query),
        _ => return None,
    })
}

impl Mla {
    /// The parts that a layer needs, its indexer excepted.
    fn parts(&self) -> Vec<Part> {
        let mut parts = vec![Part::KvDown, Part::KvNorm, Part::KvUp, Part::Output];
        match self.q_rank {
            Some(_) => parts.extend([Part::QueryDown, Part::QueryNorm, Part::QueryUp]),
            None => parts.push(Part::Query),
        }
        if self.bias {
            parts.extend([Part::KvDownBias, Part::OutputBias]);
            parts.extend(self.q_rank.map(|_| Part::QueryDownBias));
        }
        parts
    }
}

impl Gqa {
    /// The parts that a layer needs.
    fn parts(&self) -> Vec<Part> {
        let mut parts = vec![Part::Query, Part::Key, Part::Value, Part::Output];
        if self.norm != QkNorm::None {
            parts.extend([Part::QueryNorm, Part::KeyNorm]);
        }
        if self.bias {
            parts.extend([Part::QueryBias, Part::KeyBias, Part::ValueBias]);
        }
        if self.output_bias {
            parts.push(Part::OutputBias);
        }
        if self.sinks {
            parts.push(Part::Sinks);
        }
        parts
    }
}

impl Part {
    /// The tensors of an indexer.
    pub const INDEXER: [Part; 5] = [
        Part::IndexQuery,
        Part::IndexKey,
        Part::IndexWeights,
        Part::IndexNorm,
        Part::IndexNormBias,
    ];
    /// Gate, up and down of a dense MLP.
    pub const DENSE: [Part; 3] = [Part::Gate, Part::Up, Part::Down];
    /// Gate, up and down of the shared expert.
    pub const SHARED: [Part; 3] = [Part::SharedGate, Part::SharedUp, Part::SharedDown];
    /// What only a layer for drafts has and needs.
    pub const DRAFT: [Part; 4] = [
        Part::DraftInput,
        Part::DraftTokenNorm,
        Part::DraftHiddenNorm,
        Part::DraftHeadNorm,
    ];
}
