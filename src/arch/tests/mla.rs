//! Every key of the published configs of families with MLA is used, refused by name, or known to be without effect.

use std::path::Path;

use serde_json::{Value, json};

use crate::arch::{Architecture, Attention, ConfigError, Groups, IndexerKind, Mla, RopeLayout};

/// Keys that change no number in transformers, and why.
const WITHOUT_EFFECT: [&str; 16] = [
    // Which class, which element type, which version.
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    // Training.
    "attention_dropout",
    "aux_loss_alpha",
    "initializer_range",
    "pretraining_tp",
    "seq_aux",
    // How other engines spread and cache.
    "ep_size",
    "use_cache",
    // Tensors tell whether there is a layer for drafts, and how weights are stored.
    "num_nextn_predict_layers",
    "quantization_config",
    // Tokens that only prompts have.
    "pad_token_id",
    "bos_token_id",
];

const DEEPSEEK_V3: &str = include_str!("../published/deepseek-v3.json");
const KIMI_K2: &str = include_str!("../published/kimi-k2.json");
const GLM_FLASH: &str = include_str!("../published/glm-4.7-flash.json");
const DEEPSEEK_V32: &str = include_str!("../published/deepseek-v3.2.json");
const PUBLISHED: [&str; 4] = [DEEPSEEK_V3, DEEPSEEK_V32, KIMI_K2, GLM_FLASH];

fn config(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn parse(config: &Value) -> Result<Architecture, ConfigError> {
    Architecture::from_json(Path::new("config.json"), config, None)
}

fn with(text: &str, key: &str, value: Value) -> Result<Architecture, ConfigError> {
    let mut config = config(text);
    config[key] = value;
    parse(&config)
}

fn mla(arch: &Architecture) -> &Mla {
    let Attention::Mla(mla) = &arch.attention else {
        panic!("not an architecture with MLA")
    };
    mla
}

#[test]
fn every_key_is_accounted_for() {
    for text in PUBLISHED {
        let before = parse(&config(text)).unwrap();
        for key in config(text).as_object().unwrap().keys() {
            match with(text, key, json!([[]])) {
                Ok(after) => {
                    assert!(WITHOUT_EFFECT.contains(&key.as_str()), "{key} is read over");
                    assert_eq!(after, before, "{key}");
                }
                _ if WITHOUT_EFFECT.contains(&key.as_str()) => panic!("{key} has an effect"),
                Err(error) => assert!(error.to_string().contains(key), "{key}: {error}"),
            }
        }
    }
}

#[test]
fn keys_that_ask_for_other_arithmetic_are_refused() {
    for text in PUBLISHED {
        for (key, value, supported) in [
            ("hidden_act", json!("gelu"), "only silu"),
            ("scoring_func", json!("softmax"), "only sigmoid"),
            ("topk_method", json!("greedy"), "only noaux_tc"),
            ("rope_interleave", json!(false), "only true"),
            ("moe_layer_freq", json!(2), "only 1"),
            ("num_key_value_heads", json!(8), "the number of attention"),
            ("partial_rotary_factor", json!(0.5), "only 1.0"),
        ] {
            let error = with(text, key, value).unwrap_err().to_string();
            assert!(error.contains(&format!("config.json: {key} ")), "{error}");
            assert!(error.contains(supported), "{error}");
        }
        let linear = json!({"type": "linear", "factor": 2.0});
        let error = with(text, "rope_scaling", linear).unwrap_err().to_string();
        assert!(error.contains("rope_scaling.type \"linear\""), "{error}");
    }
}

#[test]
fn deepseek_scales_scores_and_selects_groups() {
    let arch = parse(&config(DEEPSEEK_V3)).unwrap();
    assert_eq!(arch.router.groups, Groups { count: 8, keep: 4 });
    assert_eq!(arch.sparse_layers().count(), 58);
    // 192^-0.5 times the square of 0.1 ln(40) + 1.
    let scale = mla(&arch).scale;
    assert!((scale - 0.135_234).abs() < 1e-6, "{scale}");
    let yarn = arch.rope.scaling.as_ref().unwrap();
    assert_eq!((yarn.amplitude, yarn.original_length), (1.0, 4096));
    let whole = with(DEEPSEEK_V3, "q_lora_rank", Value::Null).unwrap();
    assert_eq!(mla(&whole).q_rank, None);
}

#[test]
fn newer_rope_keys_say_the_same() {
    let mut newer = config(DEEPSEEK_V3);
    let mut rope = newer["rope_scaling"].take();
    rope["rope_theta"] = newer["rope_theta"].take();
    rope["rope_type"] = rope["type"].take();
    let map = newer.as_object_mut().unwrap();
    map.retain(|key, _| !key.starts_with("rope_"));
    rope.as_object_mut().unwrap().remove("type");
    newer["rope_parameters"] = rope;
    assert_eq!(parse(&newer).unwrap(), parse(&config(DEEPSEEK_V3)).unwrap());
}

#[test]
fn one_group_leaves_no_expert_out() {
    for text in [KIMI_K2, GLM_FLASH] {
        let arch = parse(&config(text)).unwrap();
        assert_eq!(arch.router.groups, Groups::ONE);
    }
    let all = with(DEEPSEEK_V3, "topk_group", json!(8)).unwrap();
    assert_eq!(all.router.groups, Groups::ONE);
}

#[test]
fn kimi_k25_holds_the_language_model() {
    let text = config(KIMI_K2);
    let plain = parse(&text).unwrap();
    let arch = parse(&json!({"model_type": "kimi_k25", "text_config": text})).unwrap();
    assert_eq!(arch.names.trunk, "language_model.model");
    assert_eq!(arch.names.head, "language_model.lm_head.weight");
    let names = plain.names;
    assert_eq!(Architecture { names, ..arch }, plain);
}

#[test]
fn deepseek_v32_has_an_indexer_in_every_layer() {
    let arch = parse(&config(DEEPSEEK_V32)).unwrap();
    let indexer = arch.indexer.as_ref().unwrap();
    assert_eq!(indexer.layers, vec![IndexerKind::Full; 61]);
    assert_eq!((indexer.heads, indexer.layout), (64, RopeLayout::HalfSplit));
    let plain = parse(&config(DEEPSEEK_V3)).unwrap();
    assert_eq!((arch.attention, arch.rope), (plain.attention, plain.rope));
    let dense = with(DEEPSEEK_V32, "index_topk", json!(0)).unwrap();
    assert_eq!(dense.indexer, None);
}
