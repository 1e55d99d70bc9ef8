//! Which shards are read the most.

use crate::shards::Shards;

/// The shards of a model, hottest first, as indices of [`Shards::files`]. Without a history of use it is their own order.
pub fn hotness(shards: &Shards) -> Vec<usize> {
    (0..shards.files().len()).collect()
}
