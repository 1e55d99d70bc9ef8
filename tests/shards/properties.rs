//! Checks properties of arbitrary headers.

use colibri_uring::shards::{Cache, Dtype, ShardError, Shards};
use proptest::collection::vec;
use proptest::prelude::*;
use safetensors::SafeTensors;

use crate::files::{Dir, entry};

/// Entries whose dtype, shape and offsets are mostly valid.
fn entries() -> impl Strategy<Value = Vec<String>> {
    let dtype = proptest::sample::select(Dtype::ALL);
    let one = (dtype, vec(0..5u64, 0..4), 0..40u64, 0..40u64);
    vec(one, 0..6).prop_map(|tensors| {
        let mut end = 0;
        let mut entries = Vec::new();
        for (i, (dtype, shape, noise, odd)) in tensors.into_iter().enumerate() {
            let bytes = dtype.bytes(shape.iter().product()).unwrap_or(noise);
            let start = if noise == 0 { end + odd } else { end };
            end = start + if odd == 0 { noise } else { bytes };
            let name = if odd == 1 { 0 } else { i };
            entries.push(entry(&format!("t{name}"), dtype.name(), &shape, start, end));
        }
        entries
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    #[test]
    fn arbitrary_bytes_are_an_error_and_no_panic(header in vec(any::<u8>(), 0..200), data in vec(any::<u8>(), 0..20)) {
        let dir = Dir::new();
        dir.shard_of("a.safetensors", header, &data);
        let _ = Shards::open(&dir.dirs());
    }

    #[test]
    fn arbitrary_files_are_an_error_and_no_panic(file in vec(any::<u8>(), 0..40)) {
        let dir = Dir::new();
        std::fs::write(dir.path().join("a.safetensors"), file).unwrap();
        let _ = Shards::open(&dir.dirs());
    }

    #[test]
    fn nearly_json_is_an_error_and_no_panic(text in r#"[\{\}\[\]",:0-9a-z\\_ ]{0,80}"#) {
        let dir = Dir::new();
        dir.shard_of("a.safetensors", text, &[]);
        let _ = Shards::open(&dir.dirs());
    }

    /// Accepts the headers that the safetensors crate accepts, except those with a name given twice.
    #[test]
    fn verdicts_equal_the_safetensors_crates(entries in entries(), data in 0..300usize, exact in any::<bool>()) {
        let dir = Dir::new();
        let ends = entries.iter().filter_map(|e| {
            e.rsplit_once(',')?.1.trim_end_matches("]}").parse::<usize>().ok()
        });
        let data = if exact { ends.max().unwrap_or(0) } else { data };
        dir.shard("a.safetensors", &entries, &vec![0; data]);
        let bytes = std::fs::read(dir.path().join("a.safetensors")).unwrap();
        let theirs = SafeTensors::deserialize(&bytes);
        let ours = Shards::open(&dir.dirs());
        match ours {
            Ok(shards) => {
                let theirs = theirs.unwrap();
                prop_assert_eq!(shards.len(), theirs.len());
                for tensor in shards.iter() {
                    let view = theirs.tensor(tensor.name).unwrap();
                    prop_assert_eq!(view.dtype().to_string(), tensor.dtype.name());
                    prop_assert!(view.shape().iter().map(|d| *d as u64).eq(tensor.shape.iter().copied()));
                    let raw = shards.read_raw(tensor.name, Cache::Keep).unwrap();
                    prop_assert_eq!(raw.len(), view.data().len());
                }
            }
            Err(ShardError::Tensor { flaw: colibri_uring::shards::Flaw::Twice, .. }) => {}
            Err(e) => prop_assert!(theirs.is_err(), "{}", e),
        }
    }

    /// Reads back what the safetensors crate writes.
    #[test]
    fn written_by_the_safetensors_crate(values in vec((vec(0..4usize, 0..3), any::<u8>()), 0..20)) {
        use safetensors::tensor::{Dtype as D, TensorView, serialize};
        let data: Vec<_> = values.iter().enumerate().map(|(i, (shape, byte))| {
            let dtype = [D::F32, D::BF16, D::U8, D::I64][i % 4];
            let n = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (format!("layer.{i}.\"é\""), dtype, shape.clone(), vec![*byte; n])
        }).collect();
        let views = data.iter().map(|(name, dtype, shape, bytes)| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let file = serialize(views, None).unwrap();
        let dir = Dir::new();
        std::fs::write(dir.path().join("a.safetensors"), file).unwrap();
        let shards = Shards::open(&dir.dirs()).unwrap();
        prop_assert_eq!(shards.len(), data.len());
        for (name, dtype, _, bytes) in &data {
            let tensor = shards.get(name).unwrap();
            prop_assert_eq!(tensor.dtype.name(), dtype.to_string());
            prop_assert_eq!(&shards.read_raw(name, Cache::Drop).unwrap(), bytes);
        }
    }

    #[test]
    fn slices_are_inside_or_refused(
        start in prop_oneof![0..20u64, any::<u64>()],
        count in prop_oneof![0..20u64, any::<u64>()],
    ) {
        let dir = Dir::new();
        let values: Vec<f32> = (0..10).map(|i| i as f32).collect();
        let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        dir.shard("a.safetensors", &[entry("t", "F32", &[10], 0, 40)], &data);
        let shards = Shards::open(&dir.dirs()).unwrap();
        let read = shards.read_slice_f32("t", start, count, Cache::Keep);
        match start.checked_add(count) {
            Some(end) if end <= 10 => {
                prop_assert_eq!(read.unwrap(), &values[start as usize..end as usize]);
            }
            _ => {
                let error = read.unwrap_err();
                prop_assert!(error.to_string().contains("tensor t"));
                let refused = matches!(error, ShardError::Slice { elements: 10, .. });
                prop_assert!(refused);
            }
        }
    }
}
