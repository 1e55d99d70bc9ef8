//! Wrong configs, tokenizers, templates and prompts: one error line and exit code 1.

use std::fs;

use serde_json::{Value, json};

use crate::corrupt::{Broken, mkfifo};
use crate::process::{error_of, error_or_json, finish, json_of, on_model, stderr};

const MODEL: &str = "bf16-shared";

#[test]
fn a_config_that_is_not_json() {
    let model = Broken::copy(MODEL);
    let deep = format!("{{\"a\":{}", "[".repeat(1_000_000));
    let large = format!("{{\"a\":\"{}\"}}", "x".repeat(20 << 20));
    for text in ["{", "\u{feff}{}", &deep, &large] {
        fs::write(model.file("config.json"), text).unwrap();
        let error = model.refused();
        assert!(error.contains("config.json"), "{error}");
        assert!(error.len() < 1000, "{error:.200}");
    }
    fs::write(model.file("config.json"), [0xff, 0xfe, b'{', b'}']).unwrap();
    assert!(model.refused().contains("config.json"));
    fs::remove_file(model.file("config.json")).unwrap();
    assert!(model.refused().contains("config.json"));
    let model = Broken::copy(MODEL);
    fs::write(model.file("generation_config.json"), "[]").unwrap();
    assert!(model.refused().contains("generation_config.json"));
    fs::remove_file(model.file("generation_config.json")).unwrap();
    mkfifo(&model.file("generation_config.json"));
    assert!(model.refused().contains("generation_config.json"));
}

/// The unit tests of the config have the messages, and more values.
#[test]
fn a_value_that_is_not_supported_is_refused_by_name() {
    for (key, value) in [
        ("hidden_size", json!(null)),
        ("vocab_size", json!(1u64 << 60)),
        ("num_attention_heads", json!([4])),
        ("model_type", json!("llama")),
        ("hidden_act", json!(7)),
        ("rope_scaling", json!("yarn")),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 2})),
        ("rope_parameters", json!({"rope_type": 3})),
        ("rope_parameters", json!({"rope_theta": "1e4"})),
        ("eos_token_id", json!([[1]])),
        ("eos_token_id", json!(1e18)),
        ("rms_norm_eps", json!(1e18)),
        ("routed_scaling_factor", json!(-1)),
        ("tie_word_embeddings", json!("yes")),
        ("attention_bias", json!([])),
        ("indexer_types", json!(["full"])),
        ("indexer_types", json!("FSSFS")),
        ("mlp_layer_types", json!({})),
        ("index_topk", json!(-1)),
        ("index_n_heads", json!(0)),
        ("index_head_dim", json!("14")),
        ("first_k_dense_replace", json!(-1)),
    ] {
        let model = Broken::copy(MODEL);
        let mut config = model.config();
        let shown = format!("{key} = {value}");
        config.insert(key.to_owned(), value);
        model.set_config(&config);
        let error = error_of(&finish(model.decode()));
        let named = error.contains("config.json") && error.contains(key);
        assert!(named, "{shown}: {error}");
    }
}

/// Any value of any key ends the run with a result or one error line.
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
fn wrong_prompts() {
    let model = Broken::copy(MODEL);
    for ids in ["131", "1,4294967295"] {
        for (command, flag) in [("decode", "--prompt-ids"), ("score", "--ids")] {
            let error = error_of(&finish(model.run(command, &[flag, ids])));
            assert!(error.contains("outside the vocabulary"), "{error}");
        }
    }
    for (command, flag) in [("decode", "--prompt-ids"), ("score", "--ids")] {
        let output = finish(model.run(command, &[flag, "1,,2"]));
        assert_eq!(output.status.code(), Some(2));
        let said = stderr(&output);
        assert!(said.contains("token id 2 is missing"), "{said}");
    }
    let none = ["--prompt-ids", "1", "-n", "0", "--json"];
    let report = json_of(&finish(model.run("decode", &none)));
    assert_eq!(report["token_ids"], json!([]));
    assert_eq!(report["finish_reason"], "length");
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
fn a_wrong_tokenizer() {
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
fn any_lookahead_gives_the_same_tokens() {
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

/// A template gives a text or one error line that names it. It neither crashes nor hangs. The unit tests have templates that
/// the engine itself stops.
#[test]
fn a_hostile_template() {
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

/// Templates with many tools are large.
#[test]
fn a_large_template_is_accepted() {
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
