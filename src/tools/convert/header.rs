//! Builds the header of an output shard.

use std::path::Path;

use super::plan::{Item, Output, Shard, is_packed};
use super::{ConvertError, shard_path};
use crate::shards::{Metadata, Planned, SYNTHETIC, shard_header};

/// The tensors of a shard in order, and its metadata.
pub fn tensors(shard: &Shard) -> (Vec<Planned>, Metadata) {
    let outputs = shard.items.iter().flat_map(Item::outputs);
    let mut metadata = Metadata::from([("format".into(), "pt".into())]);
    if let Some(stamp) = stamp(shard) {
        metadata.insert("colibri.fmt".into(), stamp);
    }
    if shard.synthetic {
        metadata.insert(SYNTHETIC.into(), "converted".into());
    }
    (outputs.filter_map(Output::planned).collect(), metadata)
}

/// The first bytes of a shard, up to its data, and the bytes of data.
///
/// # Errors
/// Sizes that no file can have.
pub fn header_of(out: &Path, shard: &Shard) -> Result<(Vec<u8>, u64), ConvertError> {
    let (tensors, metadata) = tensors(shard);
    let path = shard_path(out, &shard.name);
    Ok(shard_header(&path, &tensors, &metadata)?)
}

/// The stamp of a shard: which packed tensor has which format.
fn stamp(shard: &Shard) -> Option<String> {
    let packed = shard.items.iter().filter_map(|item| {
        let format = item.format.filter(|format| is_packed(*format))?;
        Some((item.weights.name.clone(), format.name().into()))
    });
    let map: serde_json::Map<String, serde_json::Value> = packed.collect();
    (!map.is_empty()).then(|| serde_json::Value::from(map).to_string())
}
