//! Every key of GLM-5.2's published `config.json` is used, refused by name, or known to be without effect.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::arch::{Architecture, ConfigError, IndexerKind};

/// Keys that change no number in transformers, and why.
const WITHOUT_EFFECT: [&str; 15] = [
    // Which class, which element type, which version.
    "architectures",
    "dtype",
    "transformers_version",
    // Training.
    "attention_dropout",
    "initializer_range",
    "pretraining_tp",
    // How other engines spread and cache; the router is computed in f32.
    "ep_size",
    "moe_router_dtype",
    "use_cache",
    // Overwritten by qk_rope_head_dim, and by the sum of both parts of a head.
    "head_dim",
    "qk_head_dim",
    // Tensors tell whether there is a layer for drafts, and how weights are stored.
    "num_nextn_predict_layers",
    "quantization_config",
    // Tokens that only prompts have.
    "pad_token_id",
    "bos_token_id",
];

/// Without the lists of layers.
const PUBLISHED: &str = include_str!("../published/glm-5.2.json");

fn indexers(layer: usize) -> &'static str {
    let full = layer < 3 || (layer - 2).is_multiple_of(4);
    if full { "full" } else { "shared" }
}

fn mlps(layer: usize) -> &'static str {
    if layer < 3 { "dense" } else { "sparse" }
}

fn published() -> Map<String, Value> {
    let mut config: Map<_, _> = serde_json::from_str(PUBLISHED).unwrap();
    let list = |kind: fn(usize) -> &'static str| (0..78).map(kind).collect::<Vec<_>>().into();
    config.insert("indexer_types".into(), list(indexers));
    config.insert("mlp_layer_types".into(), list(mlps));
    config
}

fn parse(config: &Map<String, Value>) -> Result<Architecture, ConfigError> {
    Architecture::from_json(
        Path::new("config.json"),
        &Value::Object(config.clone()),
        None,
    )
}

#[test]
fn loads() {
    let arch = parse(&published()).unwrap();
    let full = arch.indexer.as_ref().unwrap().layers.iter();
    assert_eq!(full.filter(|k| **k == IndexerKind::Full).count(), 21);
    assert_eq!(
        (arch.sparse_layers().count(), arch.experts.count),
        (75, 256)
    );
    // The lists say what the older keys say.
    let mut older = published();
    older.remove("indexer_types");
    older.remove("mlp_layer_types");
    let theta = older.remove("rope_parameters").unwrap()["rope_theta"].clone();
    older.insert("rope_theta".into(), theta);
    older.insert("rope_scaling".into(), Value::Null);
    assert_eq!(parse(&older).unwrap(), arch);
}

#[test]
fn every_key_is_accounted_for() {
    // Lists override patterns and frequencies: each is tried without what overrides it.
    let overridden = [
        ("first_k_dense_replace", "mlp_layer_types"),
        ("index_topk_pattern", "indexer_types"),
        ("index_topk_freq", "indexer_types"),
        ("index_skip_topk_offset", "indexer_types"),
    ];
    for key in published().keys() {
        let mut config = published();
        for (_, by) in overridden
            .iter()
            .filter(|(overridden, _)| overridden == key)
        {
            config.remove(*by);
        }
        let before = parse(&config).unwrap();
        config.insert(key.clone(), json!([[]]));
        match parse(&config) {
            Ok(after) => {
                assert!(WITHOUT_EFFECT.contains(&key.as_str()), "{key} is read over");
                assert_eq!(after, before, "{key}");
            }
            _ if WITHOUT_EFFECT.contains(&key.as_str()) => panic!("{key} has an effect"),
            Err(error) => assert!(error.to_string().contains(key), "{key}: {error}"),
        }
    }
}

#[test]
fn keys_that_ask_for_other_arithmetic_are_refused() {
    for (key, value, supported) in [
        ("hidden_act", json!("gelu"), "only silu"),
        ("scoring_func", json!("softmax"), "only sigmoid"),
        ("topk_method", json!("greedy"), "only noaux_tc"),
        ("rope_interleave", json!(false), "only true"),
        ("indexer_rope_interleave", json!(false), "only true"),
        ("mlp_bias", json!(true), "only false"),
        ("partial_rotary_factor", json!(0.5), "only 1.0"),
        ("moe_layer_freq", json!(2), "only 1"),
        ("num_key_value_heads", json!(8), "only 64"),
        ("swiglu_limit", json!(10.0), "only null"),
        (
            "layer_types",
            json!(["indexed_attention", "sliding_attention"]),
            "only indexed_attention",
        ),
    ] {
        let mut config = published();
        config.insert(key.into(), value.clone());
        let error = parse(&config).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("config.json: {key} ")),
            "{error}"
        );
        assert!(error.contains(supported), "{error}");
        config.insert(key.into(), Value::Null);
        if key != "num_key_value_heads" {
            assert_eq!(
                parse(&config).unwrap(),
                parse(&published()).unwrap(),
                "{key}"
            );
        }
    }
    let mut config = published();
    config["rope_parameters"]["partial_rotary_factor"] = json!(0.5);
    let error = parse(&config).unwrap_err().to_string();
    let says = "rope_parameters.partial_rotary_factor 0.5 is not supported, only 1.0";
    assert!(error.contains(says), "{error}");
}

#[test]
fn without_sparse_attention_no_key_of_the_indexer_is_read() {
    let mut config = published();
    config.insert("index_topk".into(), json!(0));
    let dense = parse(&config).unwrap();
    assert!(dense.indexer.is_none());
    for (key, value) in [
        ("index_head_dim", json!(0)),
        ("index_n_heads", json!("none")),
        ("indexer_types", json!(["shared"])),
        ("indexer_rope_interleave", json!(false)),
        ("index_share_for_mtp_iteration", json!(1)),
    ] {
        config.insert(key.into(), value);
        assert_eq!(parse(&config).unwrap(), dense, "{key}");
    }
}

#[test]
fn text_config_holds_the_language_model() {
    let mut text = published();
    let plain = parse(&text).unwrap();
    text.remove("eos_token_id");
    text.remove("tie_word_embeddings");
    let mut config = json!({
        "model_type": "a multimodal one", "eos_token_id": [154820, 154827, 154829],
        "tie_word_embeddings": true, "text_config": text, "vision_config": {"hidden_size": 3}
    });
    let config = config.as_object_mut().unwrap();
    let arch = parse(config).unwrap();
    assert_eq!(arch.eos_token_ids, plain.eos_token_ids);
    assert!(arch.tie_word_embeddings);
    assert_eq!((arch.attention, arch.mlp), (plain.attention, plain.mlp));
    assert_eq!(arch.names.trunk, "model.language_model");
    config["text_config"]["n_group"] = json!(3);
    let error = parse(config).unwrap_err().to_string();
    assert!(error.contains("text_config.n_group is 3"), "{error}");
}
