//! Lists the tensors of a random model and spreads them over shards.

use super::{Spec, SynthError};
use crate::arch::{Architecture, MlpKind, Part, Projection, Shape, TensorId};
use crate::quant::infer::{Sizes, infer};
use crate::quant::{Format, MXFP4_GROUP};
use crate::shards::{Dtype, Planned};

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// Nibbles, a scale for 64 neighbours.
    Int4G64,
    /// Nibbles, a scale for a row.
    Int4,
    /// Bytes, a scale for a row.
    Int8,
    /// Two-bit fields, a scale for a row.
    Int2,
    /// bfloat16.
    Bf16,
}

impl Coding {
    fn format(self) -> Format {
        match self {
            Coding::Int4G64 => Format::Int4Group(64),
            Coding::Int4 => Format::Int4Row,
            Coding::Int8 => Format::Int8Row,
            Coding::Int2 => Format::Int2Row,
            Coding::Bf16 => Format::Bf16,
        }
    }
}

/// What the bytes of a tensor are. `bound` is the largest magnitude of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Content {
    /// Nothing: they read as zeros.
    Hole,
    /// Nibbles 1 to 15.
    Nibbles,
    /// Signed bytes but -128.
    Bytes,
    /// Two-bit fields 1 to 3.
    Fields,
    /// bfloat16 within `bound` of 0.
    Bf16 { bound: f32 },
    /// Bytes around `centre`: exponents.
    Exponents { centre: u8 },
    /// f32 within `bound` of `centre`.
    F32 { centre: f32, bound: f32 },
}

/// A tensor to be made.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub planned: Planned,
    pub bytes: u64,
    pub content: Content,
    /// Tensors of one group stay in one shard.
    group: usize,
}

/// Every tensor of the model in the order of its layers.
pub(super) fn tensors(arch: &Architecture, spec: &Spec) -> Result<Vec<Item>, SynthError> {
    let mut list = List {
        arch,
        items: Vec::new(),
        group: 0,
        sparse: spec.sparse,
    };
    list.tensor(TensorId::Embedding, Coding::Int8)?;
    for layer in 0..arch.num_hidden_layers() {
        list.layer(layer, [spec.dense, spec.experts.unwrap_or(Coding::Int4G64)])?;
    }
    list.tensor(TensorId::Norm, Coding::Int8)?;
    list.tensor(TensorId::Head, Coding::Int8)?;
    for layer in arch.num_hidden_layers()..arch.layers() {
        // The public container has the layer for drafts as int8, experts included.
        list.layer(layer, [Coding::Int8; 2])?;
    }
    Ok(list.items)
}

struct List<'a> {
    arch: &'a Architecture,
    items: Vec<Item>,
    group: usize,
    sparse: bool,
}

impl List<'_> {
    /// The tensors of one layer; `codings` are those of its resident matrices and of its experts.
    fn layer(&mut self, layer: usize, [dense, experts]: [Coding; 2]) -> Result<(), SynthError> {
        for part in self.arch.parts(layer) {
            self.tensor(TensorId::Layer(layer, part), dense)?;
        }
        if self.arch.mlp_of(layer) == MlpKind::Dense {
            return Ok(());
        }
        if self.arch.experts.in_pairs() {
            self.mxfp4(TensorId::FusedGateUp(layer))?;
            return self.mxfp4(TensorId::FusedDown(layer));
        }
        for expert in 0..self.arch.experts.count as u32 {
            self.group += 1;
            for projection in Projection::ALL {
                self.tensor(TensorId::Expert(layer, expert, projection), experts)?;
            }
        }
        self.group += 1;
        Ok(())
    }

    /// One tensor; `coding` is that of a matrix.
    fn tensor(&mut self, id: TensorId, coding: Coding) -> Result<(), SynthError> {
        let name = self.arch.name(id);
        match (id, self.arch.shape(id)) {
            (
                TensorId::Layer(_, Part::ExpertGateUpBias | Part::ExpertDownBias),
                Some(Shape::Matrix(experts, width)),
            ) => self.push(
                &name,
                Dtype::Bf16,
                &[experts, width],
                Content::Bf16 { bound: 0.1 },
            ),
            (TensorId::Layer(_, Part::Router), Some(Shape::Matrix(experts, hidden))) => {
                let bound = uniform_bound(hidden);
                let content = Content::F32 { centre: 0.0, bound };
                self.push(&name, Dtype::F32, &[experts, hidden], content)
            }
            (_, Some(Shape::Vector(len))) => {
                let (centre, bound) = match id.part() {
                    Some(Part::RouterBias) => (0.0, 0.02),
                    Some(Part::IndexNormBias | Part::RouterLogitBias | Part::Sinks) => (0.0, 0.1),
                    Some(Part::QueryBias | Part::KeyBias | Part::ValueBias | Part::OutputBias) => {
                        (0.0, 0.1)
                    }
                    // A norm.
                    _ => (1.0, 0.1),
                };
                self.push(&name, Dtype::F32, &[len], Content::F32 { centre, bound })
            }
            (_, Some(Shape::Matrix(rows, cols))) => {
                // Values of an embedding have variance 1, those of the head give logits of about that.
                let fan_in = if id == TensorId::Embedding { 1 } else { cols };
                let real = matches!(id, TensorId::Embedding | TensorId::Head);
                self.matrix(&name, [rows, cols], coding, fan_in, real)
            }
            (_, Some(Shape::Stack(..)) | None) => unreachable!("{id:?} is not listed"),
        }
    }

    /// All matrices of a kind of a layer's experts, as MXFP4.
    fn mxfp4(&mut self, id: TensorId) -> Result<(), SynthError> {
        // The standard deviation of FP4 values whose codes are uniform.
        const DEVIATION: f32 = 2.92;
        let name = self.arch.name(id);
        let Some(Shape::Stack(experts, rows, cols)) = self.arch.shape(id) else {
            unreachable!("{id:?} is a stack")
        };
        if !cols.is_multiple_of(MXFP4_GROUP) {
            let (name, format) = (name.clone(), Format::Mxfp4.name());
            return Err(SynthError::Unreadable { name, cols, format });
        }
        let groups = cols / MXFP4_GROUP;
        let exponent = -(DEVIATION * (cols as f32).sqrt()).log2();
        let (codes, scales) = match self.sparse {
            true => (Content::Hole, Content::Hole),
            false => {
                let centre = (127.0 + exponent.round()).clamp(1.0, 253.0) as u8;
                (Content::Nibbles, Content::Exponents { centre })
            }
        };
        let blocks = [experts, rows, groups, MXFP4_GROUP / 2];
        self.push(&format!("{name}_blocks"), Dtype::U8, &blocks, codes)?;
        let of_groups = [experts, rows, groups];
        self.push(&format!("{name}_scales"), Dtype::U8, &of_groups, scales)
    }

    /// A matrix whose values have the variance 1 / `fan_in`, and its scales if it has any. `real` ones are never holes.
    fn matrix(
        &mut self,
        name: &str,
        [rows, cols]: [usize; 2],
        coding: Coding,
        fan_in: usize,
        real: bool,
    ) -> Result<(), SynthError> {
        let format = coding.format();
        // The standard deviation of the codes: uniform over -7..=7, -127..=127 and -1..=1, but for a zero that is twice as
        // likely.
        let (content, deviation) = match coding {
            Coding::Int4G64 | Coding::Int4 => (Content::Nibbles, 4.18),
            Coding::Int8 => (Content::Bytes, 73.6),
            Coding::Int2 => (Content::Fields, 0.707),
            Coding::Bf16 => {
                let bound = uniform_bound(fan_in);
                (Content::Bf16 { bound }, 1.0)
            }
        };
        let hole = self.sparse && !real;
        let content = if hole { Content::Hole } else { content };
        if coding == Coding::Bf16 {
            return self.push(name, Dtype::Bf16, &[rows, cols], content);
        }
        let too_large = || SynthError::TooLarge(name.to_owned());
        let bytes = format.row_bytes(cols).and_then(|row| row.checked_mul(rows));
        let bytes = bytes.ok_or_else(too_large)?;
        let count = format.scale_bytes(rows, cols).ok_or_else(too_large)? / 4;
        let sizes = Sizes {
            rows,
            cols,
            weights: bytes as u64,
            scales: count as u64,
        };
        // Narrow matrices may have the sizes of two formats. (One group for each row is the same as a scale for each row.)
        if infer(sizes, None).is_err() {
            return Err(SynthError::Unreadable {
                name: name.to_owned(),
                cols,
                format: format.name(),
            });
        }
        self.push(name, Dtype::U8, &[bytes], content)?;
        let scale = 1.0 / (deviation * (fan_in as f32).sqrt());
        let scales = if hole {
            Content::Hole
        } else {
            Content::F32 {
                centre: scale,
                bound: scale / 4.0,
            }
        };
        self.push(&format!("{name}.qs"), Dtype::F32, &[count], scales)
    }

    fn push(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        content: Content,
    ) -> Result<(), SynthError> {
        let planned = Planned {
            name: name.to_owned(),
            dtype,
            shape: shape.iter().map(|n| *n as u64).collect(),
        };
        let bytes = planned
            .bytes()
            .ok_or_else(|| SynthError::TooLarge(name.to_owned()))?;
        self.items.push(Item {
            planned,
            bytes,
            content,
            group: self.group,
        });
        Ok(())
    }
}

/// A uniform distribution within this bound of zero has the variance 1 / `fan_in`.
fn uniform_bound(fan_in: usize) -> f32 {
    (3.0 / fan_in as f32).sqrt()
}

/// Cuts the list into shards of about `bytes`, between groups only, and sorts each as the safetensors library does: wide
/// types first, then by name. So the scales of an expert are neighbours, and its weights are.
pub(super) fn into_shards(items: Vec<Item>, bytes: u64) -> Vec<Vec<Item>> {
    let mut shards = Vec::new();
    let (mut shard, mut size): (Vec<Item>, u64) = (Vec::new(), 0);
    for item in items {
        let within = shard.last().is_some_and(|last| last.group == item.group);
        if size >= bytes && !within {
            shards.push(std::mem::take(&mut shard));
            size = 0;
        }
        size = size.saturating_add(item.bytes);
        shard.push(item);
    }
    if !shard.is_empty() {
        shards.push(shard);
    }
    for shard in &mut shards {
        shard.sort_by(|a, b| {
            let (a, b) = (&a.planned, &b.planned);
            (b.dtype.bits(), &a.name).cmp(&(a.dtype.bits(), &b.name))
        });
    }
    shards
}
