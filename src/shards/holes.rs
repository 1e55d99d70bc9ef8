//! Finds the holes of files: ranges that were never written, and read as zeros.

use std::ops::Range;

use colibri_ring::File;
use rustix::fs::{SeekFrom, seek};

use super::{Shards, Tensor};

/// Bytes that are read at the beginning, in the middle and at the end of a hole.
const PROBE: u64 = 4096;

/// More holes of a file are not counted: it is refused for the first.
const MOST: usize = 4096;

/// The holes of `file` from byte `from` on. Empty where the file system cannot tell: to it, all of a file is data.
///
/// Some file systems report files as holes that are elsewhere and come when they are read. So a hole counts only where it reads as zeros.
pub(super) fn holes(file: &File, from: u64) -> Vec<Range<u64>> {
    let size = file.size();
    let (mut found, mut at) = (Vec::new(), from);
    while at < size && found.len() < MOST {
        // Reads give their offset, so that the descriptor's own is free.
        let fd = file.buffered_fd();
        let Ok(start) = seek(fd, SeekFrom::Hole(at)) else {
            break;
        };
        if start >= size {
            break;
        }
        // No data after it: it lasts to the end.
        let end = seek(fd, SeekFrom::Data(start)).map_or(size, |end| end.min(size));
        if end <= start {
            break;
        }
        if reads_as_zeros(file, &(start..end)) {
            found.push(start..end);
        }
        at = end;
    }
    found
}

/// Whether the beginning, the middle and the end of a range are zeros. A failing read is not: it is reported when the range is needed.
pub(super) fn reads_as_zeros(file: &File, range: &Range<u64>) -> bool {
    let len = (range.end - range.start).min(PROBE);
    let mut piece = vec![0; len as usize];
    let middle = range.start + (range.end - range.start - len) / 2;
    [range.start, middle, range.end - len]
        .iter()
        .all(|at| file.read_at(&mut piece, *at).is_ok() && piece.iter().all(|byte| *byte == 0))
}

impl Shards {
    /// The tensors of a file that are partly or wholly in holes, with the bytes of the file that are.
    pub fn holes(&self, file: usize) -> Vec<(Tensor<'_>, Range<u64>)> {
        let of_file = self.of_file(file);
        let Some(start) = of_file.iter().map(|entry| entry.offset).min() else {
            return Vec::new();
        };
        let holes = holes(&self.files[file], start);
        if holes.is_empty() {
            return Vec::new();
        }
        let mut found = Vec::new();
        for entry in of_file {
            let (from, to) = (entry.offset, entry.offset + entry.bytes);
            let first = holes.partition_point(|hole| hole.end <= from);
            for hole in holes[first..].iter().take_while(|hole| hole.start < to) {
                found.push((self.tensor(entry), hole.start.max(from)..hole.end.min(to)));
            }
        }
        found
    }
}
