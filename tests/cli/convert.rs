//! `convert`: the container gives the reference's numbers for the rounded weights, and other tensors are unchanged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::common::{self, Saved};
use crate::corrupt::{Broken, Shard, Tensor, split};
use crate::process::{colibri, error_of, finish, json_of, list, on_model, stderr};

pub const KEEP: [&str; 8] = [
    "--experts",
    "keep",
    "--dense",
    "keep",
    "--embed",
    "keep",
    "--mtp",
    "keep",
];

/// `convert dirs... out args...`
pub fn convert(dirs: &[PathBuf], out: &Path, args: &[&str]) -> Command {
    let mut command = colibri();
    command.arg("convert").args(dirs).arg(out).args(args);
    command
}

/// Converts into a temporary directory. Returns it with the output.
fn converted(dirs: &[PathBuf], args: &[&str]) -> (TempDir, Value) {
    let dir = tempfile::tempdir().unwrap();
    let args = [args, &["--json"]].concat();
    let said = json_of(&finish(convert(dirs, dir.path(), &args)));
    (dir, said)
}

fn score(dirs: &[PathBuf], ids: &[u32], args: &[&str]) -> Value {
    let ids = list(ids);
    let args = [&["--ids", &ids, "--json"], args].concat();
    json_of(&finish(on_model("score", dirs, &args)))
}

pub fn shards(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap();
    let mut paths: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    paths.sort();
    paths
}

fn tensors(dir: &Path) -> Vec<Tensor> {
    let read = |path: &PathBuf| Shard::read(path).tensors;
    let mut tensors: Vec<_> = shards(dir).iter().flat_map(read).collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    tensors
}

/// The oracle's checksum of all packed tensors and their scales, in the order of their names.
fn packed_crc(dir: &Path) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    for tensor in tensors(dir) {
        if tensor.dtype == "U8" || tensor.name.ends_with(".qs") {
            crc.update(&tensor.data);
        }
    }
    crc.finalize()
}

#[test]
fn converted_fixtures_say_what_the_reference_says_about_the_rounded_weights() {
    let mut seen = 0;
    for model in common::all() {
        let record = model.dirs[0].join("converted.json");
        let home = model.dirs[0].parent().unwrap().join("converted.json");
        let Some(record) = [record, home].into_iter().find(|path| path.exists()) else {
            continue;
        };
        let records: Vec<Value> = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
        for record in records {
            let recipe = record["recipe"].as_object().unwrap();
            let name = format!("{}: {recipe:?}", model.name);
            let flags: Vec<String> = (recipe.iter())
                .flat_map(|(key, format)| [format!("--{key}"), format.as_str().unwrap().into()])
                .collect();
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            // Several shards.
            let flags = [&flags[..], &["--shard-size", "60KiB"]].concat();
            let (dir, _) = converted(&model.dirs, &flags);
            assert_eq!(packed_crc(dir.path()), record["packed_crc32"], "{name}");

            let out = [dir.path().to_path_buf()];
            let ids = |path: &str| -> Vec<u32> {
                serde_json::from_value(record.pointer(path).unwrap().clone()).unwrap()
            };
            let tokens = ids("/token_ids");
            let (prompt, n) = (list(&ids("/prompt_ids")), tokens.len().to_string());
            let args = ["--prompt-ids", &prompt, "-n", &n, "--json"];
            let decoded = json_of(&finish(on_model("decode", &out, &args)));
            assert_eq!(decoded["token_ids"], record["token_ids"], "{name}");
            let scored = score(&out, &ids("/score/ids"), &[]);
            assert_eq!(scored["argmax"], record["score"]["argmax"], "{name}");
            let logits = |v: &Value| -> Vec<f32> {
                serde_json::from_value(v["last_logits"].clone()).unwrap()
            };
            for (ours, theirs) in logits(&scored).iter().zip(logits(&record["score"])) {
                assert!((ours - theirs).abs() < 1e-3, "{name}: {ours} and {theirs}");
            }
            seen += 1;
        }
    }
    println!("{seen} conversions compared");
    assert!(seen > 0 || common::root() != common::shipped());
}

/// Whether `convert` takes the model's family: experts of gpt-oss have 4 bits as published.
fn is_convertible(model: &Saved) -> bool {
    let config = fs::read_to_string(model.dirs[0].join("config.json")).unwrap();
    !config.contains("\"gpt_oss\"")
}

#[test]
fn experts_that_have_4_bits_as_published_are_not_converted() {
    for model in common::all().iter().filter(|model| !is_convertible(model)) {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let line = error_of(&finish(convert(&model.dirs, &out, &[])));
        let says = "the experts of gpt_oss are published in 4 bits (mxfp4) and run as they are";
        assert!(line.contains(says), "{line}");
    }
}

#[test]
fn what_is_kept_gives_the_same_numbers_in_another_order() {
    for model in common::all().into_iter().filter(is_convertible) {
        let ids = model.ids("/prompt_ids");
        let before = score(&model.dirs, &ids, &[]);
        let size = ["--shard-size", "50KiB"];
        let (dir, said) = converted(&model.dirs, &[&KEEP[..], &size].concat());
        assert_eq!(said["requantised"], 0, "{}", model.name);
        assert_eq!(said["unknown"], 0, "{}", model.name);
        assert_eq!(
            score(&[dir.path().into()], &ids, &[]),
            before,
            "{}",
            model.name
        );
    }
}

/// The same container in a layout that another program may write.
#[test]
fn the_order_of_tensors_and_shards_changes_nothing() {
    for name in ["bf16-shared", "fp8-block", "container-mixed"] {
        let (dir, _) = converted(&Saved::named(name).dirs, &[]);
        let ids = Saved::named(name).ids("/score/ids");
        let before = score(&[dir.path().into()], &ids, &[]);
        let other = tempfile::tempdir().unwrap();
        let config = Path::new("config.json");
        fs::copy(dir.path().join(config), other.path().join(config)).unwrap();
        // In reverse order, with every expert in two files, and without stamps.
        let mut halves = [vec![], vec![]];
        for (i, tensor) in tensors(dir.path()).into_iter().rev().enumerate() {
            halves[i % 2].push(tensor);
        }
        for (i, tensors) in halves.into_iter().enumerate() {
            let path = other.path().join(format!("part-{i}.safetensors"));
            Shard { tensors }.write(&path);
        }
        assert_eq!(score(&[other.path().into()], &ids, &[]), before, "{name}");
    }
}

#[test]
fn experts_are_whole_in_a_shard_and_contiguous() {
    for name in ["bf16-shared", "f16-fused-pattern"] {
        let (dir, said) = converted(&Saved::named(name).dirs, &["--shard-size", "20KiB"]);
        let shards = shards(dir.path());
        assert_eq!(said["shards"], shards.len());
        assert!(shards.len() > 3);
        let sizes = shards.iter().map(|path| fs::metadata(path).unwrap().len());
        assert_eq!(said["bytes_out"], sizes.sum::<u64>());
        let mut experts = 0;
        for path in shards {
            let file = fs::read(path).unwrap();
            let (header, data) = split(&file);
            assert_eq!((8 + header.len()) % 4096, 0);
            assert!(data.len() < 20 << 10);
            let header: Value = serde_json::from_slice(header).unwrap();
            let mut places: Vec<(u64, u64, &str)> = (header.as_object().unwrap().iter())
                .filter(|(name, _)| *name != "__metadata__")
                .map(|(name, entry)| {
                    let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap();
                    (at(0), at(1), name.as_str())
                })
                .collect();
            places.sort();
            // Experts first, each with its three matrices behind their scales.
            let expert = |(.., name): &&(u64, u64, &str)| name.contains(".mlp.experts.");
            let first: Vec<_> = places.iter().take_while(expert).collect();
            assert_eq!(first.len(), places.iter().filter(expert).count());
            for six in first.chunks(6) {
                let (prefix, _) = six[0].2.rsplit_once(".gate_proj").unwrap();
                let order = ["gate", "up", "down"]
                    .map(|part| format!("{prefix}.{part}_proj.weight"))
                    .map(|name| [format!("{name}.qs"), name])
                    .concat();
                assert_eq!(six.iter().map(|p| p.2).collect::<Vec<_>>(), order);
                assert!(six.windows(2).all(|pair| pair[0].1 == pair[1].0));
                experts += 1;
            }
        }
        assert_eq!(experts, 9 * if name == "bf16-shared" { 4 } else { 3 });
    }
}

#[test]
fn inspect_counts_what_convert_counted() {
    for model in common::all().into_iter().filter(is_convertible) {
        for recipe in [&[][..], &KEEP] {
            let (dir, said) = converted(&model.dirs, recipe);
            let inspect =
                |dirs: &[PathBuf]| json_of(&finish(on_model("inspect", dirs, &["--json"])));
            let (source, made) = (inspect(&model.dirs), inspect(&[dir.path().into()]));
            let name = &model.name;
            assert_eq!(said["bytes_in"], source["bytes"], "{name}");
            assert_eq!(said["bytes_out"], made["file_bytes"], "{name}");
            assert_eq!(said["formats"], made["formats"], "{name}");
            let formats = made["formats"].as_object().unwrap();
            let sum = |what: &str| -> u64 {
                let counts = formats.values().map(|count| count[what].as_u64().unwrap());
                counts.sum()
            };
            assert_eq!(made["bytes"], sum("bytes"), "{name}");
            let scales = made["scales"].as_u64().unwrap();
            assert_eq!(made["tensors"], sum("tensors") + scales, "{name}");
        }
    }
}

#[test]
fn a_dry_run_says_the_sizes_and_writes_nothing() {
    let model = Saved::named("fp8-block");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("new/container");
    let dry = json_of(&finish(convert(
        &model.dirs,
        &out,
        &["--dry-run", "--json"],
    )));
    assert!(!out.exists() && dry["dry_run"] == true);
    let said = json_of(&finish(convert(&model.dirs, &out, &["--json"])));
    for key in [
        "bytes_in",
        "bytes_out",
        "shards",
        "formats",
        "bytes_to_read",
    ] {
        assert_eq!(dry[key], said[key], "{key}");
    }
    // Other files are copied, and a second run does nothing.
    let tiny = Saved::named("tiny-text");
    let (dir, _) = converted(&tiny.dirs, &[]);
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        let read = |dir: &Path| fs::read(dir.join(file)).unwrap();
        assert_eq!(read(dir.path()), read(&tiny.dirs[0]));
    }
    let again = json_of(&finish(convert(&tiny.dirs, dir.path(), &["--json"])));
    assert_eq!(again["finished_before"], again["shards"]);
    assert_eq!(again["bytes_to_read"], 0);
}

#[test]
fn what_could_not_be_read_back_is_refused() {
    // 45 columns in groups of 15 have 3 scales, which readers take for groups of 16.
    let model = Saved::named("bf16-shared");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let error = error_of(&finish(convert(
        &model.dirs,
        &out,
        &["--experts", "int4-g15"],
    )));
    for part in [
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "45 columns",
        "int4-g15",
        "int4-g16",
        "int4-g64",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!out.exists());
    // A NaN weight.
    let broken = Broken::copy("bf16-shared");
    let name = "model.layers.1.mlp.experts.3.up_proj.weight";
    broken.change(name, |tensors, at| {
        tensors[at].data[2 * 50..][..2].copy_from_slice(&[0xc0, 0x7f])
    });
    let error = error_of(&finish(convert(&[broken.path().into()], &out, &[])));
    assert!(
        error.contains(name) && error.contains("row 1, column 5 is NaN"),
        "{error}"
    );
    assert!(shards(&out).is_empty());
}

#[test]
fn an_incomplete_or_ill_fitting_checkpoint_is_refused() {
    let out = tempfile::tempdir().unwrap();
    let missing = Broken::copy("bf16-shared");
    let name = "model.layers.2.mlp.experts.7.down_proj.weight";
    missing.change(name, |tensors, at| drop(tensors.remove(at)));
    let error = error_of(&finish(convert(&[missing.path().into()], out.path(), &[])));
    assert!(error.contains(name), "{error}");
    let other = Broken::copy("bf16-shared");
    let name = "model.layers.0.self_attn.o_proj.weight";
    other.change(name, |tensors, at| tensors[at].shape.reverse());
    let error = error_of(&finish(convert(&[other.path().into()], out.path(), &[])));
    assert!(error.contains(name) && error.contains("shape"), "{error}");
}

#[test]
fn packed_matrices_are_rounded_again_only_with_a_warning() {
    let model = Saved::named("int8-row");
    let out = tempfile::tempdir().unwrap();
    let output = finish(convert(&model.dirs, out.path(), &["--embed", "keep"]));
    assert!(output.status.success());
    assert!(
        stderr(&output).contains("rounded a second time"),
        "{}",
        stderr(&output)
    );
    let ids = model.ids("/score/ids");
    assert_eq!(
        score(&[out.path().into()], &ids, &[])["argmax"]
            .as_array()
            .unwrap()
            .len(),
        ids.len()
    );
}

/// A flag quantises as `convert` does: for each number of bits, `flag bits` on the model equals `recipe` of its format.
fn bits_are_what_convert_writes(name: &str, flag: &str, recipe: impl Fn(&str) -> Vec<&str>) {
    let model = Saved::named(name);
    let ids = model.ids("/prompt_ids");
    let packed = name == "int4-row";
    for (bits, format) in [("8", "int8"), ("4", "int4-g64"), ("2", "int2")] {
        // Packed weights are unchanged.
        let recipe = if packed {
            KEEP.to_vec()
        } else {
            recipe(format)
        };
        let (dir, _) = converted(&model.dirs, &recipe);
        let rounded = score(&model.dirs, &ids, &[flag, bits]);
        let container = score(&[dir.path().into()], &ids, &[]);
        assert_eq!(rounded, container, "{name} {flag} {bits}");
        if !packed {
            assert_ne!(
                rounded,
                score(&model.dirs, &ids, &[]),
                "{name} {flag} {bits}"
            );
        }
    }
}

#[test]
fn dense_bits_at_load_are_what_convert_writes() {
    for name in [
        "bf16-shared",
        "fp8-block",
        "f32-fused-freq-tied",
        "mixed-mtp",
        "int4-row",
    ] {
        bits_are_what_convert_writes(name, "--dense-bits", |format| {
            vec!["--experts", "keep", "--dense", format, "--embed", "int8"]
        });
    }
}

#[test]
fn expert_bits_are_what_convert_writes() {
    for name in [
        "bf16-shared",
        "fp8-block",
        "f32-fused-freq-tied",
        "f16-crossing",
        "int4-row",
    ] {
        bits_are_what_convert_writes(name, "--expert-bits", |format| {
            [&["--experts", format], &KEEP[2..]].concat()
        });
    }
}

#[test]
fn an_expert_that_cannot_be_rounded_is_named() {
    let model = Broken::copy("bf16-shared");
    let name = "model.layers.1.mlp.experts.0.up_proj.weight";
    // The second weight becomes a NaN of bfloat16.
    model.change(name, |tensors, at| {
        tensors[at].data[2..4].copy_from_slice(&0x7fc0u16.to_le_bytes());
    });
    let ids = list(&(0..40).collect::<Vec<u32>>());
    let args = ["--ids", &ids, "--expert-bits", "4"];
    let error = error_of(&finish(model.run("score", &args)));
    assert!(error.contains(name), "{error}");
    assert!(error.contains("row 0, column 1 is NaN"), "{error}");
}

#[test]
fn a_plan_that_dense_bits_would_make_fit_says_so() {
    let dir = tempfile::tempdir().unwrap();
    // 76 MiB of resident weights, of which 4 bits leave 23.
    let mut synth = colibri();
    synth.arg("synth").arg(dir.path()).arg("--sparse");
    synth.args(["--dense-format", "bf16", "--layers", "3"]);
    synth.args(["--vocab", "512", "--routed-experts", "8"]);
    assert!(finish(synth).status.success());
    let model = [dir.path().to_path_buf()];
    let run = |ram: &str, more: &[&str]| {
        let args = ["--prompt-ids", "3,4", "-n", "3", "--cache-slots", "0"];
        let args = [&args[..], &["--json", "--ram", ram], more].concat();
        finish(on_model("decode", &model, &args))
    };
    let error = error_of(&run("100MiB", &[]));
    assert!(
        error.contains("give --dense-bits 4, with which it fits"),
        "{error}"
    );
    let error = error_of(&run("60MiB", &[]));
    assert!(!error.contains("--dense-bits"), "{error}");
    let fits = json_of(&run("100MiB", &["--dense-bits", "4"]));
    let peak = fits["stats"]["peak_rss_bytes"].as_u64().unwrap();
    assert!(peak <= 100 << 20, "{peak}");
}

#[test]
fn weights_that_are_no_numbers_are_refused_everywhere() {
    for (model, name, nan) in [
        ("bf16-shared", "model.norm.weight", &[0xc0, 0x7f][..]),
        (
            "bf16-shared",
            "model.layers.1.mlp.gate.weight",
            &[0x80, 0x7f],
        ),
        (
            "f32-fused-freq-tied",
            "model.norm.weight",
            &[0, 0, 0xc0, 0x7f],
        ),
    ] {
        let broken = Broken::copy(model);
        broken.change(name, |tensors, at| {
            tensors[at].data[nan.len()..][..nan.len()].copy_from_slice(nan)
        });
        let out = tempfile::tempdir().unwrap();
        let error = error_of(&finish(convert(&[broken.path().into()], out.path(), &[])));
        for part in [name, "row 0, column 1", ".safetensors: ", "fetch it again"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn the_reason_of_a_refusal_is_said_once() {
    let model = Saved::named("bf16-shared");
    let out = tempfile::tempdir().unwrap();
    let run = convert(&model.dirs, out.path(), &["--experts", "int4-g7"]);
    let error = error_of(&finish(run));
    assert_eq!(error.matches("7 scales a row").count(), 1, "{error}");
}
