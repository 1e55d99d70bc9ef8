//! Shards that lie, files that are none, tensors that are missing or unfit: one line, exit 1, for every command.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Map, Value, json};

use crate::corrupt::{Broken, Shard, Tensor, join, kind, mkfifo, split};
use crate::process::{colibri, error_of, error_or_json, finish, json_of};
use crate::sandbox::obey_permissions;

const SMALLEST: &str = "f32-smallest";
const SHARD: &str = "model.safetensors";

#[test]
fn truncated_anywhere() {
    let model = Broken::copy(SMALLEST);
    let whole = fs::read(model.file(SHARD)).unwrap();
    let header = split(&whole).0.len() + 8;
    let spread = (0..24).map(|i| i * whole.len() / 24);
    let edges = [1, 7, 8, 9, header - 1, header, header + 1, whole.len() - 1];
    for len in spread.chain(edges) {
        fs::write(model.file(SHARD), &whole[..len]).unwrap();
        let error = model.refused_by_all();
        assert!(error.contains(SHARD), "at {len}: {error}");
    }
    fs::write(model.file(SHARD), [&whole[..], &[0]].concat()).unwrap();
    assert!(model.refused_by_all().contains(SHARD));
}

#[test]
fn headers_that_lie() {
    let model = Broken::copy(SMALLEST);
    let whole = fs::read(model.file(SHARD)).unwrap();
    let (header, data) = split(&whole);
    let len = header.len() as u64;
    for claimed in [0, 1, len - 1, len + 1, 1 << 20, 1 << 40, 1 << 63, u64::MAX] {
        let file = [&claimed.to_le_bytes()[..], header, data].concat();
        fs::write(model.file(SHARD), file).unwrap();
        let error = model.refused_by_all();
        assert!(error.contains(SHARD), "{claimed}: {error}");
    }
    let deep = "[".repeat(100_000);
    let deeper = format!(r#"{{"t":{{"shape":{deep}"#);
    for text in ["", "{", "[]", "null", "7", "{}}", "\u{0}", &deep, &deeper] {
        fs::write(model.file(SHARD), join(text.as_bytes(), data)).unwrap();
        assert!(model.refused_by_all().contains(SHARD), "{text:.20}");
    }
    fs::write(model.file(SHARD), join(b"{\"\xff\":1}", data)).unwrap();
    assert!(model.refused_by_all().contains(SHARD));
}

#[test]
fn entries_that_lie() {
    let model = Broken::copy(SMALLEST);
    let whole = fs::read(model.file(SHARD)).unwrap();
    let (header, data) = split(&whole);
    let name = "model.norm.weight";
    let refused = |entry: &dyn Fn(&mut Value)| {
        let mut map: Map<String, Value> = serde_json::from_slice(header).unwrap();
        entry(&mut map[name]);
        let header = serde_json::to_vec(&map).unwrap();
        fs::write(model.file(SHARD), join(&header, data)).unwrap();
        let error = model.refused_by_all();
        assert!(error.contains(SHARD), "{error}");
    };
    let entry: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let at = |i: usize| entry[name]["data_offsets"][i].as_u64().unwrap();
    let (start, end) = (at(0), at(1));
    let (max, big) = (u64::MAX, data.len() as u64);
    for offsets in [
        json!([start + 4, end + 4]),
        json!([start.wrapping_sub(4), end - 4]),
        json!([end, start]),
        json!([start, end - 1]),
        json!([big, big + end - start]),
        json!([max - (end - start), max]),
        json!([max, max]),
        json!([-4, end]),
        json!([start]),
        json!("0"),
        json!([start as f64 + 0.5, end]),
    ] {
        refused(&|entry| entry["data_offsets"] = offsets.clone());
    }
    for shape in [
        json!([1u64 << 32, 1u64 << 32]),
        json!([max, max, max]),
        json!([max]),
        json!([-1]),
        json!(7),
        json!(["7"]),
        json!([1e300]),
        json!(vec![2; 100]),
    ] {
        refused(&|entry| entry["shape"] = shape.clone());
    }
    for dtype in [
        json!("F33"),
        json!(""),
        json!(32),
        json!("BF16"),
        json!("F64"),
    ] {
        refused(&|entry| entry["dtype"] = dtype.clone());
    }
    refused(&|entry| *entry = json!("F32"));
    for key in ["dtype", "shape", "data_offsets"] {
        refused(&|entry| drop(entry.as_object_mut().unwrap().remove(key)));
    }
}

#[test]
fn a_tensor_twice() {
    let model = Broken::copy(SMALLEST);
    let twin = Shard {
        tensors: vec![Tensor {
            name: "model.norm.weight".to_owned(),
            dtype: "F32".to_owned(),
            shape: vec![1],
            data: vec![0; 4],
        }],
    };
    twin.write(&model.file("twin.safetensors"));
    let error = model.refused_by_all();
    for part in ["model.norm.weight", SHARD, "twin.safetensors"] {
        assert!(error.contains(part), "{error}");
    }
    fs::remove_file(model.file("twin.safetensors")).unwrap();
    // The same name again in the same header.
    let whole = fs::read(model.file(SHARD)).unwrap();
    let (header, data) = split(&whole);
    let text = std::str::from_utf8(header).unwrap().trim_end();
    let end = data.len();
    let again = format!(
        "{},\"model.norm.weight\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[{end},{}]}}}}",
        text.strip_suffix('}').unwrap(),
        end + 4
    );
    let file = join(again.as_bytes(), &[data, &[0; 4]].concat());
    fs::write(model.file(SHARD), file).unwrap();
    assert!(model.refused_by_all().contains("model.norm.weight"));
}

/// Models whose tensors are all needed, and have every kind between them.
const WHOLE: [&str; 4] = [
    "bf16-shared",
    "bf16-fused-bias",
    "f16-fused-pattern",
    "bf16-mlp-types",
];

#[test]
fn a_missing_tensor_of_every_kind() {
    for fixture in WHOLE {
        for name in Broken::copy(fixture).kinds() {
            let model = Broken::copy(fixture);
            model.change(&name, |tensors, at| drop(tensors.remove(at)));
            let error = model.refused();
            assert!(error.contains(&name), "{fixture}, {name}: {error}");
            assert!(error_or_json(&finish(model.inspect())).is_ok());
        }
    }
}

#[test]
fn an_indexer_without_one_of_its_tensors_in_every_layer() {
    let kinds = Broken::copy("bf16-shared").kinds();
    let mut indexer = kinds.iter().filter(|name| name.contains(".indexer."));
    assert!(indexer.all(|name| {
        let model = Broken::copy("bf16-shared");
        for path in model.shards() {
            let mut shard = Shard::read(&path);
            shard.tensors.retain(|t| kind(&t.name) != kind(name));
            shard.write(&path);
        }
        model.refused().contains(name)
    }));
}

#[test]
fn an_unfit_tensor_of_every_kind() {
    for fixture in ["bf16-shared", "bf16-fused-bias"] {
        for name in Broken::copy(fixture).kinds() {
            let refused = |change: &dyn Fn(&mut Tensor)| {
                let model = Broken::copy(fixture);
                model.change(&name, |tensors, at| change(&mut tensors[at]));
                let error = error_of(&finish(model.decode()));
                assert!(error.contains(&name), "{fixture}, {name}: {error}");
            };
            refused(&|t| t.shape.push(1));
            refused(&|t| t.shape = vec![1, t.shape.iter().product()]);
            refused(&|t| {
                t.dtype = "I64".to_owned();
                t.data = vec![0; 8 * t.shape.iter().product::<u64>() as usize];
            });
            refused(&|t| {
                t.shape[0] += 1;
                let more = t.data.len() / (t.shape[0] as usize - 1);
                t.data.extend(vec![0; more]);
            });
            refused(&|t| {
                t.shape[0] = 0;
                t.data.clear();
            });
        }
    }
}

/// Weights that are no numbers make no text, but the program ends, and soon; where they decide a choice they are refused.
#[test]
fn weights_that_are_not_finite() {
    for value in [f32::NAN, f32::INFINITY] {
        let bits = ((value.to_bits() >> 16) as u16).to_le_bytes();
        for name in Broken::copy("bf16-shared").kinds() {
            let model = Broken::copy("bf16-shared");
            model.change(&name, |tensors, at| {
                let tensor = &mut tensors[at];
                let pattern = match tensor.dtype.as_str() {
                    "F32" => value.to_le_bytes().to_vec(),
                    _ => bits.to_vec(),
                };
                let len = tensor.data.len();
                tensor.data = pattern.into_iter().cycle().take(len).collect();
            });
            for temperature in ["0", "1"] {
                let ids = ["--prompt-ids", "3,4,5,6,7,8,9,10,11,12,13,14", "-n", "3"];
                let rest = ["--temperature", temperature, "--json"];
                let run = finish(model.run("decode", &[&ids[..], &rest].concat()));
                if let Err(error) = error_or_json(&run) {
                    let refused = error.contains(&format!("tensor {name}: value 0 is"));
                    assert!(
                        refused || error.contains("no token can be"),
                        "{name}: {error}"
                    );
                }
            }
            let decides = [
                "layernorm.weight",
                "model.norm.weight",
                "k_norm.weight",
                "k_norm.bias",
                "mlp.gate.weight",
                "e_score_correction_bias",
            ];
            let score = error_or_json(&finish(model.score()));
            match decides.iter().any(|end| name.ends_with(end)) {
                true => assert!(score.unwrap_err().contains(&name), "{name}"),
                false => assert!(score.is_ok(), "{name}"),
            }
        }
    }
}

#[test]
fn directories_that_hold_no_model() {
    let model = Broken::copy(SMALLEST);
    fs::remove_file(model.file(SHARD)).unwrap();
    let error = model.refused_by_all();
    assert!(error.contains(model.path().to_str().unwrap()), "{error}");
    fs::create_dir(model.file("x.safetensors")).unwrap();
    model.refused_by_all();
    fs::remove_dir(model.file("x.safetensors")).unwrap();
    for name in [SHARD, "config.json"] {
        let model = Broken::copy(SMALLEST);
        let path = model.file(name);
        fs::remove_file(&path).unwrap();
        mkfifo(&path);
        let place = model.path().to_str().unwrap();
        assert!(model.refused().contains(place));
        fs::remove_file(&path).unwrap();
        symlink(name, &path).unwrap();
        assert!(model.refused().contains(name));
        fs::remove_file(&path).unwrap();
        symlink("nowhere", &path).unwrap();
        assert!(model.refused().contains(name));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        model.refused();
    }
}

/// Commands that take --model, on these directories.
fn every_command(dir: &Path) -> Vec<Command> {
    let mut all = Vec::new();
    for args in [
        &["decode", "--prompt-ids", "3,4"][..],
        &["chat"],
        &["score", "--ids", "3,4"],
        &["profile"],
        &["mirror", "bench", "--mirror", "/"],
        &["mirror", "verify", "--mirror", "/"],
        &["mirror", "stage", "--to", "/nowhere"],
        &["simulate", "--device", "1GiB/s"],
        &["inspect"],
        &["plan"],
        &["doctor"],
    ] {
        let mut command = colibri();
        command.args(args).arg("--model").arg(dir);
        command.stdin(Stdio::null());
        all.push(command);
    }
    all
}

#[test]
fn every_command_says_that_there_is_no_model() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for (path, why) in [
        (&dir.path().join("absent"), "there is none"),
        (&file, "it is no directory"),
        (&empty, "it holds no part of a model"),
    ] {
        let expected = format!(
            "error: cannot open the model directory {}: {why}; expected is one with config.json",
            path.display()
        );
        for command in every_command(path) {
            let what = format!("{command:?}");
            let mut output = finish(command);
            // It tells of the machine all the same.
            if what.contains("doctor") {
                assert!(String::from_utf8_lossy(&output.stdout).contains("memlock"));
                output.stdout.clear();
            }
            let error = error_of(&output);
            assert!(error.starts_with(&expected), "{what}: {error}");
        }
    }
}

/// Nor does one go on with a part of it, whether or not a list says that there is more.
#[test]
fn every_command_names_the_shard_that_is_missing() {
    for list in [true, false] {
        let model = Broken::copy("bf16-shared");
        let shard = model.shards().pop().unwrap();
        fs::remove_file(&shard).unwrap();
        if !list {
            fs::remove_file(model.file("model.safetensors.index.json")).unwrap();
        }
        let name = shard.file_name().unwrap().to_str().unwrap();
        for command in every_command(model.path()) {
            let what = format!("{command:?}");
            if what.contains("chat") {
                continue; // It asks for a tokenizer first.
            }
            let mut output = finish(command);
            if what.contains("doctor") {
                output.stdout.clear();
            }
            let error = error_of(&output);
            assert!(
                error.contains(name) && error.contains("the download is incomplete"),
                "{what}: {error}"
            );
        }
    }
}

/// What has the name of a shard and is no file is no shard: it takes nothing away, and nobody waits for it.
#[test]
fn no_file_with_the_name_of_a_shard() {
    let model = Broken::copy(SMALLEST);
    fs::create_dir(model.file("a.safetensors")).unwrap();
    mkfifo(&model.file("b.safetensors"));
    for command in [model.decode(), model.score(), model.inspect()] {
        json_of(&finish(command));
    }
    mkfifo(&model.file("model.safetensors.index.json"));
    assert!(
        model
            .refused_by_all()
            .contains("model.safetensors.index.json")
    );
}

#[test]
fn files_without_permission() {
    let model = Broken::copy(SMALLEST);
    let refused = |path: &std::path::Path, inspect: bool| {
        let before = fs::metadata(path).unwrap().permissions();
        fs::set_permissions(path, fs::Permissions::from_mode(0o000)).unwrap();
        let mut commands = vec![model.decode(), model.score()];
        commands.extend(inspect.then(|| model.inspect()));
        let outputs: Vec<_> = (commands.into_iter())
            .map(|mut command| {
                obey_permissions(&mut command);
                finish(command)
            })
            .collect();
        fs::set_permissions(path, before).unwrap();
        for output in outputs {
            let error = error_of(&output);
            assert!(error.contains(path.to_str().unwrap()), "{error}");
            assert!(error.contains("ermission denied"), "{error}");
        }
    };
    refused(model.path(), true);
    refused(&model.file(SHARD), true);
    refused(&model.file("config.json"), false);
    fs::write(model.file("generation_config.json"), "{}").unwrap();
    refused(&model.file("generation_config.json"), false);
}
