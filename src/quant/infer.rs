//! Infers the format of a packed tensor from its byte counts. Containers name it in a stamp at most, as a confirmation.

use super::Format;

/// Sizes of a packed tensor and the shape that the config gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Output size.
    pub rows: usize,
    /// Input size.
    pub cols: usize,
    /// Bytes of weights.
    pub weights: u64,
    /// Number of scales.
    pub scales: u64,
}

/// Why a tensor has no supported format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No format has these sizes.
    #[error("{weights} bytes and {scales} scales are no known format of a matrix [{rows}, {cols}]", weights = .0.weights, scales = .0.scales, rows = .0.rows, cols = .0.cols)]
    Impossible(Sizes),
    /// The weights are of a grouped format, and no group size gives that number of scales.
    #[error(
        "{scales} scales a row cannot be groups of {cols} columns: neither a power of two nor an exact division gives that number"
    )]
    GroupSize {
        /// Input size.
        cols: usize,
        /// Scales of a row.
        scales: u64,
    },
    /// Several formats have these sizes.
    #[error(
        "its sizes are those of {first} and of {second}; a colibri.fmt stamp must say which it is"
    )]
    Ambiguous {
        /// One of them.
        first: Format,
        /// Another one.
        second: Format,
    },
    /// A format of another engine that is not supported.
    #[error("its format {0} is not supported")]
    Unsupported(&'static str),
    /// The stamp names an unknown format.
    #[error("its colibri.fmt stamp names an unknown format {0:?}")]
    UnknownStamp(String),
    /// The stamp and the bytes disagree.
    #[error("its colibri.fmt stamp says {stamp}, but its sizes are those of {found}")]
    Contradiction {
        /// The format in the stamp.
        stamp: String,
        /// The format that has these sizes.
        found: String,
    },
}

/// Formats of other engines that are recognised and refused, by the name in a stamp.
const UNSUPPORTED: [&str; 4] = [INT3, E8, "mxfp4", "int4-rans256-g0"];
const INT3: &str = "int3-g64";
const E8: &str = "e8-iq3-lattice";

/// Supported formats of U8 tensors, by the name in a stamp.
const SUPPORTED: [&str; 4] = ["int8-row", "int4-row", "int4-grouped", "int2-row"];

/// The format of a U8 tensor with F32 scales.
///
/// # Errors
/// The sizes fit no format or several, or contradict the stamp.
pub fn infer(sizes: Sizes, stamp: Option<&str>) -> Result<Format, Refusal> {
    if let Some(name) = stamp.and_then(unsupported) {
        return Err(Refusal::Unsupported(name));
    }
    let found = candidates(sizes);
    let Some(stamp) = stamp else {
        return match found[..] {
            [] => Err(nothing(sizes)),
            [format] => Ok(format),
            [first, second, ..] => Err(Refusal::Ambiguous { first, second }),
        };
    };
    if stamp == Format::Fp8Block.name() {
        // Bytes cannot tell FP8 from int8, and a tensor of FP8 has its own dtype.
        let found = "U8 tensors, which are never FP8".into();
        let stamp = stamp.into();
        return Err(Refusal::Contradiction { stamp, found });
    }
    if !SUPPORTED.contains(&stamp) {
        return Err(Refusal::UnknownStamp(stamp.chars().take(60).collect()));
    }
    if found.is_empty() {
        return Err(nothing(sizes));
    }
    // One group a row is the same as one scale a row.
    let agrees = |format: &Format| {
        format.name() == stamp || *format == Format::Int4Row && stamp == "int4-grouped"
    };
    found
        .iter()
        .copied()
        .find(agrees)
        .ok_or_else(|| Refusal::Contradiction {
            stamp: stamp.into(),
            found: found[0].to_string(),
        })
}

fn unsupported(stamp: &str) -> Option<&'static str> {
    UNSUPPORTED.into_iter().find(|name| *name == stamp)
}

/// Every format that takes exactly these sizes.
fn candidates(sizes: Sizes) -> Vec<Format> {
    let Sizes {
        rows,
        cols,
        weights,
        scales,
    } = sizes;
    let mut formats = vec![Format::Int8Row, Format::Int4Row, Format::Int2Row];
    if let Some(size) = group_size(rows, cols, scales)
        && size < cols
    {
        formats.push(Format::Int4Group(size as u32));
    }
    formats.retain(|format| {
        let fits = |bytes: Option<usize>, found: u64| bytes.is_some_and(|b| b as u64 == found);
        let whole = format.row_bytes(cols).and_then(|row| row.checked_mul(rows));
        fits(whole, weights) && fits(format.scale_bytes(rows, cols), scales.saturating_mul(4))
    });
    formats
}

/// Columns of a group where `rows` rows have `scales` scales: the power of two that gives that many groups, else the exact quotient.
fn group_size(rows: usize, cols: usize, scales: u64) -> Option<usize> {
    let groups = usize::try_from(scales).ok()?;
    if rows == 0 || groups == 0 || !groups.is_multiple_of(rows) {
        return None;
    }
    let groups = groups / rows;
    let powers = (0..31).map(|p| 1usize << p);
    // With two groups or more a power of two is the only one: twice the size halves the number.
    let power = powers
        .take_while(|size| *size < cols)
        .find(|size| cols.div_ceil(*size) == groups);
    let quotient = || cols.is_multiple_of(groups).then(|| cols / groups);
    power
        .or_else(quotient)
        .filter(|size| u32::try_from(*size).is_ok())
}

/// Why no format fits.
fn nothing(sizes: Sizes) -> Refusal {
    let Sizes {
        rows,
        cols,
        weights,
        scales,
    } = sizes;
    let takes = |groups: usize, bytes: usize| {
        let total = groups.checked_mul(bytes).and_then(|n| n.checked_mul(rows));
        total.is_some_and(|n| n as u64 == weights)
    };
    let groups = cols.div_ceil(64);
    if takes(groups, 24) && scales == (groups as u64).saturating_mul(rows as u64) {
        return Refusal::Unsupported(INT3);
    }
    if takes(cols.div_ceil(256), 98) && scales == 1 {
        return Refusal::Unsupported(E8);
    }
    if takes(cols.div_ceil(2), 1)
        && rows > 0
        && scales > rows as u64
        && scales.is_multiple_of(rows as u64)
    {
        return Refusal::GroupSize {
            cols,
            scales: scales / rows as u64,
        };
    }
    Refusal::Impossible(sizes)
}

/// Index and value of the first scale that is infinite or NaN. `scales` are f32, little-endian.
pub fn not_finite(scales: &[u8]) -> Option<(usize, f32)> {
    let mut values = scales
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    // The usual case first: a loop without branches runs at the speed of memory.
    let exponent = |v: f32| v.to_bits() & 0x7f80_0000;
    if values.clone().map(exponent).fold(0, u32::max) < 0x7f80_0000 {
        return None;
    }
    let at = values.clone().position(|v| !v.is_finite())?;
    Some((at, values.nth(at)?))
}

/// Index and value of the first scale of a matrix stored in `format` that is infinite or NaN.
pub fn scale_not_finite(format: Format, scales: &[u8]) -> Option<(usize, f32)> {
    match format.scale_width() {
        4 => return not_finite(scales),
        1 => {
            let at = scales.iter().position(|exponent| *exponent == u8::MAX)?;
            return Some((at, f32::NAN));
        }
        _ => {}
    }
    let scales = scales.chunks_exact(2);
    let mut values = scales.map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32());
    values.by_ref().enumerate().find(|(_, v)| !v.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sizes(rows: usize, cols: usize, weights: u64, scales: u64) -> Sizes {
        Sizes {
            rows,
            cols,
            weights,
            scales,
        }
    }

    #[test]
    fn public_container() {
        let infer = |weights, scales| infer(sizes(2048, 6144, weights, scales), None);
        let elements = 2048 * 6144;
        assert_eq!(infer(elements, 2048), Ok(Format::Int8Row));
        assert_eq!(infer(elements / 2, 2048), Ok(Format::Int4Row));
        assert_eq!(infer(elements / 2, 2048 * 96), Ok(Format::Int4Group(64)));
        assert_eq!(infer(elements / 2, 2048 * 48), Ok(Format::Int4Group(128)));
        assert_eq!(infer(elements / 2, 2048 * 64), Ok(Format::Int4Group(96)));
        assert_eq!(infer(elements / 4, 2048), Ok(Format::Int2Row));
    }

    #[test]
    fn the_power_of_two_comes_before_the_quotient() {
        let groups =
            |cols: usize, n: u64| infer(sizes(3, cols, 3 * cols.div_ceil(2) as u64, 3 * n), None);
        assert_eq!(groups(96, 2), Ok(Format::Int4Group(64)));
        assert_eq!(groups(96, 3), Ok(Format::Int4Group(32)));
        assert_eq!(groups(96, 4), Ok(Format::Int4Group(24)));
        assert_eq!(groups(96, 1), Ok(Format::Int4Row));
        let error = groups(96, 5).unwrap_err();
        assert_eq!(
            error,
            Refusal::GroupSize {
                cols: 96,
                scales: 5
            }
        );
    }

    #[test]
    fn narrow_matrices_are_ambiguous_without_a_stamp() {
        let narrow = sizes(5, 2, 5, 5);
        let error = infer(narrow, None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "its sizes are those of int4-row and of int2-row; a colibri.fmt stamp must say which it is"
        );
        assert_eq!(infer(narrow, Some("int2-row")), Ok(Format::Int2Row));
        assert_eq!(infer(narrow, Some("int4-grouped")), Ok(Format::Int4Row));
    }

    #[test]
    fn what_is_off_by_one_is_refused() {
        for (weights, scales) in [(6400, 101), (6400, 99), (6399, 100), (3201, 100), (0, 0)] {
            let wrong = sizes(100, 64, weights, scales);
            assert_eq!(infer(wrong, None), Err(Refusal::Impossible(wrong)));
            assert_eq!(
                infer(wrong, Some("int8-row")),
                Err(Refusal::Impossible(wrong))
            );
        }
    }

    #[test]
    fn other_formats_are_refused_by_name() {
        let by_size = |weights, scales| infer(sizes(10, 512, weights, scales), None).unwrap_err();
        assert_eq!(by_size(10 * 8 * 24, 80), Refusal::Unsupported("int3-g64"));
        assert_eq!(
            by_size(10 * 2 * 98, 1),
            Refusal::Unsupported("e8-iq3-lattice")
        );
        for name in UNSUPPORTED {
            let error = infer(sizes(10, 512, 5120, 10), Some(name)).unwrap_err();
            assert_eq!(error, Refusal::Unsupported(name));
        }
    }

    #[test]
    fn stamps_confirm_or_refuse() {
        let int8 = sizes(10, 512, 5120, 10);
        assert_eq!(infer(int8, Some("int8-row")), Ok(Format::Int8Row));
        for stamp in ["int4-row", "int4-grouped", "fp8-e4m3-b128"] {
            let error = infer(int8, Some(stamp)).unwrap_err();
            assert!(matches!(error, Refusal::Contradiction { .. }), "{error}");
        }
        let error = infer(int8, Some("int9")).unwrap_err();
        assert_eq!(error, Refusal::UnknownStamp("int9".into()));
    }

    #[test]
    fn the_first_bad_scale_is_found() {
        let bytes = |values: &[f32]| bytemuck::cast_slice::<f32, u8>(values).to_vec();
        assert_eq!(not_finite(&bytes(&[1.0, -f32::MAX, 0.0])), None);
        let (at, value) = not_finite(&bytes(&[1.0, f32::NAN, f32::INFINITY])).unwrap();
        assert!(at == 1 && value.is_nan());
        let found = not_finite(&bytes(&[f32::NEG_INFINITY]));
        assert_eq!(found, Some((0, f32::NEG_INFINITY)));
    }

    proptest! {
        #[test]
        fn any_sizes_are_answered(rows: usize, cols: usize, weights: u64, scales: u64) {
            let _ = infer(sizes(rows, cols, weights, scales), None);
        }

        #[test]
        fn what_fits_has_those_sizes(
            rows in 1..20usize, cols in 1..300usize, weights in 0..6000u64, scales in 0..3000u64,
        ) {
            if let Ok(format) = infer(sizes(rows, cols, weights, scales), None) {
                prop_assert_eq!((format.row_bytes(cols).unwrap() * rows) as u64, weights);
                prop_assert_eq!(format.scale_bytes(rows, cols).unwrap() as u64, 4 * scales);
            }
        }
    }
}
