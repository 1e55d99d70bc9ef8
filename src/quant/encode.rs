//! Rounds floats to codes and scales, which the kernels of `packed` decode.
//!
//! A scale is the largest magnitude of its row or group, divided by the largest code: 127 (int8), 7 (int4), 1 (int2). A
//! code is the weight divided by the scale, rounded to the nearest integer, ties to even. Both are f32 divisions, so that the
//! bytes are the same on every machine. The smallest code (-128, -8, -2) is never used: codes are symmetric.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Format;

/// A format that floats can be rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Packing {
    /// Signed bytes, one scale a row.
    Int8,
    /// Nibbles, one scale a row.
    Int4,
    /// Nibbles, one scale for this many columns of a row; at least 1.
    Int4Group(u32),
    /// Two-bit fields, one scale a row.
    Int2,
}

impl Packing {
    /// The format of a matrix with rows of `cols`. Groups that are as long as a row are one scale a row: the same bytes.
    pub fn format(self, cols: usize) -> Format {
        match self {
            Packing::Int8 => Format::Int8Row,
            Packing::Int4 => Format::Int4Row,
            Packing::Int4Group(size) if size as usize >= cols => Format::Int4Row,
            Packing::Int4Group(size) => Format::Int4Group(size),
            Packing::Int2 => Format::Int2Row,
        }
    }

    /// Bits of a code.
    fn bits(self) -> u32 {
        match self {
            Packing::Int8 => 8,
            Packing::Int4 | Packing::Int4Group(_) => 4,
            Packing::Int2 => 2,
        }
    }

    /// Columns that share a scale.
    fn group(self, cols: usize) -> usize {
        match self {
            Packing::Int4Group(size) => (size as usize).clamp(1, cols.max(1)),
            _ => cols.max(1),
        }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Packing::Int8 => f.write_str("int8"),
            Packing::Int4 => f.write_str("int4"),
            Packing::Int4Group(size) => write!(f, "int4-g{size}"),
            Packing::Int2 => f.write_str("int2"),
        }
    }
}

impl FromStr for Packing {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Packing, Self::Err> {
        match text {
            "int8" => Ok(Packing::Int8),
            "int4" => Ok(Packing::Int4),
            "int2" => Ok(Packing::Int2),
            _ => text
                .strip_prefix("int4-g")
                .filter(|size| size.bytes().all(|b| b.is_ascii_digit()))
                .and_then(|size| size.parse().ok())
                .filter(|size| *size > 0)
                .map(Packing::Int4Group)
                .ok_or("a format is int8, int4, int4-g64 (or another group size) or int2"),
        }
    }
}

impl From<Packing> for String {
    fn from(packing: Packing) -> String {
        packing.to_string()
    }
}

impl TryFrom<String> for Packing {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Packing, Self::Error> {
        text.parse()
    }
}

/// A weight that is infinite or NaN, which no scale brings into the range of codes.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("row {row}, column {column} is {value}")]
pub struct NotFinite {
    /// Its row among the given values.
    pub row: usize,
    /// Its column.
    pub column: usize,
    /// The weight.
    pub value: f32,
}

/// Appends the codes and the scales (f32, little-endian) of the rows `values` [n, cols].
///
/// # Errors
/// A value that is infinite or NaN. `codes` and `scales` are then incomplete.
///
/// # Panics
/// `values` is not a whole number of rows.
pub fn encode(
    packing: Packing,
    cols: usize,
    values: &[f32],
    codes: &mut Vec<u8>,
    scales: &mut Vec<u8>,
) -> Result<(), NotFinite> {
    if cols == 0 {
        return Ok(());
    }
    assert!(values.len().is_multiple_of(cols));
    let group = packing.group(cols);
    let mut fields = vec![0u8; cols];
    for (row, values) in values.chunks_exact(cols).enumerate() {
        for (i, values) in values.chunks(group).enumerate() {
            let start = i * group;
            let fields = &mut fields[start..start + values.len()];
            let scale = encode_group(packing, values, fields).ok_or_else(|| {
                let at = values.iter().position(|v| !v.is_finite()).unwrap_or(0);
                NotFinite {
                    row,
                    column: start + at,
                    value: values[at],
                }
            })?;
            scales.extend_from_slice(&scale.to_le_bytes());
        }
        pack(packing.bits(), &fields, codes);
    }
    Ok(())
}

/// Writes the codes of one group as unsigned fields, and returns its scale; `None` when a value is not finite.
fn encode_group(packing: Packing, values: &[f32], fields: &mut [u8]) -> Option<f32> {
    /// 1.5 * 2^23: a sum with it has no room for a fraction, so the addition rounds, ties to even, and the low bits of the
    /// sum are the integer. Unlike a call of `round_ties_even` this is one instruction for many values on any CPU.
    const ROUND: f32 = 12_582_912.0;
    // The bits of magnitudes are ordered as the magnitudes, those of infinities and NaNs last.
    let magnitude = |v: &f32| (v.to_bits() & 0x7fff_ffff) as i32;
    let largest = f32::from_bits(values.iter().map(magnitude).fold(0, i32::max) as u32);
    if !largest.is_finite() {
        return None;
    }
    let bits = packing.bits();
    let top = ((1 << (bits - 1)) - 1) as f32;
    // The quotient is 0 also where the largest magnitude is too small to be divided.
    let scale = match largest / top {
        0.0 => 1.0,
        scale => scale,
    };
    let (offset, mask) = match bits {
        8 => (0, 0xff),
        bits => (1u32 << (bits - 1), (1u32 << bits) - 1),
    };
    for (field, value) in fields.iter_mut().zip(values) {
        let rounded = (value / scale).clamp(-top, top) + ROUND;
        *field = (rounded.to_bits().wrapping_add(offset) & mask) as u8;
    }
    Some(scale)
}

/// Packs the fields of one row into whole bytes, the first field of a byte lowest.
fn pack(bits: u32, fields: &[u8], codes: &mut Vec<u8>) {
    match bits {
        8 => codes.extend_from_slice(fields),
        4 => codes.extend(fields.chunks(2).map(|f| match *f {
            [low, high] => low | high << 4,
            [low] => low,
            _ => 0,
        })),
        _ => codes.extend(fields.chunks(4).map(|f| {
            let place = |(k, field): (usize, &u8)| field << (2 * k);
            f.iter().enumerate().map(place).fold(0, |byte, f| byte | f)
        })),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::quant::Matrix;

    type Encoded = (Vec<u8>, Vec<u8>);

    fn encoded(packing: Packing, cols: usize, values: &[f32]) -> Encoded {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        encode(packing, cols, values, &mut codes, &mut scales).unwrap();
        (codes, scales)
    }

    fn decoded(packing: Packing, cols: usize, (codes, scales): &Encoded) -> Vec<f32> {
        let format = packing.format(cols);
        let rows = codes.len() / format.row_bytes(cols).unwrap();
        let matrix = Matrix::with_scales(format, rows, cols, codes, scales).unwrap();
        let mut values = vec![0.0; rows * cols];
        for (row, values) in values.chunks_mut(cols).enumerate() {
            matrix.add_row(row, 1.0, values);
        }
        values
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        let words = bytes.chunks_exact(4);
        words
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    }

    #[test]
    fn fields_are_where_the_formats_have_them() {
        let row = [7.0, -7.0, 0.5, 1.5, -2.5];
        let (codes, scales) = encoded(Packing::Int4, 5, &row);
        // Ties go to even: 0.5 is 0, 1.5 is 2, -2.5 is -2; the last nibble is empty.
        assert_eq!(codes, [0x1f, 0xa8, 0x06]);
        assert_eq!(floats(&scales), [1.0]);
        let (codes, scales) = encoded(Packing::Int8, 5, &[127.0, -127.0, 0.5, 1.5, -2.5]);
        assert_eq!(codes, [127, 0x81, 0, 2, 0xfe]);
        assert_eq!(floats(&scales), [1.0]);
        let (codes, scales) = encoded(Packing::Int2, 5, &[2.0, -2.0, 0.5, 1.5, -1.0]);
        assert_eq!(codes, [0b11_10_01_11, 0b10]);
        assert_eq!(floats(&scales), [2.0]);
        let (codes, scales) = encoded(Packing::Int4Group(2), 3, &[7.0, 0.0, 14.0]);
        assert_eq!(codes, [0x8f, 0x0f]);
        assert_eq!(floats(&scales), [1.0, 2.0]);
    }

    #[test]
    fn nothing_is_divided_by_zero() {
        // The smallest subnormal divided by 127 is 0.
        for zero in [0.0, -0.0, f32::from_bits(1)] {
            let (codes, scales) = encoded(Packing::Int8, 3, &[zero; 3]);
            assert_eq!((codes, floats(&scales)), (vec![0; 3], vec![1.0]));
        }
        assert_eq!(encoded(Packing::Int8, 0, &[]), (vec![], vec![]));
        let large = encoded(Packing::Int2, 2, &[f32::MAX, -f32::MAX]);
        assert_eq!(decoded(Packing::Int2, 2, &large), [f32::MAX, -f32::MAX]);
    }

    #[test]
    fn what_is_not_finite_is_refused_with_its_place() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
            let values = [1.0, 2.0, 3.0, 4.0, 5.0, value];
            let (mut codes, mut scales) = (Vec::new(), Vec::new());
            let error =
                encode(Packing::Int4Group(2), 3, &values, &mut codes, &mut scales).unwrap_err();
            assert_eq!((error.row, error.column), (1, 2));
        }
    }

    #[test]
    fn formats_have_names() {
        for packing in packings() {
            assert_eq!(packing.to_string().parse(), Ok(packing));
        }
        for text in [
            "",
            "int4-g",
            "int4-g0",
            "int4-g+8",
            "int4-g99999999999",
            "INT8",
            "fp8",
        ] {
            assert!(text.parse::<Packing>().is_err(), "{text}");
        }
        assert_eq!(Packing::Int4Group(64).format(64), Format::Int4Row);
        assert_eq!(Packing::Int4Group(64).format(65), Format::Int4Group(64));
    }

    fn packings() -> [Packing; 6] {
        [
            Packing::Int8,
            Packing::Int4,
            Packing::Int4Group(64),
            Packing::Int4Group(16),
            Packing::Int4Group(9),
            Packing::Int2,
        ]
    }

    fn top(packing: Packing) -> f32 {
        ((1 << (packing.bits() - 1)) - 1) as f32
    }

    proptest! {
        #[test]
        fn a_round_trip_is_within_half_a_scale(
            cols in 1..200usize, exponent in -100..100i32, which in 0..6usize,
            seeds in prop::collection::vec(-1.0f32..1.0, 1..600),
        ) {
            let packing = packings()[which];
            let factor = 2f32.powi(exponent);
            let rows = seeds.len().div_ceil(cols);
            let values: Vec<f32> = (0..rows * cols).map(|i| seeds[i % seeds.len()] * factor).collect();
            let first = encoded(packing, cols, &values);
            let back = decoded(packing, cols, &first);
            let group = packing.group(cols);
            let scales = floats(&first.1);
            let per_row = cols.div_ceil(group);
            for (i, (value, back)) in values.iter().zip(&back).enumerate() {
                let scale = scales[i / cols * per_row + i % cols / group];
                prop_assert!((value - back).abs() <= 0.500_001 * scale, "{value} became {back}, scale {scale}");
            }
            // Again: the same codes, and scales that a rounding may have moved by one place.
            let second = encoded(packing, cols, &back);
            prop_assert_eq!(&first.0, &second.0);
            for (a, b) in scales.iter().zip(floats(&second.1)) {
                prop_assert!(a.to_bits().abs_diff(b.to_bits()) <= 1);
            }
        }

        #[test]
        fn codes_are_symmetric(
            cols in 1..70usize, which in 0..6usize, bits in prop::collection::vec(any::<u32>(), 70),
        ) {
            let packing = packings()[which];
            let finite = |bits: &u32| Some(f32::from_bits(*bits)).filter(|v| v.is_finite()).unwrap_or(0.0);
            let row: Vec<f32> = bits[..cols].iter().map(finite).collect();
            let mut fields = vec![0; cols];
            let scale = encode_group(packing, &row, &mut fields).unwrap();
            prop_assert!(scale > 0.0 && scale.is_finite());
            for field in fields {
                let code = match packing {
                    Packing::Int8 => f32::from(field as i8),
                    _ => f32::from(field) - top(packing) - 1.0,
                };
                prop_assert!(code.abs() <= top(packing));
            }
        }
    }
}
