//! Which tensors a container of a given config has, and how they are spread over shards.

use super::{Spec, SynthError};
use crate::config::{Config, IndexerKind, MlpKind};
use crate::quant::Format;
use crate::quant::infer::{Sizes, infer};
use crate::shards::{Dtype, Planned};
use crate::weight::shapes::{self, Resident};

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
pub(super) fn tensors(config: &Config, spec: &Spec) -> Result<Vec<Item>, SynthError> {
    let mut list = List {
        items: Vec::new(),
        group: 0,
        sparse: spec.sparse,
    };
    let c = config;
    let (vocab, hidden) = (c.vocab_size, c.hidden_size);
    // Values of an embedding have variance 1, those of the head give logits of about that.
    list.matrix(
        "model.embed_tokens.weight",
        [vocab, hidden],
        Coding::Int8,
        1,
        true,
    )?;
    for layer in 0..c.num_hidden_layers {
        let indexed = c.index_topk > 0 && c.indexer[layer] == IndexerKind::Full;
        let kind = c.mlp[layer];
        list.layer(config, layer, kind, indexed, [spec.dense, spec.experts])?;
    }
    list.vector("model.norm.weight", hidden, 1.0, 0.1)?;
    list.matrix(
        "lm_head.weight",
        [vocab, hidden],
        Coding::Int8,
        hidden,
        true,
    )?;
    if spec.mtp {
        let layer = c.num_hidden_layers;
        let prefix = format!("model.layers.{layer}");
        for name in ["enorm", "hnorm", "shared_head.norm"] {
            list.vector(&format!("{prefix}.{name}.weight"), hidden, 1.0, 0.1)?;
        }
        let name = format!("{prefix}.eh_proj.weight");
        list.resident(c, &name, Coding::Int8)?;
        // The public container has it as int8, experts included, without an indexer.
        list.layer(config, layer, MlpKind::Sparse, false, [Coding::Int8; 2])?;
    }
    Ok(list.items)
}

struct List {
    items: Vec<Item>,
    group: usize,
    sparse: bool,
}

impl List {
    /// The tensors of one layer; `codings` are those of its resident matrices and of its experts.
    fn layer(
        &mut self,
        c: &Config,
        layer: usize,
        kind: MlpKind,
        indexed: bool,
        [dense, experts]: [Coding; 2],
    ) -> Result<(), SynthError> {
        let prefix = format!("model.layers.{layer}");
        let hidden = c.hidden_size;
        for name in ["input_layernorm", "post_attention_layernorm"] {
            self.vector(&format!("{prefix}.{name}.weight"), hidden, 1.0, 0.1)?;
        }
        let attention = |name: &str| format!("{prefix}.self_attn.{name}.weight");
        self.vector(&attention("q_a_layernorm"), c.q_lora_rank, 1.0, 0.1)?;
        self.vector(&attention("kv_a_layernorm"), c.kv_lora_rank, 1.0, 0.1)?;
        for name in [
            "q_a_proj",
            "q_b_proj",
            "kv_a_proj_with_mqa",
            "kv_b_proj",
            "o_proj",
        ] {
            self.resident(c, &attention(name), dense)?;
        }
        if indexed {
            let width = c.index_head_dim;
            for name in ["indexer.wq_b", "indexer.wk", "indexer.weights_proj"] {
                self.resident(c, &attention(name), dense)?;
            }
            self.vector(&attention("indexer.k_norm"), width, 1.0, 0.1)?;
            let bias = format!("{prefix}.self_attn.indexer.k_norm.bias");
            self.vector(&bias, width, 0.0, 0.1)?;
        }
        let mlp = format!("{prefix}.mlp");
        if kind == MlpKind::Dense {
            return self.mlp(&mlp, hidden, c.intermediate_size, dense);
        }
        let bound = uniform_bound(hidden);
        let router = Content::F32 { centre: 0.0, bound };
        let shape = [c.n_routed_experts, hidden];
        self.push(&format!("{mlp}.gate.weight"), Dtype::F32, &shape, router)?;
        let bias = format!("{mlp}.gate.e_score_correction_bias");
        self.vector(&bias, c.n_routed_experts, 0.0, 0.02)?;
        if c.shared_intermediate_size() > 0 {
            let shared = format!("{mlp}.shared_experts");
            self.mlp(&shared, hidden, c.shared_intermediate_size(), dense)?;
        }
        for expert in 0..c.n_routed_experts {
            self.group += 1;
            let prefix = format!("{mlp}.experts.{expert}");
            self.mlp(&prefix, hidden, c.moe_intermediate_size, experts)?;
        }
        self.group += 1;
        Ok(())
    }

    /// A resident matrix, of the shape that the architecture gives it.
    fn resident(&mut self, c: &Config, name: &str, coding: Coding) -> Result<(), SynthError> {
        let Resident { rows, cols, .. } =
            shapes::resident(c, name).expect("a matrix of the architecture");
        self.matrix(name, [rows, cols], coding, cols, false)
    }

    fn mlp(
        &mut self,
        prefix: &str,
        hidden: usize,
        intermediate: usize,
        coding: Coding,
    ) -> Result<(), SynthError> {
        for (name, rows, cols) in [
            ("gate", intermediate, hidden),
            ("up", intermediate, hidden),
            ("down", hidden, intermediate),
        ] {
            let name = format!("{prefix}.{name}_proj.weight");
            self.matrix(&name, [rows, cols], coding, cols, false)?;
        }
        Ok(())
    }

    fn vector(
        &mut self,
        name: &str,
        len: usize,
        centre: f32,
        bound: f32,
    ) -> Result<(), SynthError> {
        self.push(name, Dtype::F32, &[len], Content::F32 { centre, bound })
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
