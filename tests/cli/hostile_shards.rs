//! Corrupt shards, missing files and wrong tensors: one error line and exit code 1 for every command.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::corrupt::{Broken, Shard, Tensor, kind, mkfifo};
use crate::process::{colibri, error_of, error_or_json, finish, json_of};
use crate::sandbox::obey_permissions;

const SMALLEST: &str = "f32-smallest";
const SHARD: &str = "model.safetensors";

/// tests/shards/hostile.rs has the other ways in which a header can be wrong.
#[test]
fn a_shard_that_is_too_short_or_too_long() {
    let model = Broken::copy(SMALLEST);
    let whole = fs::read(model.file(SHARD)).unwrap();
    for file in [
        &whole[..7],
        &whole[..whole.len() - 1],
        &[&whole[..], &[0]].concat(),
    ] {
        fs::write(model.file(SHARD), file).unwrap();
        let error = model.refused_by_all();
        assert!(error.contains(SHARD), "{error}");
    }
}

/// Models that need all their tensors, and together have every kind.
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
            // It lists the other tensors first.
            let mut inspect = finish(model.inspect());
            inspect.stdout.clear();
            assert_eq!(error_of(&inspect), error);
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

/// NaN and infinite weights are refused with the file and the tensor: resident ones at load, those of experts when they are used.
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
            let refused = |run: Result<Value, String>| match run {
                Err(error) => assert!(
                    error.contains(&format!(".safetensors: tensor {name}"))
                        && error.contains(": value 0 is "),
                    "{name}: {error}"
                ),
                // Routers may choose other experts.
                Ok(_) => assert!(name.contains(".experts."), "{name}"),
            };
            for temperature in ["0", "1"] {
                let ids = ["--prompt-ids", "3,4,5,6,7,8,9,10,11,12,13,14", "-n", "3"];
                let rest = ["--temperature", temperature, "--json"];
                let run = finish(model.run("decode", &[&ids[..], &rest].concat()));
                refused(error_or_json(&run));
            }
            refused(error_or_json(&finish(model.score())));
        }
    }
}

#[test]
fn a_model_without_a_shard_or_a_config() {
    let model = Broken::copy(SMALLEST);
    fs::remove_file(model.file(SHARD)).unwrap();
    let error = model.refused_by_all();
    assert!(error.contains(model.path().to_str().unwrap()), "{error}");
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

/// Every command that takes --model, on `dir`.
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
fn every_command_refuses_a_directory_without_a_model() {
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
            // doctor prints its other checks first.
            if what.contains("doctor") {
                assert!(String::from_utf8_lossy(&output.stdout).contains("memlock"));
                output.stdout.clear();
            }
            let error = error_of(&output);
            assert!(error.starts_with(&expected), "{what}: {error}");
        }
    }
}

/// With and without the index file that lists the shards.
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
                continue; // It needs a tokenizer first.
            }
            let mut output = finish(command);
            if what.contains("doctor") || what.contains("inspect") {
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

/// A directory or a pipe with a shard's name is skipped.
#[test]
fn only_regular_files_are_shards() {
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
