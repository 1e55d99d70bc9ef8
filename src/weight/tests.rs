//! Containers that are not what they seem: each is refused with the tensor's name.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};

use super::*;
use crate::arch::tests::example;
use crate::arch::{Attention, Part, TensorId};
use crate::quant::Format;
use crate::shards::Shards;

const NAME: &str = "model.layers.0.mlp.up_proj.weight";
/// The matrix is [ROWS, COLS], in groups of 64 the last of which is short.
const ROWS: usize = 6;
const COLS: usize = 96;

/// A shard being put together.
struct Shard {
    tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
    metadata: HashMap<String, String>,
}

impl Shard {
    /// The matrix as bytes and scales.
    fn packed(weights: usize, scales: usize) -> Shard {
        let scales: Vec<u8> = vec![1.5f32; scales]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        Shard {
            tensors: vec![
                (NAME.into(), Dtype::U8, vec![weights], vec![0x9a; weights]),
                (
                    format!("{NAME}.qs"),
                    Dtype::F32,
                    vec![scales.len() / 4],
                    scales,
                ),
            ],
            metadata: HashMap::new(),
        }
    }

    fn grouped() -> Shard {
        Shard::packed(ROWS * COLS / 2, ROWS * 2)
    }

    fn stamped(mut self, stamps: &str) -> Shard {
        self.metadata.insert("colibri.fmt".into(), stamps.into());
        self
    }

    fn load(self) -> Result<(Format, Vec<u8>), String> {
        let dir = tempfile::tempdir().unwrap();
        let views = self.tensors.iter().map(|(name, dtype, shape, bytes)| {
            let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
            (name.clone(), view)
        });
        let path = dir.path().join("model.safetensors");
        safetensors::serialize_to_file(views, Some(self.metadata), &path).unwrap();
        let shards = Shards::open(&[dir.path().to_path_buf()]).unwrap();
        let load = || {
            let mut arch = example();
            (arch.intermediate_size, arch.hidden_size) = (ROWS, COLS);
            let mut loader = Loader::new(&shards, &arch)?;
            let weight = loader.matrix(TensorId::Layer(0, Part::Up))?;
            loader.finish(true, &|_, _| {})?;
            Ok::<_, WeightError>(weight)
        };
        let weight = load().map_err(|e| without(&path, &e.to_string()))?;
        Ok((weight.format, weight.matrix().scales().to_vec()))
    }

    fn error(self) -> String {
        self.load().unwrap_err()
    }
}

/// An error without the path of the file, which it names: that of its directory, where a tensor is missing.
fn without(path: &Path, error: &str) -> String {
    assert!(
        error.contains(path.parent().unwrap().to_str().unwrap()),
        "{error}"
    );
    error.replacen(&format!("{}: tensor ", path.display()), "tensor ", 1)
}

fn stamp(format: &str) -> String {
    format!(r#"{{"{NAME}": "{format}", "other": "int8-row"}}"#)
}

#[test]
fn what_is_right_loads() {
    let (format, scales) = Shard::grouped().load().unwrap();
    assert_eq!(
        (format, scales.len()),
        (Format::Int4Group(64), 4 * ROWS * 2)
    );
    let stamped = Shard::grouped().stamped(&stamp("int4-grouped"));
    assert_eq!(stamped.load().unwrap().0, Format::Int4Group(64));
    let int8 = Shard::packed(ROWS * COLS, ROWS).load().unwrap();
    assert_eq!(int8.0, Format::Int8Row);
}

#[test]
fn sizes_that_are_off_by_one_are_refused() {
    for (weights, scales) in [
        (ROWS * COLS / 2 - 1, ROWS * 2),
        (ROWS * COLS / 2 + 1, ROWS * 2),
        (ROWS * COLS / 2, ROWS * 2 + 1),
        (ROWS * COLS / 2, ROWS * 2 - 1),
        (ROWS * COLS, ROWS + 1),
    ] {
        assert_eq!(
            Shard::packed(weights, scales).error(),
            format!(
                "tensor {NAME}: {weights} bytes and {scales} scales are no known format of a matrix [6, 96]"
            )
        );
    }
}

#[test]
fn groups_that_no_rule_gives_are_refused() {
    assert_eq!(
        Shard::packed(ROWS * COLS / 2, ROWS * 5).error(),
        format!(
            "tensor {NAME}: 5 scales a row cannot be groups of 96 columns: \
             neither a power of two nor an exact division gives that number"
        )
    );
}

#[test]
fn stamps_that_contradict_the_bytes_are_refused() {
    for (claimed, message) in [
        ("int8-row", "but its sizes are those of int4-g64"),
        ("int4-row", "but its sizes are those of int4-g64"),
        ("fp8-e4m3-b128", "which are never FP8"),
        ("int3-g64", "its format int3-g64 is not supported"),
        (
            "int4-rans256-g0",
            "its format int4-rans256-g0 is not supported",
        ),
        ("int5", "unknown format \"int5\""),
    ] {
        let error = Shard::grouped().stamped(&stamp(claimed)).error();
        assert!(error.contains(NAME) && error.contains(message), "{error}");
    }
    let error = Shard::grouped().stamped("[1]").error();
    assert!(
        error.contains("model.safetensors: the metadata colibri.fmt is malformed"),
        "{error}"
    );
}

#[test]
fn scales_that_are_no_numbers_are_refused() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut shard = Shard::grouped();
        shard.tensors[1].3[4 * 7..4 * 8].copy_from_slice(&bad.to_le_bytes());
        assert_eq!(shard.error(), format!("tensor {NAME}.qs: scale 7 is {bad}"));
    }
}

#[test]
fn norms_biases_and_routers_that_are_no_numbers_are_refused() {
    let mut arch = example();
    (arch.experts.count, arch.hidden_size) = (2, 2);
    let norm = TensorId::Layer(0, Part::QueryNorm);
    let router = TensorId::Layer(0, Part::Router);
    let Attention::Mla(mla) = &mut arch.attention else {
        unreachable!("an example of multi-head latent attention")
    };
    mla.q_rank = Some(4);
    let one = |id, dtype, shape: Vec<usize>, bytes: Vec<u8>| {
        let dir = tempfile::tempdir().unwrap();
        let view = TensorView::new(dtype, shape.clone(), &bytes).unwrap();
        let path = dir.path().join("model.safetensors");
        safetensors::serialize_to_file([(arch.name(id), view)], None, &path).unwrap();
        let shards = Shards::open(&[dir.path().to_path_buf()]).unwrap();
        let load = || {
            let mut loader = Loader::new(&shards, &arch)?;
            match shape[..] {
                [_] => loader.vector(id).map(drop)?,
                _ => loader.matrix(id).map(drop)?,
            }
            loader.finish(true, &|_, _| {}).map(drop)
        };
        load().map_err(|error: WeightError| without(&path, &error.to_string()))
    };
    let halves = |bits: [u16; 4]| bits.iter().flat_map(|b| b.to_le_bytes()).collect();
    for (id, shape) in [(norm, vec![4]), (router, vec![2, 2])] {
        let name = arch.name(id);
        for (dtype, bits) in [
            (Dtype::BF16, [0x3f80, 0, 0x7f80, 0]),
            (Dtype::F16, [0x3c00, 0, 0x7c00, 0]),
        ] {
            let error = one(id, dtype, shape.clone(), halves(bits)).unwrap_err();
            assert_eq!(error, format!("tensor {name}: value 2 is inf"));
        }
        let floats = |third: f32| [1.0, -2.0, third, 4.0].map(f32::to_le_bytes).concat();
        let error = one(id, Dtype::F32, shape.clone(), floats(f32::NAN)).unwrap_err();
        assert_eq!(error, format!("tensor {name}: value 2 is NaN"));
        assert_eq!(one(id, Dtype::F32, shape, floats(3.0)), Ok(()));
    }
}

#[test]
fn tensors_of_other_kinds_are_refused() {
    let mut shard = Shard::grouped();
    shard.tensors.pop();
    let error = shard.error();
    assert!(error.contains(&format!("{NAME}.qs")) && error.contains("missing"));

    let mut shard = Shard::grouped();
    shard.tensors[0].2 = vec![ROWS, COLS / 2];
    let error = shard.error();
    assert!(error.contains("U8 of shape [6, 48]"), "{error}");

    let mut shard = Shard::grouped();
    (shard.tensors[1].1, shard.tensors[1].2) = (Dtype::F16, vec![ROWS * 4]);
    let error = shard.error();
    assert!(error.contains("qs is F16, scales must be F32"), "{error}");

    // A byte of scale for each group of 32.
    let mut shard = Shard::grouped();
    shard.tensors[1] = (
        format!("{NAME}.qs"),
        Dtype::U8,
        vec![ROWS * 3],
        vec![0; ROWS * 3],
    );
    let error = shard.error();
    assert!(error.contains("format mxfp4 is not supported"), "{error}");
}

#[test]
fn fp8_needs_a_scale_for_every_block() {
    let fp8 = |scales: Vec<usize>, dtype| {
        let bytes = scales.iter().product::<usize>() * if dtype == Dtype::F32 { 4 } else { 2 };
        let mut shard = Shard::grouped();
        shard.tensors[0] = (
            NAME.into(),
            Dtype::F8_E4M3,
            vec![ROWS, COLS],
            vec![0x38; ROWS * COLS],
        );
        shard.tensors[1] = (
            format!("{NAME}_scale_inv"),
            dtype,
            scales,
            vec![0x3f; bytes],
        );
        shard
    };
    let right = fp8(vec![1, 1], Dtype::F32);
    assert_eq!(right.load().unwrap().0, Format::Fp8Block);
    let error = fp8(vec![1, 2], Dtype::F32).error();
    assert!(error.contains("scale_inv has shape [1, 2]"), "{error}");
    let halves = fp8(vec![1, 1], Dtype::BF16);
    assert_eq!(halves.load().unwrap().0, Format::Fp8BlockBf16);
    let error = fp8(vec![1, 1], Dtype::F16).error();
    assert!(error.contains("scale_inv is F16"), "{error}");
    let mut none = fp8(vec![1, 1], Dtype::F32);
    none.tensors.pop();
    let error = none.error();
    assert!(error.contains("_scale_inv, which are missing"), "{error}");
    // The scales of a packed tensor do not make it FP8.
    let mut packed = fp8(vec![1, 1], Dtype::F32);
    packed.tensors[0].1 = Dtype::U8;
    assert!(packed.error().contains("U8 of shape"));
}
