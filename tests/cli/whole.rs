//! Models that are not whole: doctor, inspect, plan, decode and convert give one answer.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};

use crate::corrupt::{Broken, Shard, Tensor};
use crate::process::{colibri, error_of, finish, json_of, on_model, stderr};

const INDEX: &str = "model.safetensors.index.json";

/// The error of every command that opens the model, which is the same.
#[track_caller]
fn answer(model: &Broken) -> String {
    let decode = error_of(&finish(model.decode()));
    assert_eq!(error_of(&finish(model.score())), decode);
    for command in ["doctor", "inspect", "plan"] {
        for json in [&[][..], &["--json"]] {
            let mut output = finish(model.run(command, json));
            // They also print what they found.
            output.stdout.clear();
            assert_eq!(error_of(&output), decode, "{command} {json:?}");
        }
    }
    let mut doctor = colibri();
    doctor.arg("doctor").arg(model.path());
    let mut output = finish(doctor);
    output.stdout.clear();
    assert_eq!(error_of(&output), decode);
    let out = tempfile::tempdir().unwrap();
    let mut convert = colibri();
    convert.arg("convert").arg(model.path());
    convert.arg(out.path().join("out"));
    assert_eq!(error_of(&finish(convert)), decode);
    assert!(!out.path().join("out").exists());
    decode
}

/// The findings of inspect, doctor and plan in JSON, which are the same.
#[track_caller]
fn findings(model: &Broken) -> Vec<Value> {
    let report = |command| -> Value {
        serde_json::from_slice(&finish(model.run(command, &["--json"])).stdout).unwrap()
    };
    let inspect = report("inspect")["findings"].clone();
    let doctor = report("doctor");
    let checks = doctor["checks"].as_array().unwrap();
    let weights = checks.iter().find(|check| check["name"] == "weights");
    assert_eq!(weights.unwrap()["details"]["findings"], inspect);
    serde_json::from_value(inspect).unwrap()
}

/// Removes the tensors for which `gone` holds.
fn remove(model: &Broken, gone: impl Fn(&str) -> bool) {
    for path in model.shards() {
        let mut shard = Shard::read(&path);
        shard.tensors.retain(|t| !gone(&t.name));
        shard.write(&path);
    }
}

#[test]
fn a_whole_model_has_no_findings() {
    for fixture in [
        "bf16-shared",
        "container-mixed",
        "mixed-mtp",
        "fp8-block",
        "int4-odd-groups",
    ] {
        assert!(findings(&Broken::copy(fixture)).is_empty(), "{fixture}");
    }
}

#[test]
fn a_resident_tensor_is_missing() {
    for name in [
        "model.layers.2.self_attn.indexer.wk.weight",
        "model.layers.2.self_attn.o_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ] {
        let model = Broken::copy("f16-long");
        remove(&model, |tensor| tensor == name);
        let says = format!("tensor {name} is missing from {}", model.path().display());
        let error = answer(&model);
        assert!(
            error.contains(&says) && error.contains("fetch the model again"),
            "{error}"
        );
        let found = &findings(&model)[0];
        assert_eq!(found["kind"], "missing-tensor");
        assert_eq!(
            (&found["tensor"], &found["severity"]),
            (&json!(name), &json!("error"))
        );
    }
}

#[test]
fn scales_are_missing() {
    for (fixture, scales) in [("fp8-block", "_scale_inv"), ("int4-odd-groups", ".qs")] {
        let model = Broken::copy(fixture);
        let name = format!("model.layers.1.self_attn.o_proj.weight{scales}");
        remove(&model, |tensor| tensor == name);
        let error = answer(&model);
        assert!(
            error.contains(&format!("tensor {name} is missing")),
            "{error}"
        );
        let found = &findings(&model)[0];
        assert_eq!(found["kind"], "missing-tensor");
        assert_eq!(found["tensor"], json!(name));
    }
}

#[test]
fn a_config_that_is_none_is_an_error_after_the_list() {
    let model = Broken::copy("bf16-shared");
    fs::write(model.path().join("config.json"), "{").unwrap();
    let mut inspect = finish(model.inspect());
    assert_eq!(inspect.status.code(), Some(1));
    let listed: Value = serde_json::from_slice(&inspect.stdout).unwrap();
    assert!(listed["tensors"].as_u64().unwrap() > 0);
    assert_eq!(listed["layers"], Value::Null);
    inspect.stdout.clear();
    assert_eq!(error_of(&inspect), error_of(&finish(model.decode())));
}

#[test]
fn layers_left_out_are_one_line() {
    let model = Broken::copy("f16-long");
    let mut config = model.config();
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    config.insert("num_hidden_layers".into(), json!(layers + 4));
    for (key, kind) in [("indexer_types", "shared"), ("mlp_layer_types", "sparse")] {
        if let Some(kinds) = config.get_mut(key).and_then(Value::as_array_mut) {
            kinds.extend(vec![json!(kind); 4]);
        }
    }
    model.set_config(&config);
    let error = answer(&model);
    let says = format!("layers {layers}-{}: ", layers + 3);
    assert!(
        error.contains(&says) && error.contains(" tensors are missing, first "),
        "{error}"
    );
    assert!(error.len() < 400, "{error}");
    let found = findings(&model);
    assert!(found.len() > 4 * 9, "one for each tensor");
    assert!(found.iter().all(|f| f["kind"] == "missing-tensor"));
}

#[test]
fn a_dense_tensor_of_another_shape() {
    let model = Broken::copy("f16-long");
    let mut config = model.config();
    config.insert("kv_lora_rank".into(), json!(24));
    model.set_config(&config);
    let error = answer(&model);
    assert!(
        error.contains("self_attn.kv_a_proj_with_mqa.weight has shape")
            && error.contains("more like it of layers 0-"),
        "{error}"
    );
    assert!(findings(&model).iter().all(|f| f["kind"] == "unfit"));
}

/// Half a prediction layer keeps no model from running.
#[test]
fn half_a_prediction_layer() {
    let model = Broken::copy("mixed-mtp");
    remove(&model, |name| name.ends_with(".eh_proj.weight"));
    for command in ["inspect", "doctor"] {
        let mut output = finish(model.run(command, &[]));
        output.stdout.clear();
        assert!(error_of(&output).contains(".eh_proj.weight"), "{command}");
    }
    assert_eq!(findings(&model)[0]["severity"], "drafts");
    let output = finish(model.decode());
    json_of(&output);
    assert!(stderr(&output).contains("eh_proj"), "{}", stderr(&output));
}

/// A model that was made for sparse attention says before the run that its attention is dense.
#[test]
fn a_model_without_its_indexer() {
    let model = Broken::copy("f16-long");
    remove(&model, |name| name.contains(".indexer."));
    for command in ["inspect", "doctor", "plan"] {
        let output = finish(model.run(command, &[]));
        assert!(output.status.success());
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("the model has no indexer tensors"), "{said}");
        json_of(&finish(model.run(command, &["--json"])));
    }
    let found = findings(&model);
    assert_eq!(
        (found.len(), &found[0]["kind"]),
        (1, &json!("dense-attention"))
    );
    let sparse = |model: &Broken, args: &[&str]| {
        let args = [&["--prompt-ids", "3,4", "-n", "1", "--json"], args].concat();
        json_of(&finish(model.run("decode", &args)))["stats"]["sparse_attention"].clone()
    };
    assert_eq!(sparse(&model, &[]), "absent");
    assert_eq!(sparse(&Broken::copy("f16-long"), &[]), "active");
    assert_eq!(sparse(&Broken::copy("f16-long"), &["--dsa", "off"]), "off");
}

const BIAS: &str = "self_attn.kv_a_proj_with_mqa.bias is not used";

/// A tensor inside a layer that the config does not announce.
#[test]
fn a_bias_that_the_config_does_not_announce() {
    let model = Broken::copy("bf16-fused-bias");
    let mut config = model.config();
    config.insert("attention_bias".into(), json!(false));
    model.set_config(&config);
    let output = finish(model.decode());
    json_of(&output);
    let said = stderr(&output);
    assert!(
        said.contains(BIAS) && said.contains(" of layers 0-"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    let said = String::from_utf8(finish(model.run("doctor", &[])).stdout).unwrap();
    assert!(said.contains(BIAS), "{said}");
}

#[test]
fn layers_beyond_the_config() {
    let model = Broken::copy("f16-long");
    let mut config = model.config();
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    config.insert("num_hidden_layers".into(), json!(layers - 1));
    model.set_config(&config);
    let output = finish(model.decode());
    json_of(&output);
    let says = format!("config.json has {} layers", layers - 1);
    assert!(stderr(&output).contains(&says), "{}", stderr(&output));
}

/// Numbers without "-of-N", and no index.
#[test]
fn a_gap_between_numbered_shards() {
    for gone in 0..3 {
        let model = Broken::copy("container-mixed");
        fs::remove_file(model.file(INDEX)).unwrap();
        for (i, path) in model.shards().iter().enumerate() {
            fs::rename(path, model.file(&format!("out-{i:05}.safetensors"))).unwrap();
        }
        let name = format!("out-{gone:05}.safetensors");
        fs::remove_file(model.file(&name)).unwrap();
        let error = answer(&model);
        assert!(error.contains("missing"), "{error}");
        assert_eq!(error.contains(&name), gone == 1, "{error}");
    }
}

#[test]
fn all_missing_files_are_one_line() {
    let model = Broken::copy("bf16-shared");
    let shards = model.shards();
    shards[1..]
        .iter()
        .for_each(|path| fs::remove_file(path).unwrap());
    let error = answer(&model);
    for path in &shards[1..] {
        assert!(
            error.contains(path.file_name().unwrap().to_str().unwrap()),
            "{error}"
        );
    }
    assert!(error.contains("2 files are missing") && error.contains("the download is incomplete"));
    let found = findings(&model);
    assert!(
        found
            .iter()
            .all(|f| f["kind"] == "missing-file" && f["tensor"].is_string())
    );
}

/// Links of a Hugging Face cache whose blobs are gone.
#[test]
fn dangling_links() {
    let model = Broken::copy("container-mixed");
    let blobs = tempfile::tempdir().unwrap();
    for name in ["model-00002-of-00003.safetensors", "config.json", INDEX] {
        let blob = blobs.path().join(format!("blob-of-{name}"));
        fs::rename(model.file(name), &blob).unwrap();
        symlink(&blob, model.file(name)).unwrap();
        let away = blobs.path().join("away");
        fs::rename(&blob, &away).unwrap();
        let error = model.refused();
        let says = format!(
            "{name} is a link to {}, which does not exist",
            blob.display()
        );
        assert!(error.contains(&says), "{error}");
        fs::rename(&away, &blob).unwrap();
        json_of(&finish(model.decode()));
    }
    for name in [
        "model-00001-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ] {
        fs::remove_file(model.file(name)).unwrap();
        symlink(blobs.path().join("gone"), model.file(name)).unwrap();
    }
    let error = answer(&model);
    let says = format!(
        "is a link to {}, which does not exist, and 1 more like it: ",
        blobs.path().join("gone").display()
    );
    assert!(error.contains(&says), "{error}");
    fs::remove_dir_all(blobs.path()).unwrap();
    symlink("nowhere", model.file("generation_config.json")).unwrap();
    assert!(model.refused().contains("is a link to"));
}

#[test]
fn git_lfs_pointers() {
    let model = Broken::copy("container-mixed");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5368709120\n";
    let name = "model-00002-of-00003.safetensors";
    fs::write(model.file(name), pointer).unwrap();
    let error = answer(&model);
    assert!(
        error.contains(&format!("{name} is a git-lfs pointer")),
        "{error}"
    );
    assert!(error.contains(&format!("run git lfs pull in {}", model.path().display())));
    assert_eq!(findings(&model)[0]["kind"], "lfs-pointer");
    for path in model.shards() {
        fs::write(path, pointer).unwrap();
    }
    let error = answer(&model);
    assert!(error.contains("3 files are git-lfs pointers"), "{error}");
    assert!(!error.contains("tensors are missing"), "{error}");
}

/// The first matrix of a layer, stored by other software.
fn foreign(change: impl Fn(Tensor) -> Vec<Tensor>) -> Broken {
    let model = Broken::copy("fp8-block");
    for path in model.shards() {
        let shard = Shard::read(&path);
        let scales = |name: &str| name.ends_with("_scale_inv");
        let tensors = shard.tensors.into_iter().filter(|t| !scales(&t.name));
        let changed = tensors.flat_map(|t| match t.dtype == "F8_E4M3" {
            true => change(t),
            false => vec![t],
        });
        Shard {
            tensors: changed.collect(),
        }
        .write(&path);
    }
    model
}

fn tensor(name: &str, dtype: &str, shape: &[u64], width: usize) -> Tensor {
    let elements: u64 = shape.iter().product();
    Tensor {
        name: name.to_owned(),
        dtype: dtype.to_owned(),
        shape: shape.to_vec(),
        data: vec![0; elements as usize * width],
    }
}

#[test]
fn formats_of_other_software_are_named() {
    type Change = fn(Tensor) -> Vec<Tensor>;
    let formats: [(&str, Change); 9] = [
        (
            "FP8 with one scale a row (per channel) in weight_scale",
            |t| {
                let scales = tensor(&format!("{}_scale", t.name), "F32", &[t.shape[0], 1], 4);
                vec![t, scales]
            },
        ),
        ("NVFP4 of ModelOpt", |t| {
            let [o, i] = [t.shape[0], t.shape[1]];
            vec![
                tensor(
                    &format!("{}_scale", t.name),
                    "F8_E4M3",
                    &[o, i.div_ceil(16)],
                    1,
                ),
                tensor(&format!("{}_scale_2", t.name), "F32", &[], 4),
                tensor(&t.name, "U8", &[o, i.div_ceil(2)], 1),
            ]
        }),
        ("GPTQ", |t| {
            let stem = t.name.strip_suffix(".weight").unwrap();
            vec![
                tensor(
                    &format!("{stem}.qweight"),
                    "I32",
                    &[t.shape[1].div_ceil(8), t.shape[0]],
                    4,
                ),
                tensor(&format!("{stem}.g_idx"), "I32", &[t.shape[1]], 4),
            ]
        }),
        ("AWQ", |t| {
            let stem = t.name.strip_suffix(".weight").unwrap();
            let shape = [t.shape[1], t.shape[0].div_ceil(8)];
            vec![tensor(&format!("{stem}.qweight"), "I32", &shape, 4)]
        }),
        ("packed integers of compressed-tensors", |t| {
            let shape = [t.shape[0], t.shape[1].div_ceil(8)];
            vec![
                tensor(&format!("{}_packed", t.name), "I32", &shape, 4),
                tensor(&format!("{}_scale", t.name), "BF16", &[t.shape[0], 1], 2),
            ]
        }),
        ("4-bit codes of bitsandbytes", |t| {
            let half = (t.shape[0] * t.shape[1]).div_ceil(2);
            vec![
                tensor(&t.name, "U8", &[half, 1], 1),
                tensor(&format!("{}.absmax", t.name), "U8", &[half.div_ceil(32)], 1),
            ]
        }),
        (
            "INT8 with one scale a row (per channel) in weight_scale",
            |t| {
                vec![
                    tensor(&t.name, "I8", &t.shape, 1),
                    tensor(&format!("{}_scale", t.name), "F32", &[t.shape[0], 1], 4),
                ]
            },
        ),
        ("FP8 with scales of shape [1, 7]", |t| {
            let scales = tensor(&format!("{}_scale_inv", t.name), "F32", &[1, 7], 4);
            vec![t, scales]
        }),
        ("FP8 with U8 scales", |t| {
            let scales = tensor(&format!("{}_scale_inv", t.name), "U8", &[1, 1], 1);
            vec![t, scales]
        }),
    ];
    for (format, change) in formats {
        let model = foreign(change);
        let error = answer(&model);
        assert!(
            error.contains(&format!("is stored as {format} (")),
            "{format}: {error}"
        );
        assert!(
            error.contains(&format!("instead of {format}, take the model in BF16")),
            "{error}"
        );
        assert!(findings(&model).iter().any(|f| f["kind"] == "other-format"));
    }
}

#[test]
fn directories_with_weights_of_another_kind() {
    for (file, says) in [
        ("model-Q4_K_M.gguf", "GGUF"),
        ("pytorch_model-00001-of-00002.bin", "PyTorch"),
        ("consolidated.00.pth", "PyTorch"),
    ] {
        let model = Broken::copy("f32-smallest");
        fs::rename(model.file("model.safetensors"), model.file(file)).unwrap();
        let error = model.refused_by_all();
        assert!(error.contains(file) && error.contains(says), "{error}");
        fs::remove_file(model.file("config.json")).unwrap();
        let error = model.refused();
        assert!(error.contains(file) && error.contains(says), "{error}");
    }
    let model = Broken::copy("f32-smallest");
    let path = model.file("model.safetensors");
    let mut shard = Shard::read(&path);
    for tensor in &mut shard.tensors {
        tensor.name = tensor.name.replace("model.layers", "layers");
    }
    shard.write(&model.file("consolidated.safetensors"));
    fs::remove_file(path).unwrap();
    let error = answer(&model);
    assert!(error.contains("consolidated.safetensors has the tensor names of another format"));
}

/// Writes an index of the tensors and files.
fn write_index(dir: &Path, map: &serde_json::Map<String, Value>) {
    let index = json!({ "metadata": {}, "weight_map": map });
    fs::write(dir.join(INDEX), index.to_string()).unwrap();
}

/// A model with two tensors in an overlay of other values, and the same model with the values in place.
struct Overlay {
    base: Broken,
    merged: Broken,
    /// The tensors of the overlay.
    tensors: Vec<Tensor>,
    /// The index of the base.
    map: serde_json::Map<String, Value>,
}

const OVERLAY: &str = "model-overlay-00001.safetensors";

impl Overlay {
    fn new() -> Overlay {
        let (base, merged) = (Broken::copy("bf16-split"), Broken::copy("bf16-split"));
        let names = [
            "model.norm.weight",
            "model.layers.1.mlp.experts.0.gate_proj.weight",
        ];
        let (mut tensors, mut map) = (Vec::new(), serde_json::Map::new());
        for path in merged.shards() {
            let mut shard = Shard::read(&path);
            for tensor in &mut shard.tensors {
                let file = path.file_name().unwrap().to_str().unwrap();
                map.insert(tensor.name.clone(), file.into());
                if names.contains(&tensor.name.as_str()) {
                    tensor
                        .data
                        .iter_mut()
                        .skip(1)
                        .step_by(2)
                        .for_each(|b| *b ^= 0x80);
                    tensors.push(tensor.clone());
                }
            }
            shard.write(&path);
        }
        assert_eq!(tensors.len(), names.len());
        Overlay {
            base,
            merged,
            tensors,
            map,
        }
    }

    fn write(&self, path: &Path) {
        let tensors = self.tensors.clone();
        Shard { tensors }.write(path);
    }

    /// The index with the overlay.
    fn with_overlay(&self) -> serde_json::Map<String, Value> {
        let mut map = self.map.clone();
        for tensor in &self.tensors {
            map.insert(tensor.name.clone(), OVERLAY.into());
        }
        map
    }
}

fn ids(dirs: &[&Path]) -> Value {
    let dirs: Vec<_> = dirs.iter().map(|dir| dir.to_path_buf()).collect();
    let args = ["--prompt-ids", "125,90,78,88,63", "-n", "8", "--json"];
    let output = finish(on_model("decode", &dirs, &args));
    assert_eq!(stderr(&output), "");
    json_of(&output)["token_ids"].clone()
}

#[test]
fn the_index_decides_which_file_has_a_tensor() {
    let overlay = Overlay::new();
    let (base, merged) = (ids(&[overlay.base.path()]), ids(&[overlay.merged.path()]));
    assert_ne!(base, merged);
    // In one directory.
    let model = Broken::copy("bf16-split");
    overlay.write(&model.file(OVERLAY));
    let error = model.refused();
    assert!(error.contains("is in both"), "{error}");
    write_index(model.path(), &overlay.with_overlay());
    assert_eq!(ids(&[model.path()]), merged);
    write_index(model.path(), &overlay.map);
    assert_eq!(ids(&[model.path()]), base);
    let found = findings(&model);
    assert_eq!(
        (found.len(), &found[0]["kind"]),
        (1, &json!("left-over-file"))
    );

    // In a directory over that of the base, in any order.
    let over = tempfile::tempdir().unwrap();
    overlay.write(&over.path().join(OVERLAY));
    fs::copy(
        overlay.base.file("config.json"),
        over.path().join("config.json"),
    )
    .unwrap();
    write_index(over.path(), &overlay.with_overlay());
    for base_has_index in [false, true] {
        if base_has_index {
            write_index(overlay.base.path(), &overlay.map);
        }
        assert_eq!(ids(&[over.path(), overlay.base.path()]), merged);
        assert_eq!(ids(&[overlay.base.path(), over.path()]), merged);
    }
    // The base has the tensors, but the index wants those of the overlay.
    fs::rename(
        over.path().join(OVERLAY),
        over.path().join("other.safetensors"),
    )
    .unwrap();
    let dirs = [over.path().to_path_buf(), overlay.base.path().to_path_buf()];
    for command in ["decode", "inspect", "doctor"] {
        let args: &[&str] = if command == "decode" {
            &["--prompt-ids", "3"]
        } else {
            &[]
        };
        let mut output = finish(on_model(command, &dirs, args));
        output.stdout.clear();
        assert!(error_of(&output).contains(OVERLAY), "{command}");
    }
}

/// Two indices of equal reach that contradict each other.
#[test]
fn no_index_decides_against_another() {
    let overlay = Overlay::new();
    write_index(overlay.base.path(), &overlay.map);
    let over = tempfile::tempdir().unwrap();
    overlay.write(&over.path().join(OVERLAY));
    let names = overlay
        .tensors
        .iter()
        .map(|t| (t.name.clone(), OVERLAY.into()));
    write_index(over.path(), &names.collect());
    let dirs = [overlay.base.path().to_path_buf(), over.path().to_path_buf()];
    let error = error_of(&finish(on_model("decode", &dirs, &["--prompt-ids", "3"])));
    assert!(error.contains("is in both"), "{error}");
}

/// Every fixture is whole.
#[test]
fn fixtures_are_whole() {
    for saved in crate::common::all() {
        let output = finish(on_model("inspect", &saved.dirs, &["--json"]));
        let found = json_of(&output)["findings"].clone();
        let kinds: Vec<_> = found
            .as_array()
            .unwrap()
            .iter()
            .map(|f| &f["severity"])
            .collect();
        assert!(
            kinds.iter().all(|severity| *severity == "note"),
            "{}: {found}",
            saved.name
        );
    }
}

/// FP8 with scales in BF16 gives the tokens of the same scales in F32, also when it is converted.
#[test]
fn scales_of_fp8_may_be_bf16() {
    let models = [Broken::copy("fp8-block"), Broken::copy("fp8-block")];
    for (model, width) in models.iter().zip([2, 4]) {
        for path in model.shards() {
            let mut shard = Shard::read(&path);
            for t in shard
                .tensors
                .iter_mut()
                .filter(|t| t.name.ends_with("_scale_inv"))
            {
                t.dtype = if width == 2 { "BF16" } else { "F32" }.to_owned();
                // The upper half of an F32 is a BF16.
                let words = t.data.chunks_exact(4);
                t.data = words
                    .flat_map(|b| [&[0; 2][..width - 2], &b[2..]].concat())
                    .collect();
            }
            shard.write(&path);
        }
    }
    let [halves, words] = &models;
    assert!(findings(halves).is_empty());
    let logits = |dir: &Path, dense: &[&str]| {
        let args = [&["--ids", "3,4,5,6,7", "--json"], dense].concat();
        let output = finish(on_model("score", &[dir.to_path_buf()], &args));
        assert_eq!(stderr(&output), "");
        json_of(&output)["last_logits"].clone()
    };
    for dense in [&[][..], &["--dense-bits", "8", "--expert-bits", "4"]] {
        assert_eq!(logits(halves.path(), dense), logits(words.path(), dense));
    }
    let out = tempfile::tempdir().unwrap();
    for formats in ["keep", "int8"] {
        let converted = models.each_ref().map(|model| {
            let to = out.path().join(format!(
                "{formats}-{}",
                model.path().file_name().unwrap().display()
            ));
            let mut convert = colibri();
            convert.arg("convert").arg(model.path()).arg(&to);
            for flag in ["--experts", "--dense", "--embed", "--mtp"] {
                convert.args([flag, formats]);
            }
            assert!(finish(convert).status.success());
            logits(&to, &[])
        });
        assert_eq!(converted[0], converted[1], "{formats}");
    }
}
