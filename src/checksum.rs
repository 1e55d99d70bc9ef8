//! Compares CRC-32 checksums of files that the program itself writes.
//!
//! A build for fuzzing (`--cfg fuzzing`) takes every checksum for right: a fuzzer cannot guess one, and would test nothing behind it.

/// Whether `bytes` have the checksum `sum`.
pub(crate) fn holds(bytes: &[u8], sum: u32) -> bool {
    same(crc32fast::hash(bytes), sum)
}

/// Whether two checksums are equal.
pub(crate) fn same(a: u32, b: u32) -> bool {
    cfg!(fuzzing) || a == b
}
