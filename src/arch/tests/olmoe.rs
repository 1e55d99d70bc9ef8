//! Keys of OLMoE-1B-7B's published `config.json`.

use serde_json::json;

use super::accounted::{Config, gqa};
use crate::arch::{MlpKind, QkNorm, Scoring};

const PUBLISHED: Config = Config {
    text: include_str!("../published/olmoe-1b-7b.json"),
    without_effect: &[],
    refused: &[
        ("hidden_act", "\"gelu\"", "only silu"),
        ("clip_qkv", "8.0", "only null"),
        ("sliding_window", "4096", "only null"),
        ("partial_rotary_factor", "0.5", "only 1.0"),
        ("head_dim", "64", "only hidden_size / num_attention_heads"),
    ],
};

#[test]
fn every_key_is_accounted_for() {
    PUBLISHED.check();
}

#[test]
fn loads() {
    let arch = PUBLISHED.parse();
    let gqa = gqa(&arch);
    assert_eq!((gqa.heads, gqa.kv_heads, gqa.width), (16, 16, 128));
    assert_eq!((gqa.norm, gqa.bias), (QkNorm::Flat, false));
    assert_eq!((arch.experts.count, arch.experts.width), (64, 1024));
    assert_eq!(arch.mlp, [MlpKind::Sparse; 16]);
    let router = &arch.router;
    assert_eq!(
        (router.scoring, router.normalise),
        (Scoring::Softmax, false)
    );
    assert_eq!(arch.eos_token_ids, [50_279]);
    let shared = PUBLISHED.with(json!({"num_key_value_heads": 4, "attention_bias": true}));
    let shared = shared.unwrap();
    let gqa = super::accounted::gqa(&shared);
    assert_eq!((gqa.kv_heads, gqa.bias, gqa.output_bias), (4, true, true));
}
