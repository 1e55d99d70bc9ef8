//! Keys of GLM-4.5-Air's and GLM-4.6's published `config.json`.

use serde_json::json;

use super::accounted::{Config, gqa};
use crate::arch::{QkNorm, RopeLayout, Scoring};

const AIR: Config = Config {
    text: include_str!("../published/glm-4.5-air.json"),
    without_effect: &[],
    refused: &[
        ("hidden_act", "\"gelu\"", "only silu"),
        ("n_group", "8", "only 1"),
        ("topk_group", "4", "only 1"),
        ("scoring_func", "\"softmax\"", "only sigmoid"),
    ],
};

const LARGE: Config = Config {
    text: include_str!("../published/glm-4.6.json"),
    ..AIR
};

#[test]
fn every_key_is_accounted_for() {
    AIR.check();
    LARGE.check();
}

#[test]
fn loads() {
    let arch = AIR.parse();
    let attention = gqa(&arch);
    assert_eq!(
        (attention.heads, attention.kv_heads, attention.width),
        (96, 8, 128)
    );
    assert_eq!(attention.norm, QkNorm::None);
    assert_eq!((attention.bias, attention.output_bias), (true, false));
    assert_eq!(
        (arch.rope.dims, arch.rope.layout),
        (64, RopeLayout::HalfSplit)
    );
    assert_eq!(arch.sparse_layers().count(), 45);
    assert_eq!((arch.shared_width, arch.intermediate_size), (1408, 10_944));
    assert_eq!(
        (arch.router.scoring, arch.router.bias),
        (Scoring::Sigmoid, true)
    );

    let arch = LARGE.parse();
    assert_eq!(gqa(&arch).norm, QkNorm::Head);
    assert_eq!(arch.sparse_layers().count(), 89);
    // 754 KB a token.
    assert_eq!(4 * arch.kv_width() * arch.num_hidden_layers(), 753_664);
}

#[test]
fn the_rotated_share_has_three_sources() {
    let dims = |changes| AIR.with(changes).unwrap().rope.dims;
    assert_eq!(dims(json!({"partial_rotary_factor": null})), 64);
    assert_eq!(dims(json!({"partial_rotary_factor": 0.25})), 32);
    let rope = json!({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0});
    assert_eq!(dims(json!({"rope_parameters": rope})), 128);
    for (factor, says) in [
        (
            json!(0.01),
            "a share of head_dim (128) that is an even number",
        ),
        (
            json!(1.5),
            "partial_rotary_factor is 1.5, allowed is 0 to 1",
        ),
    ] {
        let error = AIR
            .with(json!({"partial_rotary_factor": factor}))
            .unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
}
