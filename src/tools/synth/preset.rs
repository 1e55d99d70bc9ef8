//! Presets of random models.

use crate::arch::{Dimensions, Family, GLM_MOE_DSA};

/// A family and dimensions that have a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// GLM-5.2: 744 billion parameters, 419 GB with int4 experts.
    Glm52,
    /// About 2 GB, of the same architecture.
    Small,
}

impl Preset {
    /// The family whose config and tensor names are written.
    pub fn family(self) -> &'static Family {
        match self {
            Preset::Glm52 | Preset::Small => &GLM_MOE_DSA,
        }
    }

    /// The dimensions.
    pub fn dimensions(self) -> Dimensions {
        match self {
            Preset::Glm52 => Dimensions {
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
                draft_layers: 0,
            },
            Preset::Small => Dimensions {
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
                draft_layers: 0,
            },
        }
    }
}
