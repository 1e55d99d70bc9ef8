//! Keys of Qwen3-30B-A3B's published `config.json`.

use serde_json::json;

use super::accounted::Config;
use crate::arch::{Attention, MlpKind, RopeLayout};

const PUBLISHED: Config = Config {
    text: include_str!("../published/qwen3-30b-a3b.json"),
    // Only with use_sliding_window, which is refused.
    without_effect: &["max_window_layers", "sliding_window"],
    refused: &[
        ("hidden_act", "\"gelu\"", "only silu"),
        ("use_sliding_window", "true", "only false"),
        ("partial_rotary_factor", "0.5", "only 1.0"),
        ("rope_scaling", r#"{"rope_type": "linear"}"#, "only default"),
    ],
};

#[test]
fn every_key_is_accounted_for() {
    PUBLISHED.check();
}

#[test]
fn loads() {
    let arch = PUBLISHED.parse();
    let Attention::Gqa(gqa) = &arch.attention else {
        panic!("{:?}", arch.attention)
    };
    assert_eq!((gqa.heads, gqa.kv_heads, gqa.width), (32, 4, 128));
    assert_eq!((arch.kv_width(), arch.kv_blocks()), (1024, 8));
    assert_eq!(arch.sparse_layers().count(), 48);
    assert_eq!(
        (arch.rope.dims, arch.rope.layout),
        (128, RopeLayout::HalfSplit)
    );
}

#[test]
fn absent_sizes_of_heads_follow_from_others() {
    let width = |changes| {
        let arch = PUBLISHED.with(changes).unwrap();
        match arch.attention {
            Attention::Gqa(gqa) => (gqa.kv_heads, gqa.width),
            Attention::Mla(_) => (0, 0),
        }
    };
    assert_eq!(width(json!({"head_dim": null})), (4, 64));
    assert_eq!(width(json!({"num_key_value_heads": null})), (32, 128));
    let error = |changes| PUBLISHED.with(changes).unwrap_err().to_string();
    let heads = error(json!({"num_key_value_heads": 5}));
    assert!(heads.contains("allowed is a divisor of num_attention_heads (32)"));
    let heads = error(json!({"head_dim": null, "num_attention_heads": 4096}));
    assert!(heads.contains("num_attention_heads is 4096, allowed is at most hidden_size"));
    let odd = error(json!({"head_dim": 7}));
    assert!(
        odd.contains("head_dim is 7, allowed is an even number"),
        "{odd}"
    );
}

#[test]
fn layers_are_dense_by_list_and_step() {
    let kinds = |changes| {
        let mlp = PUBLISHED.with(changes).unwrap().mlp;
        let letter = |kind: &MlpKind| if *kind == MlpKind::Dense { 'd' } else { 's' };
        mlp.iter().take(6).map(letter).collect::<String>()
    };
    assert_eq!(kinds(json!({"decoder_sparse_step": 2})), "dsdsds");
    assert_eq!(
        kinds(json!({"decoder_sparse_step": 3, "mlp_only_layers": [5, 99]})),
        "ddsddd"
    );
    assert_eq!(kinds(json!({"mlp_only_layers": [0, 3]})), "dssdss");
    assert_eq!(kinds(json!({"mlp_only_layers": null})), "ssssss");
    for (changes, says) in [
        (json!({"mlp_only_layers": 3}), "expected a list of integers"),
        (
            json!({"mlp_only_layers": [-1]}),
            "mlp_only_layers is -1, allowed is 0 to",
        ),
        (
            json!({"decoder_sparse_step": 0}),
            "decoder_sparse_step is 0, allowed is 1 to",
        ),
    ] {
        let error = PUBLISHED.with(changes).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}
