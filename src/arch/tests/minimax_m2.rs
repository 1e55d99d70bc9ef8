//! Keys of MiniMax-M2's published `config.json`.

use serde_json::json;

use super::accounted::{Config, gqa};
use crate::arch::{Projection, QkNorm, Shape, TensorId};

const PUBLISHED: Config = Config {
    text: include_str!("../published/minimax-m2.json"),
    without_effect: &[
        // Of its predecessors, which mix two kinds of attention and have a shared expert.
        "layernorm_full_attention_beta",
        "layernorm_linear_attention_beta",
        "layernorm_mlp_beta",
        "mlp_intermediate_size",
        "shared_moe_mode",
        // Training.
        "router_jitter_noise",
        // Layers for drafts, which are not published.
        "mtp_transformer_layers",
        "num_mtp_modules",
        "use_mtp",
    ],
    refused: &[
        ("hidden_act", "\"gelu\"", "only silu"),
        ("scoring_func", "\"softmax\"", "only sigmoid"),
        ("qk_norm_type", "\"per_head\"", "only per_layer"),
        ("use_qk_norm", "false", "only true"),
        ("use_routing_bias", "false", "only true"),
        ("shared_intermediate_size", "1536", "only 0"),
        ("sliding_window", "4096", "only null"),
        ("attn_type_list", "[1, 0]", "only 1"),
    ],
};

#[test]
fn every_key_is_accounted_for() {
    PUBLISHED.check();
}

#[test]
fn loads() {
    let arch = PUBLISHED.parse();
    let attention = gqa(&arch);
    assert_eq!(
        (attention.heads, attention.kv_heads, attention.width),
        (48, 8, 128)
    );
    assert_eq!(attention.norm, QkNorm::Flat);
    assert_eq!((arch.rope.dims, arch.rope.theta), (64, 5e6));
    assert_eq!(arch.sparse_layers().count(), 62);
    let up = TensorId::Expert(3, 255, Projection::Up);
    assert_eq!(
        arch.name(up),
        "model.layers.3.block_sparse_moe.experts.255.w3.weight"
    );
    assert_eq!(arch.shape(up), Some(Shape::Matrix(1536, 3072)));
}

#[test]
fn what_is_absent_is_that_of_the_library() {
    let absent = |key: &str| PUBLISHED.without(key);
    assert_eq!(gqa(&absent("head_dim")).width, 128);
    assert_eq!(absent("rope_theta").rope.theta, 5e6);
    assert_eq!(absent("rotary_dim").rope.dims, 128);
    assert_eq!(absent("eos_token_id").eos_token_ids, [200_020]);
    let newer = PUBLISHED.with(json!({"partial_rotary_factor": 0.25}));
    assert_eq!(newer.unwrap().rope.dims, 32);
    let odd = PUBLISHED.with(json!({"rotary_dim": 63})).unwrap_err();
    assert!(
        odd.to_string()
            .contains("rotary_dim is 63, allowed is an even number")
    );
}
