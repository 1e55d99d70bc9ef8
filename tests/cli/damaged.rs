//! Weights that were never written or overwritten, and copies and contexts of other weights: named, and never computed with.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use crate::corrupt::Broken;
use crate::process::{colibri, error_of, finish, json_of, on_model, stderr};

/// A model that is larger than all samples of its content.
fn synth(dir: &Path, args: &[&str]) {
    let mut command = colibri();
    command.arg("synth").arg(dir).args(args);
    command.args(["--layers", "3", "--hidden", "512", "--intermediate", "512"]);
    command.args([
        "--moe-intermediate",
        "256",
        "--routed-experts",
        "32",
        "--vocab",
        "2000",
    ]);
    assert!(finish(command).status.success());
}

fn run(command: &str, dir: &Path, args: &[&str]) -> Output {
    finish(on_model(command, &[dir.to_path_buf()], args))
}

fn shard(dir: &Path) -> PathBuf {
    dir.join("model-00001-of-00001.safetensors")
}

/// The bytes that a tensor takes in its shard.
fn place(shard: &Path, tensor: &str) -> std::ops::Range<usize> {
    let bytes = fs::read(shard).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let at = |i: usize| 8 + len + header[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
    at(0)..at(1)
}

fn overwrite(shard: &Path, place: std::ops::Range<usize>, byte: u8) {
    let mut bytes = fs::read(shard).unwrap();
    bytes[place].fill(byte);
    fs::write(shard, bytes).unwrap();
}

const IDS: [&str; 5] = ["--prompt-ids", "5,6,7,8", "-n", "8", "--json"];

#[test]
fn a_shard_with_a_hole_is_named_by_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model"), dir.path().join("out"));
    synth(&model, &[]);
    let file = File::options().write(true).open(shard(&model)).unwrap();
    let size = file.metadata().unwrap().len();
    file.set_len(size * 6 / 10).unwrap();
    file.set_len(size).unwrap();
    drop(file);
    let named = |error: &str| {
        let hole = error.contains("are a hole from byte") && error.contains("fetch the file again");
        assert!(hole && error.contains("model-00001-of-00001"), "{error}");
    };
    named(&error_of(&run("decode", &model, &IDS)));
    named(&error_of(&run("score", &model, &["--ids", "3,4"])));
    let doctor = run("doctor", &model, &[]);
    assert_eq!(doctor.status.code(), Some(1));
    named(&stderr(&doctor));
    let mut convert = colibri();
    convert
        .arg("convert")
        .arg(&model)
        .arg(&out)
        .arg("--delete-source");
    named(&error_of(&finish(convert)));
    assert!(shard(&model).exists());
}

#[test]
fn a_synthetic_model_with_holes_says_so_once() {
    let dir = tempfile::tempdir().unwrap();
    synth(dir.path(), &["--sparse"]);
    let decoded = run("decode", dir.path(), &IDS);
    assert_eq!(json_of(&decoded)["token_ids"].as_array().unwrap().len(), 8);
    let said = stderr(&decoded);
    assert_eq!(said.matches("are synthetic").count(), 1, "{said}");
}

#[test]
fn runs_of_zeros_without_a_hole_are_named() {
    let dir = tempfile::tempdir().unwrap();
    synth(dir.path(), &[]);
    let expert = "model.layers.1.mlp.experts";
    for tensor in [
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.2.self_attn.indexer.wk.weight.qs",
        "lm_head.weight",
        "model.norm.weight",
    ] {
        let place = place(&shard(dir.path()), tensor);
        let before = fs::read(shard(dir.path())).unwrap();
        overwrite(&shard(dir.path()), place, 0);
        let error = error_of(&run("decode", dir.path(), &IDS));
        assert!(
            error.contains(&format!(
                "model-00001-of-00001.safetensors: tensor {tensor}: "
            )),
            "{error}"
        );
        fs::write(shard(dir.path()), before).unwrap();
    }
    for i in 0..32 {
        overwrite(
            &shard(dir.path()),
            place(&shard(dir.path()), &format!("{expert}.{i}.up_proj.weight")),
            0,
        );
    }
    let error = error_of(&run("decode", dir.path(), &IDS));
    assert!(
        error.contains(expert) && error.contains("up_proj.weight, expert "),
        "{error}"
    );
    assert!(error.contains("are zeros; the file is damaged"), "{error}");
}

#[test]
fn experts_with_scales_of_zero_are_named_and_not_converted() {
    for fixture in ["int4-grouped", "fp8-block", "int8-row", "int2-row"] {
        let model = Broken::copy(fixture);
        // One fixture has its scales in the second of two.
        let shards = model.shards();
        let file = shards.last().unwrap();
        let scales = match fixture {
            "fp8-block" => "weight_scale_inv",
            _ => "weight.qs",
        };
        for expert in 0.. {
            let name = format!("model.layers.1.mlp.experts.{expert}.down_proj.{scales}");
            let bytes = fs::read(file).unwrap();
            if !String::from_utf8_lossy(&bytes).contains(&format!("\"{name}\"")) {
                assert!(expert > 0);
                break;
            }
            overwrite(file, place(file, &name), 0);
        }
        let prompt = ["--prompt-ids", "3,4,5,6", "-n", "3", "--json"];
        let error = error_of(&run("decode", model.path(), &prompt));
        assert!(
            error.contains("model.layers.1.mlp.experts.") && error.contains(" scales are 0"),
            "{error}"
        );
        let mut convert = colibri();
        convert
            .arg("convert")
            .arg(model.path())
            .arg(model.file("out"));
        convert.args(["--experts", "int8", "--delete-source"]);
        let output = finish(convert);
        assert_eq!(output.status.code(), Some(1));
        let error = stderr(&output);
        assert!(
            error.contains("down_proj.weight cannot be converted"),
            "{error}"
        );
        assert!(file.exists());
    }
}

#[test]
fn infinite_logits_are_an_error_with_their_position() {
    let model = Broken::copy("f32-smallest");
    let floats = |value: f32, n: usize| value.to_le_bytes().repeat(n);
    model.change("model.norm.weight", |tensors, at| {
        tensors[at].data = floats(1e20, 7)
    });
    model.change("lm_head.weight", |tensors, at| {
        tensors[at].data[84..112].copy_from_slice(&floats(3e38, 7));
    });
    for args in [
        &["--temperature", "0"][..],
        &["--temperature", "0.9", "--top-p", "0.9"],
    ] {
        let prompt = ["--prompt-ids", "9,2", "-n", "8"];
        let error = error_of(&run("decode", model.path(), &[&prompt[..], args].concat()));
        assert!(error.contains("the logit of token 3 is "), "{error}");
        assert!(
            error.contains("at position 1, though the output of the last layer, 0, is finite"),
            "{error}"
        );
    }
    let error = error_of(&run("score", model.path(), &["--ids", "9,2,3,4", "--json"]));
    assert!(error.contains("at position 0"), "{error}");
}

#[test]
fn an_overflow_in_a_layer_is_an_error_with_its_layer() {
    let dir = tempfile::tempdir().unwrap();
    synth(dir.path(), &[]);
    let norm = place(&shard(dir.path()), "model.layers.1.input_layernorm.weight");
    let mut bytes = fs::read(shard(dir.path())).unwrap();
    let huge = 3e38f32.to_le_bytes().repeat(norm.len() / 4);
    bytes[norm].copy_from_slice(&huge);
    fs::write(shard(dir.path()), bytes).unwrap();
    let error = error_of(&run("decode", dir.path(), &IDS));
    assert!(
        error.contains("layer 1: its attention makes the hidden state "),
        "{error}"
    );
    assert!(error.contains(" at position 0: "), "{error}");
}

#[test]
fn a_mirror_of_another_model_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| dir.path().join(name));
    synth(&a, &["--seed", "1"]);
    synth(&b, &["--seed", "2"]);
    let alone = json_of(&run("decode", &a, &IDS));
    let mirror = ["--mirror", b.to_str().unwrap(), "--mirror-weights", "1,1"];
    let mirrored = run("decode", &a, &[&IDS[..], &mirror].concat());
    assert_eq!(json_of(&mirrored)["token_ids"], alone["token_ids"]);
    let said = stderr(&mirrored);
    assert!(
        said.contains("is not used as a mirror of") && said.contains("its weights differ"),
        "{said}"
    );
    // One resident matrix differs; then the end of the copy is missing.
    fs::copy(shard(&a), shard(&b)).unwrap();
    overwrite(
        &shard(&b),
        place(&shard(&a), "model.layers.0.self_attn.kv_b_proj.weight"),
        0x11,
    );
    let said = stderr(&run("decode", &a, &[&IDS[..], &mirror].concat()));
    assert!(said.contains("its weights differ"), "{said}");
    fs::copy(shard(&a), shard(&b)).unwrap();
    let file = File::options().write(true).open(shard(&b)).unwrap();
    let size = file.metadata().unwrap().len();
    file.set_len(size - (64 << 10)).unwrap();
    file.set_len(size).unwrap();
    let said = stderr(&run("decode", &a, &[&IDS[..], &mirror].concat()));
    assert!(said.contains("never written"), "{said}");
    fs::copy(shard(&a), shard(&b)).unwrap();
    let said = stderr(&run("decode", &a, &[&IDS[..], &mirror].concat()));
    assert!(!said.contains("not used"), "{said}");
}

#[test]
fn a_kept_context_of_other_weights_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (model, kv) = (dir.path().join("model"), dir.path().join("a.kv"));
    synth(&model, &[]);
    let decode = |args: &[&str]| run("decode", &model, &[&IDS[..], args].concat());
    let with = ["--kv", kv.to_str().unwrap()];
    json_of(&decode(&with));
    let reused = json_of(&decode(&with));
    assert_eq!(reused["stats"]["reused_tokens"], 3);
    // Threads, the engine and a copy change nothing.
    let copy = dir.path().join("copy");
    fs::create_dir(&copy).unwrap();
    fs::copy(shard(&model), shard(&copy)).unwrap();
    let other = [
        "--threads",
        "1",
        "--engine",
        "pread",
        "--mirror",
        copy.to_str().unwrap(),
    ];
    let reused = json_of(&decode(&[&with[..], &other].concat()));
    assert_eq!(reused["stats"]["reused_tokens"], 3);
    // Small enough that samples of the content miss it.
    let norm = place(&shard(&model), "model.layers.1.input_layernorm.weight");
    overwrite(&shard(&model), norm.start + 3..norm.start + 4, 0x3e);
    let before = fs::read(&kv).unwrap();
    let error = error_of(&decode(&with));
    assert!(
        error.contains("a.kv") && error.contains("weights differ"),
        "{error}"
    );
    assert_eq!(fs::read(&kv).unwrap(), before);
    json_of(&decode(&[&with[..], &["--kv-reset"]].concat()));
    assert_eq!(json_of(&decode(&with))["stats"]["reused_tokens"], 3);
}
