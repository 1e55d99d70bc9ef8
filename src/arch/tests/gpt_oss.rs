//! Keys of gpt-oss-20b's and gpt-oss-120b's published `config.json`.

use serde_json::json;

use super::accounted::{Config, gqa};
use crate::arch::{ExpertKind, Part, Shape, TensorId};

const SMALL: Config = Config {
    text: include_str!("../published/gpt-oss-20b.json"),
    without_effect: &[
        // Of the code that the model was published with.
        "experts_per_token",
        "initial_context_length",
    ],
    refused: &[
        ("hidden_act", "\"gelu\"", "only silu"),
        ("partial_rotary_factor", "0.5", "only 1.0"),
    ],
};

const LARGE: Config = Config {
    text: include_str!("../published/gpt-oss-120b.json"),
    ..SMALL
};

#[test]
fn every_key_is_accounted_for() {
    SMALL.check();
    LARGE.check();
}

#[test]
fn loads() {
    let arch = SMALL.parse();
    let attention = gqa(&arch);
    assert_eq!(
        (attention.heads, attention.kv_heads, attention.width),
        (64, 8, 64)
    );
    assert!(attention.bias && attention.output_bias && attention.sinks);
    assert_eq!(
        (attention.window(0), attention.window(1)),
        (Some(128), None)
    );
    let kind = ExpertKind::ClampedPairs {
        alpha: 1.702,
        limit: 7.0,
    };
    assert_eq!(arch.experts.kind, kind);
    let found = |name: &str| arch.find(&format!("model.layers.2.mlp.{name}"));
    let shape = Shape::Stack(32, 5760, 2880);
    assert_eq!(
        found("experts.gate_up_proj"),
        Some((TensorId::FusedGateUp(2), shape))
    );
    let bias = TensorId::Layer(2, Part::ExpertGateUpBias);
    let shape = Shape::Matrix(32, 5760);
    assert_eq!(found("experts.gate_up_proj_bias"), Some((bias, shape)));
    let arch = LARGE.parse();
    assert_eq!((arch.num_hidden_layers(), arch.experts.count), (36, 128));
}

#[test]
fn windows_are_in_every_other_layer_unless_listed() {
    let windows = |changes| {
        let arch = SMALL.with(changes).unwrap();
        let gqa = gqa(&arch);
        (0..3).map(|layer| gqa.window(layer)).collect::<Vec<_>>()
    };
    let alternating = [Some(128), None, Some(128)];
    assert_eq!(windows(json!({"layer_types": null})), alternating);
    let all = vec!["full_attention"; 24];
    assert_eq!(windows(json!({"layer_types": all})), [None; 3]);
    let other = vec!["chunked_attention"; 24];
    let error = SMALL.with(json!({"layer_types": other})).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("\"sliding_attention\" and \"full_attention\"")
    );
    let error = SMALL.with(json!({"sliding_window": null})).unwrap_err();
    assert!(
        error.to_string().contains("sliding_window is null"),
        "{error}"
    );
}
