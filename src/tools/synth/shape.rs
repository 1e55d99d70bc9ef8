//! The hyperparameters of a random model.

use serde_json::{Value, json};

/// A shape that has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// GLM-5.2: 744 billion parameters, 419 GB with int4 experts.
    Glm52,
    /// About 2 GB, of the same architecture.
    Small,
}

/// What the config of the model says, as far as it can be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Decoder layers.
    pub layers: u64,
    /// The first so many have a dense MLP.
    pub dense_layers: u64,
    /// Width of the residual.
    pub hidden: u64,
    /// Width of a dense layer's MLP.
    pub intermediate: u64,
    /// Width of an expert.
    pub moe_intermediate: u64,
    /// Routed experts of a layer.
    pub experts: u64,
    /// Experts that a token uses.
    pub top_k: u64,
    /// Shared experts.
    pub shared_experts: u64,
    /// Attention heads.
    pub heads: u64,
    /// Rank of the queries.
    pub q_lora_rank: u64,
    /// Rank of keys and values.
    pub kv_lora_rank: u64,
    /// Dimensions of a head's key without position.
    pub qk_nope_head_dim: u64,
    /// Dimensions of a head's key with position.
    pub qk_rope_head_dim: u64,
    /// Dimensions of a head's value.
    pub v_head_dim: u64,
    /// Tokens of the vocabulary.
    pub vocab: u64,
    /// Positions that sparse attention attends; 0 for dense attention without an indexer.
    pub index_topk: u64,
    /// Every so many layers has an indexer of its own.
    pub index_topk_freq: u64,
    /// So many first layers but one have one in any case.
    pub index_skip_topk_offset: u64,
    /// Heads of the indexer.
    pub index_heads: u64,
    /// Dimensions of its heads.
    pub index_head_dim: u64,
    /// Base of the rotary positions.
    pub rope_theta: f64,
}

impl Preset {
    /// Its shape.
    pub fn shape(self) -> Shape {
        match self {
            Preset::Glm52 => Shape {
                layers: 78,
                dense_layers: 3,
                hidden: 6144,
                intermediate: 12288,
                moe_intermediate: 2048,
                experts: 256,
                top_k: 8,
                shared_experts: 1,
                heads: 64,
                q_lora_rank: 2048,
                kv_lora_rank: 512,
                qk_nope_head_dim: 192,
                qk_rope_head_dim: 64,
                v_head_dim: 256,
                vocab: 154_880,
                index_topk: 2048,
                index_topk_freq: 4,
                index_skip_topk_offset: 3,
                index_heads: 32,
                index_head_dim: 128,
                rope_theta: 8e6,
            },
            Preset::Small => Shape {
                layers: 9,
                dense_layers: 1,
                hidden: 1024,
                intermediate: 4096,
                moe_intermediate: 1536,
                experts: 96,
                top_k: 8,
                shared_experts: 1,
                heads: 16,
                q_lora_rank: 512,
                kv_lora_rank: 256,
                qk_nope_head_dim: 64,
                qk_rope_head_dim: 64,
                v_head_dim: 64,
                vocab: 16_384,
                index_topk: 2048,
                index_topk_freq: 4,
                index_skip_topk_offset: 3,
                index_heads: 32,
                index_head_dim: 128,
                rope_theta: 8e6,
            },
        }
    }
}

impl Shape {
    /// config.json of the shape.
    pub(super) fn config_json(&self, mtp: bool) -> Value {
        json!({
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.moe_intermediate,
            "num_hidden_layers": self.layers,
            "first_k_dense_replace": self.dense_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "n_shared_experts": self.shared_experts,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": true,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "index_topk": self.index_topk,
            "index_topk_freq": self.index_topk_freq,
            "index_skip_topk_offset": self.index_skip_topk_offset,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_head_dim,
            "num_nextn_predict_layers": u8::from(mtp),
            "hidden_act": "silu",
            "attention_bias": false,
            "tie_word_embeddings": false,
            "rms_norm_eps": 1e-5,
            "rope_parameters": { "rope_type": "default", "rope_theta": self.rope_theta },
            // A random model never means to stop.
            "eos_token_id": [],
        })
    }
}
