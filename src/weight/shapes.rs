//! The resident matrices of a model by name: what is one, and its shape.

use crate::config::Config;
use crate::weight::{EMBEDDING, HEAD, Role, role};

/// Layers beyond the last that may be there for multi-token prediction.
const MAX_MTP: usize = 16;

/// A resident matrix that the architecture has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Output size.
    pub rows: usize,
    /// Input size.
    pub cols: usize,
    /// What it is for.
    pub role: Role,
    /// Whether it belongs to a layer for multi-token prediction.
    pub mtp: bool,
}

/// The layer of a tensor, and what follows in its name.
pub fn layer_of(name: &str) -> Option<(usize, &str)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

/// Whether `layer` is one for multi-token prediction.
pub fn is_mtp(config: &Config, layer: usize) -> bool {
    (config.num_hidden_layers..config.num_hidden_layers + MAX_MTP).contains(&layer)
}

/// The matrix that only a layer for multi-token prediction has.
pub fn projection_name(layer: usize) -> String {
    format!("model.layers.{layer}.eh_proj.weight")
}

/// The matrix `name`; `None` for vectors, routed experts and what the architecture does not have.
pub fn resident(config: &Config, name: &str) -> Option<Resident> {
    let matrix = |rows, cols, mtp| Resident {
        rows,
        cols,
        role: role(name),
        mtp,
    };
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    if name == EMBEDDING || name == HEAD {
        return Some(matrix(vocab, hidden, false));
    }
    let (layer, rest) = layer_of(name)?;
    let mtp = is_mtp(config, layer);
    if !mtp && layer >= config.num_hidden_layers {
        return None;
    }
    let (rows, cols) = match rest.strip_suffix(".weight")? {
        "eh_proj" if mtp => (hidden, 2 * hidden),
        "embed_tokens" | "shared_head.head" if mtp => (vocab, hidden),
        part => in_layer(config, part)?,
    };
    Some(matrix(rows, cols, mtp))
}

/// [rows, cols] of a matrix of a decoder layer.
fn in_layer(config: &Config, part: &str) -> Option<(usize, usize)> {
    let c = config;
    let (hidden, heads) = (c.hidden_size, c.num_attention_heads);
    let (dense, shared) = (c.intermediate_size, c.shared_intermediate_size());
    Some(match part {
        "self_attn.q_a_proj" => (c.q_lora_rank, hidden),
        "self_attn.q_b_proj" => (heads * c.qk_head_dim(), c.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa" => (c.kv_width(), hidden),
        "self_attn.kv_b_proj" => (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "self_attn.o_proj" => (hidden, heads * c.v_head_dim),
        "self_attn.indexer.wq_b" => (c.index_n_heads * c.index_head_dim, c.q_lora_rank),
        "self_attn.indexer.wk" => (c.index_head_dim, hidden),
        "self_attn.indexer.weights_proj" => (c.index_n_heads, hidden),
        "mlp.gate" => (c.n_routed_experts, hidden),
        "mlp.gate_proj" | "mlp.up_proj" => (dense, hidden),
        "mlp.down_proj" => (hidden, dense),
        "mlp.shared_experts.gate_proj" | "mlp.shared_experts.up_proj" => (shared, hidden),
        "mlp.shared_experts.down_proj" => (hidden, shared),
        _ => return None,
    })
}
