//! Recognises weights that were never written or were overwritten: runs of zeros, scales of 0, values that are no numbers.
//!
//! Some zeros are meant. Rows of an embedding that no token uses are zeros, a pruned row may be, and some converters give a group of
//! zeros the scale 0. So a few zeros pass, and a matrix is refused by how much of it is zero.

use std::ops::Range;

use crate::quant::infer::{not_finite, scale_not_finite};
use crate::quant::{Format, Matrix};

/// Bytes of zeros in one piece that no row or pair of rows of a real model has.
const RUN: usize = 64 << 10;

/// Scales of 0 in one piece that no row of a real model has: a page of a file.
const SCALES: usize = 1024;

/// Bytes that are looked at together.
const BLOCK: usize = 512;

/// What a matrix may have of zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeros {
    /// Anything: the shard says that its weights are synthetic.
    Any,
    /// A share of its rows: one row belongs to a token of the vocabulary.
    Rows,
    /// Single rows and groups.
    Few,
}

/// What is wrong with the bytes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Damage {
    /// A scale is infinite or NaN.
    #[error("scale {index} is {value}")]
    Scale {
        /// Which one.
        index: usize,
        /// The scale.
        value: f32,
    },
    /// A value is infinite or NaN.
    #[error("value {index} is {value}")]
    Value {
        /// Which one.
        index: usize,
        /// The value.
        value: f32,
    },
    /// Too many scales are 0.
    #[error("{zeros} of its {of} scales are 0")]
    ZeroScales {
        /// Scales of 0.
        zeros: usize,
        /// Scales of the tensor.
        of: usize,
    },
    /// Too many bytes are 0.
    #[error("{bytes} bytes from byte {at} on are zeros")]
    Zeros {
        /// First byte of the longest run.
        at: usize,
        /// Bytes of that run.
        bytes: usize,
    },
}

impl Damage {
    /// The first scale or weight of a matrix that is infinite or NaN.
    pub fn not_finite(matrix: &Matrix<'_>) -> Option<Damage> {
        let scale = scale_not_finite(matrix.format(), matrix.scales());
        let scale = scale.map(|(index, value)| Damage::Scale { index, value });
        let value = || {
            let (index, value) = first_bad_value(matrix.bytes(), matrix.format())?;
            Some(Damage::Value { index, value })
        };
        scale.or_else(value)
    }
}

/// Checks all bytes of a matrix stored in `format`, or of scales where that is `None`.
///
/// # Errors
/// The first value that is infinite or NaN, or more zeros than `zeros` allows.
pub fn check(bytes: &[u8], format: Option<Format>, zeros: Zeros) -> Result<(), Damage> {
    let mut scan = Scan::new(format, zeros);
    scan.feed(bytes)?;
    scan.finish()
}

/// Checks a tensor whose bytes come in order, piece by piece.
#[derive(Debug)]
struct Scan {
    format: Option<Format>,
    zeros: Zeros,
    /// Bytes so far.
    len: usize,
    zero: Runs,
    /// In scales.
    zero_scales: Runs,
}

/// Counts items that are zero.
#[derive(Debug, Default)]
struct Runs {
    total: usize,
    longest: Range<usize>,
    /// First item of the run that has not ended.
    start: Option<usize>,
}

impl Runs {
    fn add(&mut self, item: Range<usize>, is_zero: bool) {
        if !is_zero {
            self.start = None;
            return;
        }
        let start = *self.start.get_or_insert(item.start);
        self.total += item.len();
        if item.end - start > self.longest.len() {
            self.longest = start..item.end;
        }
    }
}

impl Scan {
    /// Of a matrix stored in `format`, or of scales where that is `None`.
    fn new(format: Option<Format>, zeros: Zeros) -> Scan {
        Scan {
            format,
            zeros,
            len: 0,
            zero: Runs::default(),
            zero_scales: Runs::default(),
        }
    }

    /// Checks the values of the next `bytes`. All pieces but the last are of multiples of 512 bytes.
    ///
    /// # Errors
    /// The first value that is infinite or NaN.
    fn feed(&mut self, bytes: &[u8]) -> Result<(), Damage> {
        let base = self.len;
        self.len += bytes.len();
        let format = self.format.unwrap_or(Format::F32);
        if let Some((index, value)) = first_bad_value(bytes, format) {
            return Err(match self.format {
                None => Damage::Scale {
                    index: base / 4 + index,
                    value,
                },
                Some(_) => Damage::Value {
                    index: base / value_bytes(format) + index,
                    value,
                },
            });
        }
        match self.format {
            None => {
                for (i, scale) in bytes.as_chunks().0.iter().enumerate() {
                    let at = base / 4 + i;
                    (self.zero_scales).add(at..at + 1, word(*scale) & 0x7fff_ffff == 0);
                }
            }
            Some(_) => {
                for (i, block) in bytes.chunks(BLOCK).enumerate() {
                    let at = base + i * BLOCK;
                    self.zero.add(at..at + block.len(), is_zero(block));
                }
            }
        }
        Ok(())
    }

    /// Judges the zeros of a complete tensor.
    ///
    /// # Errors
    /// More of them than the tensor may have.
    fn finish(self) -> Result<(), Damage> {
        let Scan { zeros, len, .. } = self;
        if zeros == Zeros::Any {
            return Ok(());
        }
        let (count, of) = (self.zero_scales.total, len / 4);
        let few = zeros == Zeros::Few;
        let many = count > 0 && count >= of / 8;
        if many || few && self.zero_scales.longest.len() >= SCALES {
            return Err(Damage::ZeroScales { zeros: count, of });
        }
        let Runs { total, longest, .. } = self.zero;
        let (found, most) = match few {
            true => (longest.len(), RUN.min(len / 4)),
            // The padding of a vocabulary.
            false => (total, len / 16),
        };
        // Rows of a narrow matrix are short, and one of them may be zeros.
        match total > 0 && (total == len || found >= most.max(4096)) {
            true => Err(Damage::Zeros {
                at: longest.start,
                bytes: longest.len(),
            }),
            false => Ok(()),
        }
    }
}

/// As [`check`], of a tensor of `len` bytes that `read` gives piece by piece.
///
/// # Errors
/// Those of `read`, and damage as `damaged` tells it.
pub fn check_read<E>(
    format: Option<Format>,
    zeros: Zeros,
    len: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    damaged: impl Fn(Damage) -> E,
) -> Result<(), E> {
    const PIECE: u64 = 1 << 20;
    let (mut scan, mut piece) = (Scan::new(format, zeros), Vec::new());
    for at in (0..len).step_by(PIECE as usize) {
        piece.resize(PIECE.min(len - at) as usize, 0);
        read(at, &mut piece)?;
        scan.feed(&piece).map_err(&damaged)?;
    }
    scan.finish().map_err(damaged)
}

/// Whether [`check`] may find something in a tensor that `piece` is a part of. Reads at the speed of memory; a `piece` may begin and end
/// anywhere, except inside a value.
pub fn is_suspicious(piece: &[u8], format: Option<Format>) -> bool {
    let Some(format) = format else {
        let zero = any(piece, |b| word(b) & 0x7fff_ffff == 0);
        return zero || has_bad_value(piece, Format::F32);
    };
    // A piece may have a part of a long run.
    let mut runs = Runs::default();
    for (i, block) in piece.chunks(BLOCK).enumerate() {
        runs.add(i..i + 1, is_zero(block));
    }
    let few = (RUN / 2).min(piece.len() / 8) / BLOCK;
    runs.total > 0 && runs.longest.len() >= few || has_bad_value(piece, format)
}

/// Looks at a sample of an expert's matrix that has just been read, and at all of it where the sample is suspicious. Values that are no
/// numbers show in the output of the matrix; zeros do not.
///
/// # Errors
/// More zeros than [`Zeros::Few`] allows.
pub fn check_sample(matrix: &Matrix<'_>) -> Result<(), Damage> {
    sample(
        matrix.bytes(),
        matrix.scales(),
        format_of_scales(matrix.format()),
    )
}

/// How the scales of a matrix are checked: `None` for scales in F32, else as values of this format.
pub(super) fn format_of_scales(format: Format) -> Option<Format> {
    match format {
        Format::Fp8BlockBf16 => Some(Format::Bf16),
        // Exponents are looked at as codes: any run of zeros is damage.
        Format::Mxfp4 => Some(Format::Int8Row),
        _ => None,
    }
}

fn sample(weights: &[u8], scales: &[u8], format: Option<Format>) -> Result<(), Damage> {
    // A scale of every page, and of every sixteenth: a run that is refused has one. More would cost a percent of a decode.
    let step = (scales.len() / 16).clamp(4, 4 * SCALES) & !3;
    let zero =
        |at: usize| (scales[at..].first_chunk()).is_some_and(|b| word(*b) & 0x7fff_ffff == 0);
    if (0..scales.len()).step_by(step).any(zero) {
        check(scales, format, Zeros::Few)?;
    }
    let step = RUN.min(weights.len() / 8).max(BLOCK);
    let zero = |at: usize| is_zero(&weights[at..weights.len().min(at + BLOCK)]);
    if (0..weights.len()).step_by(step).any(zero) {
        // Codes: what is no number among floats is found in the output.
        check(weights, Some(Format::Int8Row), Zeros::Few)?;
    }
    Ok(())
}

/// Nearly always decided by the first byte.
fn is_zero(block: &[u8]) -> bool {
    block.iter().all(|byte| *byte == 0)
}

fn has_bad_value(bytes: &[u8], format: Format) -> bool {
    let half = u16::from_le_bytes;
    match format {
        Format::F32 => any(bytes, |b| word(b) & 0x7f80_0000 == 0x7f80_0000),
        Format::Bf16 => any(bytes, |b| half(b) & 0x7f80 == 0x7f80),
        Format::F16 => any(bytes, |b| half(b) & 0x7c00 == 0x7c00),
        Format::Fp8Block | Format::Fp8BlockBf16 => any(bytes, |[b]| b & 0x7f == 0x7f),
        // Codes are numbers, and their scales are checked.
        _ => false,
    }
}

/// Bytes of a value; 1 where it is less.
pub fn value_bytes(format: Format) -> usize {
    match format {
        Format::F32 => 4,
        Format::F16 | Format::Bf16 => 2,
        _ => 1,
    }
}

fn first_bad_value(bytes: &[u8], format: Format) -> Option<(usize, f32)> {
    if !has_bad_value(bytes, format) {
        return None;
    }
    let halves = || bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b));
    let first = |values: &mut dyn Iterator<Item = f32>| {
        values.enumerate().find(|(_, value)| !value.is_finite())
    };
    match format {
        Format::F32 => not_finite(bytes),
        Format::Bf16 => first(&mut halves().map(|h| half::bf16::from_bits(h).to_f32())),
        Format::F16 => first(&mut halves().map(|h| half::f16::from_bits(h).to_f32())),
        _ => (bytes.iter().position(|b| b & 0x7f == 0x7f)).map(|at| (at, f32::NAN)),
    }
}

/// Whether `bad` holds for any item of some pieces of `bytes`. Without a branch inside a piece, so that it becomes vector instructions.
fn any<const N: usize>(bytes: &[u8], bad: impl Fn([u8; N]) -> bool) -> bool {
    bytes.chunks(16 << 10).any(|piece| {
        let (items, _) = piece.as_chunks::<N>();
        items.iter().fold(false, |found, item| found | bad(*item))
    })
}

fn word(bytes: [u8; 4]) -> u32 {
    u32::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_zeros_pass_and_many_are_refused() {
        let mut scales = vec![0.5f32; 4096];
        let check = |scales: &[f32], zeros| {
            let bytes = bytemuck::cast_slice(scales);
            let found = check(bytes, None, zeros).err();
            // Whatever is refused is suspicious in each of its halves, and an expert's sample finds it, too.
            let half = bytes.len() / 8 * 4;
            let seen = [&bytes[..half], &bytes[half..]].map(|piece| is_suspicious(piece, None));
            assert!(found.is_none() || seen.contains(&true));
            if zeros == Zeros::Few {
                assert_eq!(sample(&[1], bytes, None).err(), found);
            }
            found
        };
        assert_eq!(check(&scales, Zeros::Few), None);
        scales[7] = 0.0;
        scales[100..164].fill(-0.0);
        assert_eq!(check(&scales, Zeros::Few), None);
        scales[164..612].fill(0.0);
        let damage = Damage::ZeroScales {
            zeros: 513,
            of: 4096,
        };
        assert_eq!(check(&scales, Zeros::Few), Some(damage));
        assert_eq!(check(&scales, Zeros::Rows), Some(damage));
        assert_eq!(check(&scales, Zeros::Any), None);
        assert_eq!(
            check(&[0.0], Zeros::Few),
            Some(Damage::ZeroScales { zeros: 1, of: 1 })
        );
        assert_eq!(check(&[], Zeros::Few), None);
    }

    #[test]
    fn a_page_of_zero_scales_is_refused_in_a_large_matrix() {
        let mut scales = vec![0.5f32; 100_000];
        scales[50_000..51_100].fill(0.0);
        let bytes: &[u8] = bytemuck::cast_slice(&scales);
        let damage = Err(Damage::ZeroScales {
            zeros: 1100,
            of: 100_000,
        });
        assert_eq!(check(bytes, None, Zeros::Few), damage);
        assert_eq!(check(bytes, None, Zeros::Rows), Ok(()));
        assert_eq!(sample(&[1], bytes, None), damage);
    }

    #[test]
    fn runs_of_zeros_are_found_wherever_they_lie() {
        let mut codes = vec![0x93u8; 1 << 20];
        codes[3000..40_000].fill(0);
        let int8 = Some(Format::Int8Row);
        assert_eq!(check(&codes, int8, Zeros::Few), Ok(()));
        for start in [0, 12_345, 600_000, (1 << 20) - 80_000] {
            let mut codes = vec![0x93u8; 1 << 20];
            codes[start..start + 80_000].fill(0);
            let Err(Damage::Zeros { at, bytes }) = check(&codes, int8, Zeros::Few) else {
                panic!("{start}");
            };
            assert!(at.abs_diff(start) <= BLOCK && bytes.abs_diff(80_000) <= 2 * BLOCK);
            assert!(sample(&codes, &[], None).is_err());
            // The padding of a vocabulary may be zeros.
            assert_eq!(
                check(&codes[..], int8, Zeros::Rows).is_ok(),
                80_000 < codes.len() / 16
            );
            for cut in [start + 1, start + 40_000, 300_001] {
                let (a, b) = codes.split_at(cut);
                assert!(
                    is_suspicious(a, int8) || is_suspicious(b, int8),
                    "{start} {cut}"
                );
            }
        }
        let whole = Err(Damage::Zeros { at: 0, bytes: 10 });
        assert_eq!(check(&[0; 10], int8, Zeros::Few), whole);
        assert_eq!(sample(&[0; 10], &[], None), whole);
        assert_eq!(check(&[0; 10], int8, Zeros::Any), Ok(()));
    }

    #[test]
    fn values_that_are_no_numbers_are_found_in_every_format() {
        for (format, bytes) in [
            (Format::F32, &f32::NAN.to_le_bytes()[..]),
            (Format::F32, &f32::NEG_INFINITY.to_le_bytes()),
            (Format::Bf16, &half::bf16::INFINITY.to_le_bytes()),
            (Format::F16, &half::f16::NAN.to_le_bytes()),
            (Format::Fp8Block, &[0xff]),
        ] {
            let mut all = [0x11; 40_000];
            let at = 20_000;
            assert!(!is_suspicious(&all, Some(format)));
            assert_eq!(check(&all, Some(format), Zeros::Few), Ok(()));
            all[at..at + bytes.len()].copy_from_slice(bytes);
            assert!(is_suspicious(&all, Some(format)));
            let Err(Damage::Value { index, value }) = check(&all, Some(format), Zeros::Any) else {
                panic!("{format}");
            };
            assert!(index == at / bytes.len() && !value.is_finite());
        }
    }
}
