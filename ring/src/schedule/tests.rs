//! Fixtures of the scheduler's tests.

mod drives;
mod failures;
mod order;
mod property;

use std::sync::Arc;

use super::*;
use crate::extent::{Layout, Range};
use crate::file::File;
use crate::replica::{DirectMode, Replicas};

const FILE_BYTES: u64 = 300_001;
const NOW: Duration = Duration::ZERO;

/// A file of `sizes.len()` copies.
fn copies(sizes: &[u64]) -> Replicas {
    let copy = |(source, size): (usize, &u64)| Replica::new(Arc::new(File::unread(*size)), source);
    sizes.iter().enumerate().map(copy).collect()
}

/// `files` files of `copies` copies each.
fn files(files: usize, copies_of_each: usize) -> Files {
    let copies = copies(&vec![FILE_BYTES; copies_of_each]);
    Files::new(vec![copies; files], DirectMode::Off).unwrap()
}

fn chunks(ranges: &[(u32, u64, u64, u8)], chunk: u64) -> (Layout, Vec<Chunk>) {
    let ranges: Vec<Range> = ranges
        .iter()
        .map(|&(file, offset, len, part)| Range {
            file,
            offset,
            len,
            part,
        })
        .collect();
    let layout = files(2, 1).layout(&ranges).unwrap();
    let chunks = layout.chunks(chunk);
    (layout, chunks)
}

fn ok(op: Op) -> Completion {
    Completion {
        id: op.id,
        result: Ok(op.len.min(FILE_BYTES - op.offset)),
    }
}

fn failed(op: Op, errno: i32) -> Completion {
    Completion {
        id: op.id,
        result: Err(io::Error::from_raw_os_error(errno)),
    }
}
