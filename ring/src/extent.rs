//! Lays byte ranges of files out in a slab and cuts them into chunks. Pure functions.
//!
//! Tensor offsets are not aligned, O_DIRECT reads must be. So each [`Range`] is widened to the alignment, ranges that then touch
//! become one [`Span`], and a span is cut into [`Chunk`]s, the unit that a drive gets.

use std::path::{Path, PathBuf};

/// A slab has at most this many parts.
pub const PARTS: usize = 2;

/// Requested bytes of a file. They count towards one part of the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Index of the file in [`Files`](crate::Files).
    pub file: u32,
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// Part of the slab, below [`PARTS`]. Lower parts are read first.
    pub part: u8,
}

/// An aligned run of a file and its place in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of the file.
    pub file: u32,
    /// First byte in the file, aligned.
    pub offset: u64,
    /// Length in bytes, aligned; the last span of a file may reach past its end.
    pub len: u64,
    /// First byte in the slab, aligned.
    pub slab_offset: u64,
}

/// Where each range of a slab lies. Made by [`Files::layout`](crate::Files::layout), which checks every range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    // Private: the engine lends the bytes at `places` as soon as the chunks made of `spans` are complete, so that the two
    // must agree.
    ranges: Vec<Range>,
    places: Vec<u64>,
    spans: Vec<Span>,
    footprint: u64,
    align: u64,
}

/// A range that no read can serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {len} bytes at offset {offset} of {fault}")]
pub struct RangeError {
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// What is wrong with it.
    pub fault: RangeFault,
}

/// What is wrong with a range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeFault {
    /// It ends after the file does.
    #[error("{}: the file has {size} bytes", path.display())]
    PastEnd {
        /// The file.
        path: PathBuf,
        /// Its size in bytes when it was opened.
        size: u64,
    },
    /// The engine has no file with this index.
    #[error("file {0}: there is no file with this index, or no copy of it")]
    NoFile(u32),
    /// A slab has fewer parts.
    #[error("part {0}: a slab has {PARTS} parts")]
    NoPart(u8),
    /// All ranges together are larger than any memory.
    #[error("a slab: all its ranges together are too large")]
    TooLarge,
}

/// One read: an aligned piece of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the file.
    pub file: u32,
    /// First byte in the file, aligned.
    pub offset: u64,
    /// Length in bytes, aligned.
    pub len: u64,
    /// First byte in the slab, aligned.
    pub slab_offset: u64,
    /// Requested bytes of each part in it.
    pub payload: [u64; PARTS],
}

impl Chunk {
    /// The first part that it carries bytes of: chunks are read in this order.
    fn first_part(&self) -> usize {
        self.payload.iter().position(|&n| n > 0).unwrap_or(PARTS)
    }
}

impl Layout {
    /// Lays ranges out in a slab. `align` is a power of two that suits every file. `file` gives path and size of a file.
    pub(crate) fn new<'a>(
        ranges: &[Range],
        align: u64,
        file: impl Fn(u32) -> Option<(&'a Path, u64)>,
    ) -> Result<Layout, RangeError> {
        debug_assert!(align.is_power_of_two());
        for range in ranges {
            check(range, &file).map_err(|fault| range.refused(fault))?;
        }
        let mut order: Vec<usize> = (0..ranges.len()).filter(|&i| ranges[i].len > 0).collect();
        order.sort_by_key(|&i| (ranges[i].file, ranges[i].offset));

        let mut spans: Vec<Span> = Vec::new();
        let mut places = vec![0; ranges.len()];
        let mut footprint = 0u64;
        for i in order {
            let Range { file, offset, .. } = ranges[i];
            let start = offset & !(align - 1);
            // No overflow: it ends inside a file, and no file is larger than i64::MAX.
            let end = ranges[i].end().next_multiple_of(align);
            match spans.last_mut() {
                Some(last) if last.file == file && start <= last.offset + last.len => {
                    let grown = end.max(last.offset + last.len) - last.offset;
                    footprint += grown - last.len;
                    last.len = grown;
                }
                _ => {
                    spans.push(Span {
                        file,
                        offset: start,
                        len: end - start,
                        slab_offset: footprint,
                    });
                    footprint = (footprint.checked_add(end - start))
                        .filter(|bytes| *bytes <= i64::MAX as u64)
                        .ok_or_else(|| ranges[i].refused(RangeFault::TooLarge))?;
                }
            }
            let span = spans.last().expect("one was just pushed or grown");
            places[i] = span.slab_offset + (offset - span.offset);
        }
        Ok(Layout {
            ranges: ranges.to_vec(),
            places,
            spans,
            footprint,
            align,
        })
    }

    /// The ranges, in the order in which they were given.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// For each range, the offset of its first byte in the slab.
    pub fn places(&self) -> &[u64] {
        &self.places
    }

    /// The aligned runs to read.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Bytes of slab that it fills: the sum of the spans.
    pub fn footprint(&self) -> u64 {
        self.footprint
    }

    /// The alignment of its spans in bytes.
    pub fn align(&self) -> u64 {
        self.align
    }

    /// Cuts the spans into chunks of at most about `chunk` bytes (equal pieces rather than a short rest), in the order in which
    /// they are read: lower parts first.
    pub fn chunks(&self, chunk: u64) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        for span in &self.spans {
            let pieces = span.len.div_ceil(chunk.max(self.align));
            let piece = span.len.div_ceil(pieces).next_multiple_of(self.align);
            let mut done = 0;
            while done < span.len {
                let len = piece.min(span.len - done);
                let offset = span.offset + done;
                let payload = self.payload_within(span.file, offset, len);
                chunks.push(Chunk {
                    file: span.file,
                    offset,
                    len,
                    slab_offset: span.slab_offset + done,
                    payload,
                });
                done += len;
            }
        }
        chunks.sort_by_key(Chunk::first_part);
        chunks
    }

    /// Requested bytes of each part inside `len` bytes of a file from `offset` on.
    fn payload_within(&self, file: u32, offset: u64, len: u64) -> [u64; PARTS] {
        let mut bytes = [0; PARTS];
        for range in self.ranges.iter().filter(|r| r.file == file) {
            let start = range.offset.max(offset);
            let end = (range.offset + range.len).min(offset + len);
            bytes[range.part as usize] += end.saturating_sub(start);
        }
        bytes
    }
}

impl Range {
    /// The first byte after it; `u64::MAX` if that is too large for any file.
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    fn refused(&self, fault: RangeFault) -> RangeError {
        RangeError {
            offset: self.offset,
            len: self.len,
            fault,
        }
    }
}

/// Whether a range can be read. An empty range reads nothing, wherever it lies.
fn check<'a>(
    range: &Range,
    file: &impl Fn(u32) -> Option<(&'a Path, u64)>,
) -> Result<(), RangeFault> {
    if usize::from(range.part) >= PARTS {
        return Err(RangeFault::NoPart(range.part));
    }
    if range.len == 0 {
        return Ok(());
    }
    match file(range.file) {
        None => Err(RangeFault::NoFile(range.file)),
        Some((path, size)) if range.end() > size => Err(RangeFault::PastEnd {
            path: path.to_owned(),
            size,
        }),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A layout of files of which each has `i64::MAX` bytes.
    fn layout(ranges: &[Range], align: u64) -> Layout {
        Layout::new(ranges, align, |_| Some((Path::new("a"), i64::MAX as u64))).unwrap()
    }

    fn range(file: u32, offset: u64, len: u64, part: u8) -> Range {
        Range {
            file,
            offset,
            len,
            part,
        }
    }

    #[test]
    fn neighbours_are_one_span() {
        // down, gate, up of an expert as the safetensors library sorts them: one read of 3 tensors.
        let ranges = [
            range(0, 1100, 1000, 0),
            range(0, 2100, 1000, 0),
            range(0, 100, 1000, 1),
        ];
        let layout = layout(&ranges, 512);
        assert_eq!(
            layout.spans,
            [Span {
                file: 0,
                offset: 0,
                len: 3584,
                slab_offset: 0
            }]
        );
        assert_eq!(layout.places, [1100, 2100, 100]);
        assert_eq!(layout.footprint, 3584);
    }

    #[test]
    fn far_ranges_are_packed_side_by_side() {
        let ranges = [
            range(1, 10_000, 100, 0),
            range(0, 8_191, 2, 0),
            range(0, 0, 1, 1),
        ];
        let layout = layout(&ranges, 4096);
        assert_eq!(
            layout.spans,
            [
                Span {
                    file: 0,
                    offset: 0,
                    len: 12_288,
                    slab_offset: 0
                },
                Span {
                    file: 1,
                    offset: 8192,
                    len: 4096,
                    slab_offset: 12_288
                },
            ],
            "the first two touch after widening to the alignment"
        );
        assert_eq!(layout.places, [12_288 + 1808, 8191, 0]);
    }

    #[test]
    fn lower_parts_are_read_first() {
        let ranges = [range(0, 8192, 8192, 0), range(0, 0, 8192, 1)];
        let chunks = layout(&ranges, 4096).chunks(4096);
        let offsets: Vec<u64> = chunks.iter().map(|c| c.offset).collect();
        assert_eq!(offsets, [8192, 12_288, 0, 4096]);
    }

    #[test]
    fn a_span_is_cut_into_equal_pieces() {
        let chunks = layout(&[range(0, 0, 9 * 4096, 0)], 4096).chunks(4 * 4096);
        assert_eq!(
            chunks.iter().map(|c| c.len / 4096).collect::<Vec<_>>(),
            [3, 3, 3]
        );
    }

    #[test]
    fn a_range_that_no_file_has_is_refused_by_name() {
        let fault = |range: Range| {
            let file = |n| (n == 0).then_some((Path::new("shard"), 10_000));
            Layout::new(&[range], 4096, file).map_err(|e| e.to_string())
        };
        assert!(fault(range(0, 9_000, 1_000, 0)).is_ok());
        for (offset, len) in [(9_000, 1_001), (10_001, 1), (u64::MAX, 1), (1, u64::MAX)] {
            let error = fault(range(0, offset, len, 0)).unwrap_err();
            let expected = format!(
                "cannot read {len} bytes at offset {offset} of shard: the file has 10000 bytes"
            );
            assert_eq!(error, expected);
        }
        assert!(fault(range(1, 0, 1, 0)).unwrap_err().contains("file 1"));
        assert!(fault(range(0, 0, 1, 2)).unwrap_err().contains("part 2"));
        assert!(fault(range(7, u64::MAX, 0, 0)).is_ok(), "nothing is read");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 256 }))]

        /// Chunks read every requested byte exactly once, at the place the layout promises, and stay in the slab.
        #[test]
        fn chunks_cover_the_ranges(
            ranges in prop::collection::vec((0u32..3, 0u64..200_000, 0u64..50_000, 0u8..2), 0..7),
            chunk in 1u64..100_000,
            align in prop::sample::select(vec![512u64, 4096]),
        ) {
            let ranges: Vec<Range> = ranges.into_iter().map(|(f, o, l, p)| range(f, o, l, p)).collect();
            let layout = layout(&ranges, align);
            let chunks = layout.chunks(chunk);
            let mut in_slab = std::collections::HashMap::new();
            for c in &chunks {
                prop_assert_eq!((c.offset % align, c.len % align, c.slab_offset % align), (0, 0, 0));
                prop_assert!(c.slab_offset + c.len <= layout.footprint);
                for b in (0..c.len).step_by(512) {
                    let twice = in_slab.insert(c.slab_offset + b, (c.file, c.offset + b));
                    prop_assert!(twice.is_none());
                }
            }
            for (range, place) in ranges.iter().zip(&layout.places) {
                for b in 0..range.len {
                    let place = place + b;
                    let (file, offset) = in_slab[&(place / 512 * 512)];
                    prop_assert_eq!((file, offset + place % 512), (range.file, range.offset + b));
                }
            }
            let mut payload = [0; PARTS];
            for c in &chunks {
                for (sum, part) in payload.iter_mut().zip(c.payload) {
                    *sum += part;
                }
            }
            let mut requested = [0; PARTS];
            ranges.iter().for_each(|range| requested[range.part as usize] += range.len);
            prop_assert_eq!(payload, requested);
            prop_assert!(chunks.is_sorted_by_key(Chunk::first_part));
        }
    }
}
