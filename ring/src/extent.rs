//! Byte ranges of files -> aligned spans with a place in a slab -> chunks. Pure functions.
//!
//! Tensor offsets are not aligned, O_DIRECT reads must be. So each wanted [`Range`] is widened to the
//! alignment, ranges that then touch are read as one [`Span`], and a span is cut into [`Chunk`]s, the unit
//! that is handed to a drive.

/// A slab has at most this many parts.
pub const PARTS: usize = 2;

/// Wanted bytes of a file. They count towards one part of the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Index of the file in the engine's list.
    pub file: u32,
    /// First byte.
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
    pub at: u64,
}

/// Where everything of one slab is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The wanted ranges, as given.
    pub ranges: Vec<Range>,
    /// For each range, the offset of its first byte in the slab.
    pub places: Vec<u64>,
    /// The aligned runs to read.
    pub spans: Vec<Span>,
    /// Bytes of slab needed: the sum of the spans.
    pub footprint: u64,
}

/// A wanted range that no read can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte range {offset}+{len} does not fit into a file")]
pub struct RangeError {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
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
    pub at: u64,
    /// How many wanted bytes of each part it carries.
    pub payload: [u64; PARTS],
}

impl Chunk {
    /// The first part that it carries bytes of: chunks are read in this order.
    fn first_part(&self) -> usize {
        self.payload.iter().position(|&n| n > 0).unwrap_or(PARTS)
    }
}

impl Layout {
    /// Lays ranges out in a slab. `align` is a power of two that suits every file of the ranges.
    ///
    /// # Errors
    /// [`RangeError`] where a range reaches beyond what a file offset can express.
    pub fn new(ranges: &[Range], align: u64) -> Result<Layout, RangeError> {
        debug_assert!(align.is_power_of_two());
        let mut order: Vec<usize> = (0..ranges.len()).filter(|&i| ranges[i].len > 0).collect();
        order.sort_by_key(|&i| (ranges[i].file, ranges[i].offset));

        let mut spans: Vec<Span> = Vec::new();
        let mut places = vec![0; ranges.len()];
        let mut footprint = 0u64;
        for i in order {
            let Range {
                file, offset, len, ..
            } = ranges[i];
            let refused = RangeError { offset, len };
            let start = offset & !(align - 1);
            let end = (offset.checked_add(len))
                .and_then(|end| end.checked_next_multiple_of(align))
                .filter(|&end| end <= i64::MAX as u64)
                .ok_or(refused)?;
            match spans.last_mut() {
                Some(last) if last.file == file && start <= last.offset + last.len => {
                    let grown = end.max(last.offset + last.len) - last.offset;
                    footprint += grown - last.len;
                    last.len = grown;
                }
                _ => {
                    let at = footprint;
                    footprint = footprint.checked_add(end - start).ok_or(refused)?;
                    spans.push(Span {
                        file,
                        offset: start,
                        len: end - start,
                        at,
                    });
                }
            }
            let span = spans.last().expect("one was just pushed or grown");
            places[i] = span.at + (offset - span.offset);
        }
        Ok(Layout {
            ranges: ranges.to_vec(),
            places,
            spans,
            footprint,
        })
    }

    /// Wanted bytes of each part.
    pub fn payload(&self) -> [u64; PARTS] {
        let mut bytes = [0; PARTS];
        for range in &self.ranges {
            bytes[range.part as usize] += range.len;
        }
        bytes
    }

    /// Cuts the spans into chunks of at most about `chunk` bytes (equal pieces rather than a short rest),
    /// in the order in which they should be read: lower parts first.
    pub fn chunks(&self, chunk: u64, align: u64) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        for span in &self.spans {
            let pieces = span.len.div_ceil(chunk.max(align));
            let piece = span.len.div_ceil(pieces).next_multiple_of(align);
            let mut done = 0;
            while done < span.len {
                let len = piece.min(span.len - done);
                let offset = span.offset + done;
                let payload = self.payload_within(span.file, offset, len);
                chunks.push(Chunk {
                    file: span.file,
                    offset,
                    len,
                    at: span.at + done,
                    payload,
                });
                done += len;
            }
        }
        chunks.sort_by_key(Chunk::first_part);
        chunks
    }

    /// Wanted bytes of each part inside `len` bytes of a file from `offset` on.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
        let layout = Layout::new(&ranges, 512).unwrap();
        assert_eq!(
            layout.spans,
            [Span {
                file: 0,
                offset: 0,
                len: 3584,
                at: 0
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
        let layout = Layout::new(&ranges, 4096).unwrap();
        assert_eq!(
            layout.spans,
            [
                Span {
                    file: 0,
                    offset: 0,
                    len: 12_288,
                    at: 0
                },
                Span {
                    file: 1,
                    offset: 8192,
                    len: 4096,
                    at: 12_288
                },
            ],
            "the first two touch after widening to the alignment"
        );
        assert_eq!(layout.places, [12_288 + 1808, 8191, 0]);
    }

    #[test]
    fn lower_parts_are_read_first() {
        let ranges = [range(0, 8192, 8192, 0), range(0, 0, 8192, 1)];
        let chunks = Layout::new(&ranges, 4096).unwrap().chunks(4096, 4096);
        let offsets: Vec<u64> = chunks.iter().map(|c| c.offset).collect();
        assert_eq!(offsets, [8192, 12_288, 0, 4096]);
    }

    #[test]
    fn a_span_is_cut_into_equal_pieces() {
        let chunks = Layout::new(&[range(0, 0, 9 * 4096, 0)], 4096)
            .unwrap()
            .chunks(4 * 4096, 4096);
        assert_eq!(
            chunks.iter().map(|c| c.len / 4096).collect::<Vec<_>>(),
            [3, 3, 3]
        );
    }

    #[test]
    fn ranges_beyond_any_file_are_refused() {
        for (offset, len) in [
            (u64::MAX, 1),
            (u64::MAX - 10, 100),
            (1, u64::MAX),
            (i64::MAX as u64, 2),
        ] {
            assert!(Layout::new(&[range(0, offset, len, 0)], 4096).is_err());
        }
    }

    proptest! {
        /// Chunks read every wanted byte exactly once, at the place the layout promises, and stay in the slab.
        #[test]
        fn chunks_cover_the_ranges(
            ranges in prop::collection::vec((0u32..3, 0u64..200_000, 0u64..50_000, 0u8..2), 0..7),
            chunk in 1u64..100_000,
            align in prop::sample::select(vec![512u64, 4096]),
        ) {
            let ranges: Vec<Range> = ranges.into_iter().map(|(f, o, l, p)| range(f, o, l, p)).collect();
            let layout = Layout::new(&ranges, align).unwrap();
            let chunks = layout.chunks(chunk, align);
            let mut in_slab = std::collections::HashMap::new();
            for c in &chunks {
                prop_assert_eq!((c.offset % align, c.len % align, c.at % align), (0, 0, 0));
                prop_assert!(c.at + c.len <= layout.footprint);
                for b in (0..c.len).step_by(512) {
                    let twice = in_slab.insert(c.at + b, (c.file, c.offset + b));
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
            prop_assert_eq!(payload, layout.payload());
            prop_assert!(chunks.is_sorted_by_key(Chunk::first_part));
        }
    }
}
