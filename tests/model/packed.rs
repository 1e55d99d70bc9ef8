//! Containers of packed matrices: experts in fused blocks, scales that are no numbers.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use colibri_uring::model::RunnerOptions;
use colibri_uring::pool::Pool;
use colibri_uring::shards::{Cache, Dtype, Shards};
use safetensors::tensor::TensorView;
use tempfile::TempDir;

use crate::common::Saved;
use crate::fixture::{Fixture, Solo};

/// Dtype, shape and bytes of tensors by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(model: &str) -> Tensors {
    let shards = Shards::open(&Saved::named(model).dirs).unwrap();
    let read = |name: &str| shards.read_raw(name, Cache::Drop).unwrap();
    let shape = |shape: &[u64]| shape.iter().map(|n| *n as usize).collect();
    shards
        .iter()
        .map(|t| (t.name.to_string(), (t.dtype, shape(t.shape), read(t.name))))
        .collect()
}

/// The model `model` with other tensors, in a directory that lives as long as what is returned.
fn with_tensors(model: &str, tensors: &Tensors) -> (TempDir, Fixture) {
    let saved = Saved::named(model);
    let dir = tempfile::tempdir().unwrap();
    let config = Path::new("config.json");
    std::fs::copy(saved.dirs[0].join(config), dir.path().join(config)).unwrap();
    let dtype = |dtype| match dtype {
        Dtype::U8 => safetensors::Dtype::U8,
        Dtype::Bf16 => safetensors::Dtype::BF16,
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::F8E4M3 => safetensors::Dtype::F8_E4M3,
        other => panic!("{other}"),
    };
    let views = tensors.iter().map(|(name, (d, shape, bytes))| {
        (
            name,
            TensorView::new(dtype(*d), shape.clone(), bytes).unwrap(),
        )
    });
    let path = dir.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &path).unwrap();
    let dirs = vec![dir.path().to_path_buf()];
    let fixture = Fixture::open(Saved { dirs, ..saved });
    (dir, fixture)
}

fn logits(fixture: &Fixture) -> Result<Vec<f32>, String> {
    let pool = Arc::new(Pool::new(2));
    let model = fixture.model();
    let mut solo = Solo::new(&model, fixture.store(), &pool, RunnerOptions::default());
    let logits = solo.prefill(&fixture.ids("/prompt_ids"));
    logits.map(<[f32]>::to_vec).map_err(|e| e.to_string())
}

/// Gathers the experts of every layer into fused blocks, the scales too.
fn fuse(tensors: Tensors) -> Tensors {
    let mut fused = Tensors::new();
    // By expert id, gate before up: names as they are would put expert 10 before expert 2.
    let mut experts = BTreeMap::new();
    for (name, tensor) in tensors {
        let Some((layer, rest)) = name.split_once(".mlp.experts.") else {
            fused.insert(name, tensor);
            continue;
        };
        let (expert, rest) = rest.split_once('.').unwrap();
        let (projection, kind) = rest.split_once("_proj.weight").unwrap();
        let block = match projection {
            "down" => "down_proj",
            _ => "gate_up_proj",
        };
        let block = format!("{layer}.mlp.experts.{block}{kind}");
        let key = (
            block,
            expert.parse::<usize>().unwrap(),
            projection.to_string(),
        );
        experts.insert(key, tensor);
    }
    for ((block, _, _), (dtype, _, bytes)) in experts {
        let (_, shape, all) = fused.entry(block).or_insert((dtype, vec![0], Vec::new()));
        all.extend(bytes);
        shape[0] = all.len() / (dtype.bits() as usize / 8);
    }
    fused
}

#[test]
fn fused_blocks_give_the_same_bits() {
    for model in ["int4-row", "int4-odd-groups", "int2-row"] {
        let (_dir, plain) = with_tensors(model, &tensors(model));
        let (_dir2, fused) = with_tensors(model, &fuse(tensors(model)));
        assert!(fused.shards.len() < plain.shards.len());
        let bits = |fixture| -> Vec<u32> {
            let logits = logits(fixture).unwrap();
            logits.iter().map(|x| x.to_bits()).collect()
        };
        assert_eq!(bits(&plain), bits(&fused), "{model}");
    }
}

#[test]
fn an_expert_with_a_bad_scale_is_named() {
    for (model, suffix) in [
        ("int4-grouped", ".up_proj.weight.qs"),
        ("int8-row", ".down_proj.weight.qs"),
        ("fp8-block", ".gate_proj.weight_scale_inv"),
    ] {
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            let mut tensors = tensors(model);
            for (name, (_, _, bytes)) in &mut tensors {
                if name.contains(".mlp.experts.") && name.ends_with(suffix) {
                    let last = bytes.len() - 4;
                    bytes[last..].copy_from_slice(&bad.to_le_bytes());
                }
            }
            let (_dir, fixture) = with_tensors(model, &tensors);
            let error = logits(&fixture).unwrap_err();
            assert!(
                error.contains(".safetensors: tensor model.layers.")
                    && error.contains(".mlp.experts.")
                    && error.contains(&format!("{suffix}, expert "))
                    && error.contains(&format!(" is {bad}; the file is damaged")),
                "{error}"
            );
        }
    }
}
