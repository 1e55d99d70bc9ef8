//! A config, a tokenizer or a prompt that is wrong: one line, exit 1.

use std::fs;

use serde_json::{Value, json};

use crate::corrupt::{Broken, mkfifo};
use crate::process::{error_of, error_or_json, finish, json_of, on_model, stderr};

const MODEL: &str = "bf16-shared";

#[test]
fn a_config_that_is_no_config() {
    let model = Broken::copy(MODEL);
    let deep = format!("{{\"a\":{}", "[".repeat(1_000_000));
    let large = format!("{{\"a\":\"{}\"}}", "x".repeat(20 << 20));
    let texts = [
        "",
        "{",
        "[]",
        "null",
        "7",
        "\"glm\"",
        "{\"vocab_size\":NaN}",
        "{\"vocab_size\":1e999}",
        "\u{feff}{}",
        &deep,
        &large,
    ];
    for name in ["config.json", "generation_config.json"] {
        for text in texts {
            fs::write(model.file(name), text).unwrap();
            let error = model.refused();
            assert!(error.contains(name), "{error}");
            assert!(error.len() < 1000, "{error:.200}");
        }
        fs::write(model.file(name), [0xff, 0xfe, b'{', b'}']).unwrap();
        assert!(model.refused().contains(name));
        fs::remove_file(model.file(name)).unwrap();
        if name == "config.json" {
            assert!(model.refused().contains("config.json"));
            let good = Broken::copy(MODEL);
            fs::copy(good.file(name), model.file(name)).unwrap();
        }
    }
    mkfifo(&model.file("generation_config.json"));
    assert!(model.refused().contains("generation_config.json"));
}

/// Keys without a default.
const REQUIRED: [&str; 14] = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_routed_experts",
    "num_experts_per_tok",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
];

fn refused_with(key: &str, value: Option<Value>) {
    let model = Broken::copy(MODEL);
    let mut config = model.config();
    let shown = format!("{key} = {value:?}");
    match value {
        Some(value) => drop(config.insert(key.to_owned(), value)),
        None => drop(config.remove(key)),
    }
    model.set_config(&config);
    let error = error_of(&finish(model.decode()));
    let named = error.contains("config.json") && error.contains(key);
    assert!(named, "{shown}: {error}");
}

#[test]
fn a_dimension_that_cannot_be() {
    for key in REQUIRED {
        refused_with(key, None);
        for value in [json!(null), json!([4]), json!({}), json!(true), json!(1.5)] {
            refused_with(key, Some(value));
        }
        for value in [
            json!(-1),
            json!(0),
            json!(1e18),
            json!(1u64 << 60),
            json!(1e300),
        ] {
            refused_with(key, Some(value));
        }
        if key != "model_type" {
            refused_with(key, Some(json!("8")));
        }
    }
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    for (key, value) in [
        ("model_type", json!("llama")),
        ("hidden_act", json!("gelu")),
        ("hidden_act", json!(7)),
        ("n_group", json!(2)),
        ("topk_group", json!(2)),
        ("rope_scaling", json!({"type": "yarn", "factor": 4.0})),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 2})),
        ("rope_scaling", json!("yarn")),
        (
            "rope_parameters",
            json!({"rope_type": "yarn", "rope_theta": 1e4}),
        ),
        ("rope_parameters", json!({"rope_type": 3})),
        ("rope_parameters", json!({"rope_theta": -1})),
        ("rope_parameters", json!({"rope_theta": 0})),
        ("rope_parameters", json!({"rope_theta": "1e4"})),
        ("rope_parameters", json!([])),
        ("num_key_value_heads", json!(1)),
        ("num_experts_per_tok", json!(10)),
        ("qk_rope_head_dim", json!(5)),
        ("eos_token_id", json!("1")),
        ("eos_token_id", json!(-1)),
        ("eos_token_id", json!([1, "7"])),
        ("eos_token_id", json!([[1]])),
        ("eos_token_id", json!(1.5)),
        ("eos_token_id", json!({})),
        ("eos_token_id", json!(1e18)),
        ("rms_norm_eps", json!(-1)),
        ("rms_norm_eps", json!("1e-5")),
        ("rms_norm_eps", json!(1e18)),
        ("routed_scaling_factor", json!(-1)),
        ("routed_scaling_factor", json!(1e18)),
        ("norm_topk_prob", json!(1)),
        ("tie_word_embeddings", json!("yes")),
        ("attention_bias", json!([])),
        ("indexer_types", json!(["full"])),
        (
            "indexer_types",
            json!(["shared", "full", "full", "full", "full"]),
        ),
        (
            "indexer_types",
            json!(["full", "half", "full", "full", "full"]),
        ),
        ("indexer_types", json!("FSSFS")),
        ("indexer_types", json!([1, 2, 3, 4, 5])),
        ("mlp_layer_types", json!(["sparse"])),
        ("mlp_layer_types", json!({})),
        ("index_topk", json!(-1)),
        ("index_topk", json!("9")),
        ("index_n_heads", json!(0)),
        ("index_head_dim", json!(0)),
        ("index_head_dim", json!(1e18)),
        ("index_head_dim", json!("14")),
        ("first_k_dense_replace", json!(-1)),
    ] {
        refused_with(key, Some(value));
    }
}

/// Whatever a key holds, the run ends as it should: with a result, or with one line.
#[test]
fn any_value_of_any_key() {
    let model = Broken::copy(MODEL);
    let config = model.config();
    let values = [
        json!(null),
        json!(true),
        json!(0),
        json!(1),
        json!(3),
        json!(-1),
        json!(1e18),
        json!(1_000_000),
        json!(0.5),
        json!("default"),
        json!([]),
        json!({}),
    ];
    let more = [
        "index_topk_freq",
        "index_topk_pattern",
        "mlp_layer_types",
        "rope_scaling",
        "rope_theta",
    ];
    for key in config.keys().map(String::as_str).chain(more) {
        for value in &values {
            let mut changed = config.clone();
            changed.insert(key.to_owned(), value.clone());
            model.set_config(&changed);
            let _ = error_or_json(&finish(model.decode()));
        }
        let mut changed = config.clone();
        changed.remove(key);
        model.set_config(&changed);
        let _ = error_or_json(&finish(model.score()));
    }
}

#[test]
fn a_stop_token_outside_the_vocabulary_never_comes() {
    let model = Broken::copy(MODEL);
    let mut config = model.config();
    config.insert("eos_token_id".to_owned(), json!([1_000_000]));
    model.set_config(&config);
    assert_eq!(json_of(&finish(model.decode()))["finish_reason"], "length");
}

#[test]
fn a_prompt_that_cannot_be() {
    let model = Broken::copy(MODEL);
    for ids in ["131", "1,4294967295"] {
        for (command, flag) in [("decode", "--prompt-ids"), ("score", "--ids")] {
            let error = error_of(&finish(model.run(command, &[flag, ids])));
            assert!(error.contains("outside the vocabulary"), "{error}");
        }
    }
    for (ids, says) in [
        ("", "no token id"),
        ("4294967296", "is no token id"),
        ("-1", "'-1'"),
        ("1,,2", "token id 2 is missing"),
        ("1,2,", "token id 3 is missing"),
    ] {
        let output = finish(model.run("decode", &["--prompt-ids", ids]));
        assert_eq!(output.status.code(), Some(2), "{ids}");
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
    }
    assert_eq!(
        finish(model.run("score", &["--ids", ""])).status.code(),
        Some(2)
    );
    let none = ["--prompt-ids", "1", "-n", "0", "--json"];
    let report = json_of(&finish(model.run("decode", &none)));
    assert_eq!(report["token_ids"], json!([]));
    assert_eq!(report["finish_reason"], "length");
    // More than can be counted, and more than the model was made for.
    for n in ["18446744073709551615", "1000000000000000"] {
        let error = error_of(&finish(
            model.run("decode", &["--prompt-ids", "1", "-n", n]),
        ));
        assert!(error.contains("room for"), "{error}");
    }
    let prompt = model.file("prompt");
    fs::write(&prompt, [0xff, 0xfe]).unwrap();
    for flag in ["--prompt-file", "--replay"] {
        let error = error_of(&finish(
            model.run("decode", &[flag, prompt.to_str().unwrap()]),
        ));
        assert!(error.contains("prompt"), "{error}");
    }
}

#[test]
fn a_tokenizer_that_is_none() {
    let model = Broken::copy("tiny-text");
    let path = model.file("tokenizer.json");
    let good: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let decode = || finish(model.run("decode", &["--prompt", "The", "-n", "3", "--json"]));
    let mut without_model = good.clone();
    without_model.as_object_mut().unwrap().remove("model");
    let mut without_vocab = good.clone();
    without_vocab["model"]["vocab"] = json!({});
    let mut unknown = good.clone();
    unknown["model"]["type"] = json!("Oracle");
    let deep = "[".repeat(100_000);
    let broken = [without_model, unknown].map(|v| v.to_string());
    for text in ["", "{}", "[]", "null", "{\"model\":", &deep]
        .into_iter()
        .chain(broken.iter().map(String::as_str))
    {
        fs::write(&path, text).unwrap();
        let error = error_of(&decode());
        assert!(error.contains("tokenizer.json"), "{error}");
    }
    fs::write(&path, without_vocab.to_string()).unwrap();
    let _ = error_or_json(&decode());
    // Ids that the model has no embedding for.
    let mut far = good;
    for id in far["model"]["vocab"].as_object_mut().unwrap().values_mut() {
        *id = json!(id.as_u64().unwrap() + 1_000_000);
    }
    for token in far["added_tokens"].as_array_mut().unwrap() {
        token["id"] = json!(token["id"].as_u64().unwrap() + 1_000_000);
    }
    fs::write(&path, far.to_string()).unwrap();
    let error = error_of(&decode());
    assert!(error.contains("outside the vocabulary"), "{error}");
    fs::remove_file(&path).unwrap();
    mkfifo(&path);
    let error = error_of(&decode());
    assert!(error.contains("tokenizer.json"), "{error}");
}

#[test]
fn a_path_that_is_not_utf8_is_still_shown() {
    use std::os::unix::ffi::OsStrExt;
    let root = tempfile::tempdir().unwrap();
    let dir = root
        .path()
        .join(std::ffi::OsStr::from_bytes(b"not-\xff-utf8"));
    std::fs::create_dir(&dir).unwrap();
    let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-text");
    for file in std::fs::read_dir(fixture).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.join(file.file_name())).unwrap();
    }
    let args = ["--prompt-ids", "3,4", "-n", "2", "--json"];
    let report = json_of(&finish(on_model(
        "decode",
        std::slice::from_ref(&dir),
        &args,
    )));
    assert!(
        report["stats"]["replicas"][0]["dir"]
            .as_str()
            .unwrap()
            .contains("utf8")
    );
    json_of(&finish(on_model("doctor", &[dir], &["--json"])));
}

#[test]
fn any_number_of_guesses_is_as_good_as_all() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-text");
    let ids = |lookahead| {
        let args = [
            "--prompt-ids",
            "3,4,5,6,7",
            "-n",
            "4",
            "--json",
            "--lookahead",
            lookahead,
        ];
        json_of(&finish(on_model(
            "decode",
            std::slice::from_ref(&dir),
            &args,
        )))["token_ids"]
            .clone()
    };
    assert_eq!(ids("4294967295"), ids("off"));
}

#[test]
fn a_prompt_may_begin_with_a_hyphen() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-text");
    json_of(&finish(on_model(
        "decode",
        &[dir],
        &["--prompt", "- a", "-n", "1", "--json"],
    )));
}

#[test]
fn a_prompt_without_end_is_refused() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-text");
    let error = error_of(&finish(on_model(
        "decode",
        &[dir],
        &["--prompt-file", "/dev/zero"],
    )));
    assert!(error.contains("longer than"), "{error}");
}

/// A template is somebody else's program: it makes a text, or there is one line that names it. It neither crashes nor hangs.
#[test]
fn whatever_a_template_does() {
    let model = Broken::copy("chat");
    let name = "chat_template.jinja";
    let with = |template: &str| {
        fs::write(model.file(name), template).unwrap();
        let args = ["--chat", "--prompt", "a", "-n", "1", "--json"];
        finish(model.run("decode", &args))
    };
    let itself =
        "{% set ns = namespace() %}{% set ns.x = ns %}{% set m = namespace() %}{% set m.x = m %}";
    for (end, says) in [
        ("{{ ns }}", "contains itself"),
        ("{{ [ns] }}", "contains itself"),
        ("{{ ns | tojson }}", "too large"),
        ("{{ ns ~ '' }}", "was stopped"),
        ("{{ ns | string }}", "was stopped"),
        ("{{ ns == m }}", "was stopped"),
    ] {
        let error = error_of(&with(&format!("{itself}{end}")));
        assert!(
            error.contains(name) && error.contains(says),
            "{end}: {error}"
        );
    }
    let others = [
        "{{ '%s' | format(ns) }}",
        "{{ ns in [m] }}",
        "{{ ns | join }}",
        "{{ raise_exception(ns) }}",
        "{{ '{}'.format(ns) }}",
    ];
    for end in others {
        if let Err(error) = error_or_json(&with(&format!("{itself}{end}"))) {
            assert!(error.contains(name), "{end}: {error:.300}");
        }
    }
    let nested = |open: &str, close: &str| {
        let (open, close) = (open.repeat(20_000), close.repeat(20_000));
        format!("{{{{ {open}1{close} }}}}")
    };
    let blocks = "{% if true %}".repeat(10_000) + &"{% endif %}".repeat(10_000);
    for template in [
        format!("{{{{ 1{} }}}}", "+1".repeat(20_000)),
        format!("{{{{ x{} }}}}", "+1".repeat(100_000)),
        format!("{{{{ 'a'{} }}}}", "~'a'".repeat(10_000)),
        format!("{{{{ {}x }}}}", "not ".repeat(20_000)),
        nested("(", ")"),
        nested("[", "]"),
        blocks,
    ] {
        if let Err(error) = error_or_json(&with(&template)) {
            assert!(error.contains(name) && error.len() < 1000, "{error:.300}");
        }
    }
}

/// Large templates are real: with many tools, and much prose.
#[test]
fn a_large_template_is_no_attack() {
    let model = Broken::copy("chat");
    let tool = "{%- set ns.n = ns.n + 1 -%}{%- if messages | length > 1000 -%}{{ 'never' ~ ns.n }} prose, at some length{%- endif -%}\n";
    let template = format!(
        "{{%- set ns = namespace(n=0) -%}}\n{}{{{{ messages[-1].content }}}}",
        tool.repeat(200_000 / tool.len())
    );
    fs::write(model.file("chat_template.jinja"), template).unwrap();
    let run = |chat: &[&str]| {
        let args = [&["--prompt", "a b", "-n", "1", "--json"], chat].concat();
        json_of(&finish(model.run("decode", &args)))["prompt_ids"].clone()
    };
    assert_eq!(run(&["--chat"]), run(&[]));
}

#[test]
fn a_model_that_is_not_there() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let nowhere = std::path::Path::new("/nowhere/GLM-5.2");
    for (command, args) in [
        ("decode", &["--prompt", "a"][..]),
        ("chat", &[]),
        ("score", &["--ids", "1"]),
        ("plan", &[]),
        ("simulate", &["--device", "1GiB/s"]),
        ("inspect", &[]),
        ("profile", &[]),
    ] {
        for (dir, why) in [
            (nowhere, "there is none"),
            (file.path(), "it is no directory"),
        ] {
            let error = error_of(&finish(on_model(command, &[dir.to_path_buf()], args)));
            let shown = dir.display().to_string();
            for part in [
                &shown,
                why,
                "config.json",
                "*.safetensors",
                "tokenizer.json",
            ] {
                assert!(error.contains(part), "{command}: {error}");
            }
        }
    }
}
