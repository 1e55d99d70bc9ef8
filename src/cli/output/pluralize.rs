//! Formats counts: `1 shard`, `2 shards`.

use std::fmt::Display;

/// Formats `n` with the noun `thing`, plural unless `n` is 1.
pub fn pluralize<N: Display + PartialEq + From<u8>>(n: N, thing: &str) -> String {
    match n == N::from(1) {
        true => format!("{n} {thing}"),
        false => format!("{n} {thing}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_not_several() {
        assert_eq!(pluralize(0_usize, "shard"), "0 shards");
        assert_eq!(pluralize(1_u64, "shard"), "1 shard");
        assert_eq!(pluralize(2_u32, "shard"), "2 shards");
        assert_eq!(pluralize(1_usize, "token id"), "1 token id");
    }
}
