//! How many tensors of each format there are, counted in one way wherever they are listed.

use std::collections::BTreeMap;

use serde::Serialize;

/// Tensors and bytes of one format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    /// Matrices, stacks of them, and vectors. Scales belong to what they scale and are none of them.
    pub tensors: u64,
    /// Bytes, scales included.
    pub bytes: u64,
}

/// Tensors and bytes by the name of their format, or of their element type where they have none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Counts(BTreeMap<String, Count>);

impl Counts {
    /// Counts a tensor of `bytes` bytes, with or without those of its scales.
    pub fn tensor(&mut self, format: String, bytes: u64) {
        let count = self.0.entry(format).or_default();
        count.tensors += 1;
        count.bytes += bytes;
    }

    /// Adds the scales of a tensor that is counted on its own.
    pub fn scales(&mut self, format: String, bytes: u64) {
        self.0.entry(format).or_default().bytes += bytes;
    }

    /// Formats and what there is of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Count)> {
        self.0
            .iter()
            .map(|(format, count)| (format.as_str(), *count))
    }
}
