mod accounted;
mod glm4_moe;
mod gpt_oss;
mod minimax_m2;
mod mla;
mod names;
mod olmoe;
mod published;
mod qwen3_moe;

use std::path::Path;

use serde_json::{Value, json};

use super::*;

fn base() -> Value {
    json!({
        "model_type": "glm_moe_dsa", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64,
        "moe_intermediate_size": 24, "num_hidden_layers": 6, "num_attention_heads": 2,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "index_head_dim": 16
    })
}

/// A small model.
pub(crate) fn example() -> Architecture {
    parse(json!({})).unwrap()
}

fn parse(change: Value) -> Result<Architecture, ConfigError> {
    let mut config = base();
    for (key, value) in change.as_object().unwrap() {
        config[key] = value.clone();
    }
    Architecture::from_json(Path::new("config.json"), &config, None)
}

#[test]
fn defaults_are_those_of_the_architecture() {
    let c = parse(json!({})).unwrap();
    let indexer = c.indexer.as_ref().unwrap();
    assert_eq!((indexer.top_k, indexer.heads), (2048, 32));
    assert_eq!((c.router.scale, c.rope.theta), (2.5, 10_000.0));
    assert_eq!(c.eos_token_ids, [1]);
    assert_eq!(c.sparse_layers().collect::<Vec<_>>(), [3, 4, 5]);
    assert!(indexer.layers.iter().all(|k| *k == IndexerKind::Full));
}

#[test]
fn hostile_values_are_refused_by_name() {
    let table = [
        (
            json!({"hidden_size": 0}),
            "hidden_size is 0, allowed is 1 to",
        ),
        (json!({"hidden_size": -4}), "hidden_size is -4, allowed"),
        (
            json!({"hidden_size": 1e300}),
            "hidden_size is 1e+300, allowed",
        ),
        (
            json!({"hidden_size": 4294967296u64}),
            "hidden_size is 4294967296, allowed",
        ),
        (
            json!({"hidden_size": 48.5}),
            "hidden_size is 48.5, expected an integer",
        ),
        (
            json!({"hidden_size": "48"}),
            "hidden_size is \"48\", expected an integer",
        ),
        (
            json!({"hidden_size": true}),
            "hidden_size is true, expected an integer",
        ),
        (
            json!({"q_lora_rank": null}),
            "q_lora_rank is null, expected an integer",
        ),
        (
            json!({"num_experts_per_tok": 9}),
            "num_experts_per_tok is 9, allowed is 1 to 8",
        ),
        (
            json!({"qk_rope_head_dim": 7}),
            "qk_rope_head_dim is 7, allowed is an even",
        ),
        (
            json!({"index_head_dim": 4}),
            "index_head_dim is 4, allowed is at least",
        ),
        (
            json!({"num_hidden_layers": 100000}),
            "num_hidden_layers is 100000, allowed",
        ),
        (
            json!({"rms_norm_eps": -1e-5}),
            "rms_norm_eps is -0.00001, allowed",
        ),
        (
            json!({"rms_norm_eps": "x"}),
            "rms_norm_eps is \"x\", expected a number",
        ),
        (
            json!({"routed_scaling_factor": 1e30}),
            "routed_scaling_factor is 1e+30, allowed",
        ),
        (
            json!({"norm_topk_prob": 1}),
            "norm_topk_prob is 1, expected true or false",
        ),
        (json!({"n_group": 9}), "n_group is 9, allowed is 1 to 8"),
        (
            json!({"topk_group": 2}),
            "topk_group is 2, allowed is 1 to 1",
        ),
        (
            json!({"n_group": 3}),
            "n_group is 3, allowed is a divisor of 8 experts",
        ),
        (
            json!({"n_group": 8}),
            "n_group is 8, allowed is a divisor of 8 experts with at least two",
        ),
        (
            json!({"n_group": 4, "num_experts_per_tok": 3}),
            "num_experts_per_tok is 3, allowed is 1 to 2",
        ),
        (
            json!({"model_type": "llama"}),
            "model_type \"llama\" is not supported, only glm_moe_dsa, deepseek_v3, deepseek_v32, kimi_k2, glm4_moe_lite",
        ),
        (
            json!({"model_type": 3}),
            "model_type is 3, expected a string",
        ),
        (
            json!({"hidden_act": "gelu"}),
            "hidden_act \"gelu\" is not supported, only silu",
        ),
        (
            json!({"num_key_value_heads": 1}),
            "num_key_value_heads 1 is not supported, only 2",
        ),
        (
            json!({"rope_parameters": {"rope_type": "llama3"}}),
            "rope_parameters.rope_type \"llama3\" is not supported, only default, yarn",
        ),
        (
            json!({"rope_scaling": {"type": "linear"}}),
            "rope_scaling.type \"linear\" is not supported",
        ),
        (
            json!({"rope_parameters": {"rope_theta": 0}}),
            "rope_parameters.rope_theta is 0, allowed",
        ),
        (
            json!({"rope_parameters": [1]}),
            "rope_parameters is [1], expected an object",
        ),
        (json!({"rope_theta": -1}), "rope_theta is -1, allowed"),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 7}, "sliding_attention": {"rope_theta": 8}}}),
            "only equal parameters for all layer types",
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 7}, "rope_theta": 7}}),
            "only equal parameters for all layer types",
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}),
            "rope_parameters.full_attention.rope_type \"dynamic\" is not supported",
        ),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 0.5}, "max_position_embeddings": 64}),
            "rope_scaling.factor is 0.5, allowed is 1 to",
        ),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 0}}),
            "rope_scaling.original_max_position_embeddings is 0, allowed is 1 to",
        ),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4}}),
            "key max_position_embeddings is missing",
        ),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 8, "beta_fast": 0.5}}),
            "rope_scaling.beta_fast is 0.5, allowed is at least beta_slow",
        ),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 8}, "rope_parameters": {"rope_type": "default"}}),
            "only the scaling of rope_scaling",
        ),
        (
            json!({"eos_token_id": [1, -1]}),
            "eos_token_id is -1, allowed",
        ),
        (
            json!({"eos_token_id": "x"}),
            "eos_token_id is \"x\", expected an integer",
        ),
        (
            json!({"mlp_layer_types": ["dense"]}),
            "one entry for each of 6 layers (it has 1)",
        ),
        (
            json!({"mlp_layer_types": "dense"}),
            "expected a list of strings",
        ),
        (
            json!({"indexer_types": ["full", "no", "full", "full", "full", "full"]}),
            "allowed is a list of \"full\" and",
        ),
        (
            json!({"index_topk_pattern": "SFFFFF"}),
            "first layer is full",
        ),
        (
            json!({"index_topk_pattern": "FXFFFF"}),
            "allowed is a string of F and S",
        ),
        (
            json!({"index_topk_freq": 2, "index_skip_topk_offset": 0}),
            "first layer is full",
        ),
    ];
    for (change, expected) in table {
        let error = parse(change.clone())
            .expect_err(&change.to_string())
            .to_string();
        assert!(error.contains(expected), "{change}: {error}");
        assert!(error.starts_with("config.json: "), "{error}");
    }
}

#[test]
fn every_dimension_is_required() {
    for key in base()
        .as_object()
        .unwrap()
        .keys()
        .filter(|k| *k != "index_head_dim")
    {
        let mut config = base();
        config.as_object_mut().unwrap().remove(key);
        let error = Architecture::from_json(Path::new("config.json"), &config, None).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("config.json: key {key} is missing")
        );
    }
}

#[test]
fn rope_theta_has_three_sources() {
    let theta = |change| parse(change).unwrap().rope.theta;
    assert_eq!(theta(json!({"rope_theta": 8e6})), 8e6);
    assert_eq!(
        theta(
            json!({"rope_theta": 8e6, "rope_parameters": {"rope_theta": 5, "rope_type": "default"}})
        ),
        5.0
    );
    assert_eq!(
        theta(json!({"rope_theta": 8e6, "rope_parameters": {}})),
        8e6
    );
    assert_eq!(theta(json!({"rope_parameters": null})), 10_000.0);
    let of = |theta: u32| json!({"rope_theta": theta, "rope_type": "default"});
    assert_eq!(
        theta(json!({"rope_parameters": {"full_attention": of(7), "sliding_attention": of(7)}})),
        7.0
    );
}

#[test]
fn eos_is_the_union_of_both_files() {
    let mut config = base();
    config["eos_token_id"] = json!([5, 3]);
    let generation = json!({"eos_token_id": 4});
    let path = Path::new("generation_config.json");
    let union = Architecture::from_json(path, &config, Some((path, &generation))).unwrap();
    assert_eq!(union.eos_token_ids, [3, 4, 5]);
    assert_eq!(
        parse(json!({"eos_token_id": null})).unwrap().eos_token_ids,
        [0u32; 0]
    );
    assert_eq!(
        parse(json!({"eos_token_id": 9})).unwrap().eos_token_ids,
        [9]
    );
}

#[test]
fn indexer_schedules() {
    let kinds = |change| {
        let full = |k: &IndexerKind| if *k == IndexerKind::Full { 'F' } else { 'S' };
        let kinds = parse(change).unwrap().indexer.unwrap().layers;
        kinds.iter().map(full).collect::<String>()
    };
    assert_eq!(kinds(json!({"index_topk_pattern": "FSSFSSS"})), "FSSFSS");
    assert_eq!(kinds(json!({"index_topk_freq": 2})), "FFSFSF");
    assert_eq!(
        kinds(json!({"index_topk_freq": 4, "index_skip_topk_offset": 3})),
        "FFFSSS"
    );
    assert_eq!(kinds(json!({"index_topk_freq": 0})), "FFFFFF");
    assert_eq!(
        kinds(
            json!({"indexer_types": ["full", "shared", "full", "shared", "full", "shared"],
                     "index_topk_pattern": "FFFFFF"})
        ),
        "FSFSFS"
    );
}

#[test]
fn files_that_are_no_config() {
    let dir = tempfile::tempdir().unwrap();
    let error = |text: Option<&str>| {
        if let Some(text) = text {
            std::fs::write(dir.path().join("config.json"), text).unwrap();
        }
        Architecture::load(dir.path()).unwrap_err().to_string()
    };
    assert!(error(None).contains("cannot read"));
    for text in [
        "",
        "{",
        "{\"hidden_size\": NaN}",
        "{\"hidden_size\": 1e999}",
    ] {
        assert!(error(Some(text)).contains("not valid JSON"), "{text}");
    }
    assert!(error(Some("[1]")).contains("not a JSON object"));
}
