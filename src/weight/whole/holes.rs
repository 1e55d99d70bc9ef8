//! Finds weights that were never written: holes of shards read as zeros, and zeros compute without an error.

use std::collections::BTreeMap;

use crate::arch::Architecture;
use crate::shards::{Finding, Kind, Severity, Shards};
use crate::weight::{Role, id_of, role};

/// The tensors that are in holes, except in shards that say that their weights are synthetic. Reads nothing of a shard without holes.
///
/// They are errors, not warnings: a download that stopped, or a copy of one, leaves holes, and the text of such a model looks
/// like text. Zeros that are meant become holes where a tool or a file system compresses them away. They are rows of tokens that the
/// vocabulary does not use, so a sixteenth of the embedding and of the head may be holes.
pub fn holes(shards: &Shards, arch: &Architecture) -> Vec<Finding> {
    let mut found = Vec::new();
    for (file, shard) in shards.files().iter().enumerate() {
        if shards.is_synthetic(file) {
            continue;
        }
        // By offset: the tensor, the first byte of its first hole, and the bytes of all of them.
        let mut tensors = BTreeMap::new();
        for (tensor, hole) in shards.holes(file) {
            let entry = tensors.entry((tensor.offset, tensor.bytes));
            let (_, _, bytes) = entry.or_insert((tensor, hole.start, 0));
            *bytes += hole.end - hole.start;
        }
        for (tensor, start, bytes) in tensors.into_values() {
            let rows = id_of(arch, tensor.name).is_some_and(|id| role(id) == Role::Embedding);
            if rows && bytes <= tensor.bytes / 16 {
                continue;
            }
            let path = shard.path().display().to_string();
            found.push(Finding {
                kind: Kind::Hole,
                severity: Severity::Error,
                tensor: Some(tensor.name.to_owned()),
                problem: format!(
                    "{path}: {bytes} bytes of tensor {} are a hole from byte {start} of the file on, which was never written and reads as zeros",
                    tensor.name
                ),
                file: Some(path),
                remedy: "fetch the file again".into(),
            });
        }
    }
    found
}
