//! Reads valid shards.

use colibri_ring::EngineKind;
use colibri_uring::shards::{Cache, Dtype, ShardError, Shards};
use half::{bf16, f16};

use crate::files::{Dir, entry};

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

#[test]
fn all_halves_convert_exactly() {
    let bits: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let dir = Dir::new();
    let (n, len) = (1 << 16, bits.len() as u64);
    dir.shard(
        "a.safetensors",
        &[
            entry("half", "F16", &[n], 0, len),
            entry("brain", "BF16", &[16, n / 16], len, 2 * len),
        ],
        &bits.repeat(2),
    );
    let shards = Shards::open(&dir.dirs()).unwrap();
    let half = shards.read_f32("half", Cache::Keep).unwrap();
    let brain = shards.read_f32("brain", Cache::Drop).unwrap();
    assert_eq!((half.len(), brain.len()), (1 << 16, 1 << 16));
    for i in 0..=u16::MAX {
        assert!(same(half[i as usize], f16::from_bits(i).to_f32()));
        assert!(same(brain[i as usize], bf16::from_bits(i).to_f32()));
    }
    // A few by hand: one, the smallest subnormal, infinity.
    assert_eq!(half[0x3c00], 1.0);
    assert_eq!(half[1], 2f32.powi(-24));
    assert_eq!(half[0x7c00], f32::INFINITY);
    assert_eq!(brain[0x3f80], 1.0);
    assert_eq!(brain[1].to_bits(), 1 << 16);
    assert_eq!(brain[0xff80], f32::NEG_INFINITY);
    let slice = shards.read_slice_f32("half", 0x3c00, 3, Cache::Keep);
    assert_eq!(slice.unwrap(), half[0x3c00..0x3c03]);
}

#[test]
fn f32_keeps_its_bits() {
    let values = [
        0.0,
        -0.0,
        f32::MIN_POSITIVE / 2.0,
        f32::from_bits(1),
        f32::MAX,
        f32::NEG_INFINITY,
        f32::from_bits(0x7fa0_0001),
    ];
    let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let dir = Dir::new();
    // Three bytes of padding: data needs no alignment.
    dir.shard(
        "a.safetensors",
        &[
            entry("pad", "U8", &[3], 0, 3),
            entry("t", "F32", &[7], 3, 31),
        ],
        &[&[0; 3][..], &data].concat(),
    );
    for engine in [EngineKind::Auto, EngineKind::Pread] {
        let shards = Shards::open_with(&dir.dirs(), &[], engine).unwrap();
        let read = shards.read_f32("t", Cache::Keep).unwrap();
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&read), bits(&values));
        assert_eq!(shards.read_raw("t", Cache::Drop).unwrap(), data);
    }
}

#[test]
fn every_dtype_is_indexed_and_read_raw_and_only_floats_as_floats() {
    let aliases = ["F8_E4M3FN", "float8_e4m3fn", "F8_E8M0FNU"];
    let names = Dtype::ALL.iter().map(|d| d.name()).chain(aliases);
    let (mut entries, mut end) = (Vec::new(), 0);
    for name in names.clone() {
        let bytes = Dtype::parse(name).unwrap().bytes(8).unwrap();
        entries.push(entry(&format!("t.{name}"), name, &[2, 4], end, end + bytes));
        end += bytes;
    }
    let data: Vec<u8> = (0..end).map(|i| i as u8).collect();
    let dir = Dir::new();
    dir.shard("a.safetensors", &entries, &data);
    let shards = Shards::open(&dir.dirs()).unwrap();
    let mut at = 0;
    for name in names {
        let tensor = shards.get(&format!("t.{name}")).unwrap();
        let dtype = Dtype::parse(name).unwrap();
        assert_eq!(
            (tensor.dtype, tensor.shape, tensor.elements()),
            (dtype, &[2, 4][..], 8)
        );
        let raw = shards.read_raw(tensor.name, Cache::Keep).unwrap();
        assert_eq!(raw, data[at..at + dtype.bytes(8).unwrap() as usize]);
        at += raw.len();

        let floats = shards.read_f32(tensor.name, Cache::Keep);
        let slice = shards.read_slice_f32(tensor.name, 0, 1, Cache::Keep);
        if matches!(dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32) {
            assert!(same(floats.unwrap()[0], slice.unwrap()[0]));
        } else {
            for error in [floats.unwrap_err(), slice.unwrap_err()] {
                let text = error.to_string();
                assert!(text.contains(tensor.name) && text.contains(dtype.name()));
                assert!(matches!(error, ShardError::NotFloat { .. }));
            }
        }
    }
}

#[test]
fn empty_tensors_and_scalars() {
    let dir = Dir::new();
    dir.shard(
        "a.safetensors",
        &[
            entry("none", "F32", &[0, 5], 0, 0),
            entry("scalar", "F32", &[], 0, 4),
            entry("last", "I64", &[3, 0], 4, 4),
        ],
        &2.5f32.to_le_bytes(),
    );
    dir.shard("empty.safetensors", &[], &[]);
    let shards = Shards::open(&dir.dirs()).unwrap();
    assert_eq!(shards.len(), 3);
    assert!(shards.read_f32("none", Cache::Drop).unwrap().is_empty());
    assert!(shards.read_raw("last", Cache::Drop).unwrap().is_empty());
    assert_eq!(shards.read_f32("scalar", Cache::Keep).unwrap(), [2.5]);
    shards.prefetch("none").unwrap();
    let none = shards.read_slice_f32("none", 0, 0, Cache::Keep);
    assert!(none.unwrap().is_empty());
}

#[test]
fn metadata_is_kept_and_padding_and_new_fields_are_no_error() {
    let dir = Dir::new();
    let header = r#"{"t":{"shape":[1],"new":{"x":[1]},"data_offsets":[0,1],"dtype":"U8"},
        "__metadata__":{"format":"pt"}}      "#;
    dir.shard_of("a.safetensors", header, &[9]);
    dir.shard_of("b.safetensors", r#"{"__metadata__":null}"#, &[]);
    let shards = Shards::open(&dir.dirs()).unwrap();
    assert_eq!(shards.metadata(0)["format"], "pt");
    assert!(shards.metadata(1).is_empty());
    assert_eq!(shards.read_raw("t", Cache::Keep).unwrap(), [9]);
}

#[test]
fn slices_far_into_a_large_tensor() {
    let dir = Dir::new();
    let elements = 2 << 30;
    let at = 3 << 30;
    let ones: Vec<u8> = (0..1 << 20)
        .flat_map(|i| f16::from_f32((i % 1000) as f32).to_le_bytes())
        .collect();
    // The last two elements as well, beyond 4 GiB - 4.
    let end = 2 * elements;
    dir.sparse(
        "a.safetensors",
        "F16",
        elements,
        end,
        &[(at, &ones), (end - 4, &ones[2..6])],
    );
    let shards = Shards::open(&dir.dirs()).unwrap();
    shards.prefetch("t").unwrap();
    let (first, count) = (at / 2 - 5, (1 << 20) + 10);
    for cache in [Cache::Keep, Cache::Drop, Cache::Keep] {
        let read = shards.read_slice_f32("t", first, count, cache).unwrap();
        let want = (0..count).map(|i| match i {
            5..1_048_581 => ((i - 5) % 1000) as f32,
            _ => 0.0,
        });
        assert!(read.into_iter().eq(want));
        let last = shards.read_slice_f32("t", elements - 2, 2, cache).unwrap();
        assert_eq!(last, [1.0, 2.0]);
    }
}

#[test]
fn a_file_that_shrank_after_it_was_indexed() {
    let dir = Dir::new();
    dir.shard("a.safetensors", &[entry("t", "F32", &[4], 0, 16)], &[0; 16]);
    let shards = Shards::open(&dir.dirs()).unwrap();
    std::fs::write(dir.path().join("a.safetensors"), [0; 9]).unwrap();
    for error in [
        shards.read_f32("t", Cache::Keep).unwrap_err(),
        shards.read_raw("t", Cache::Keep).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(text.contains("tensor t") && text.contains("a.safetensors"));
        assert!(matches!(error, ShardError::Read { .. }));
    }
}
