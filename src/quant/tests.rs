//! Compares every instruction set of this CPU, bit for bit, with a scalar transcription of the reduction order.

mod integer;

use super::dispatch::kernel_for;
use super::kernel::Isa;
use super::*;
use crate::pool::Pool;
use half::{bf16, f16};
use proptest::prelude::*;

const FORMATS: [Format; 3] = [Format::F32, Format::F16, Format::Bf16];
const PACKED: [Format; 13] = [
    Format::Int8Row,
    Format::Int4Row,
    Format::Int2Row,
    Format::Fp8Block,
    Format::Fp8BlockBf16,
    Format::Mxfp4,
    Format::Int4Group(64),
    Format::Int4Group(128),
    Format::Int4Group(192),
    Format::Int4Group(32),
    Format::Int4Group(24),
    Format::Int4Group(7),
    Format::Int4Group(1),
];

/// A small generator of random numbers, so that a seed reproduces a case.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A value of order 1; with `edges`, one of 64 is an edge case.
    fn value(&mut self, edges: bool) -> f32 {
        const EDGES: [f32; 10] = [
            0.0,
            -0.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            1e-40,
            -1e-45,
            6e-8,
            65504.0,
            f32::MAX,
        ];
        let bits = self.next();
        if edges && bits.is_multiple_of(64) {
            return EDGES[(bits >> 32) as usize % EDGES.len()];
        }
        ((bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 2f32.powi((bits & 7) as i32 - 4)
    }

    fn values(&mut self, count: usize, edges: bool) -> Vec<f32> {
        (0..count).map(|_| self.value(edges)).collect()
    }
}

/// `values` rounded to `format`, at an odd address.
struct Stored {
    bytes: Vec<u8>,
    values: Vec<f32>,
}

impl Stored {
    fn new(format: Format, values: &[f32]) -> Stored {
        let mut bytes = vec![0xff];
        let mut stored = Vec::new();
        for &value in values {
            match format {
                Format::F32 => {
                    bytes.extend(value.to_le_bytes());
                    stored.push(value);
                }
                Format::F16 => {
                    let value = f16::from_f32(value);
                    bytes.extend(value.to_le_bytes());
                    stored.push(value.to_f32());
                }
                _ => {
                    let value = bf16::from_f32(value);
                    bytes.extend(value.to_le_bytes());
                    stored.push(value.to_f32());
                }
            }
        }
        // Vec<u8> is in practice aligned, so one of these two starts is odd.
        let skip = usize::from((bytes.as_ptr() as usize).is_multiple_of(2));
        if skip == 0 {
            bytes.remove(0);
        }
        Stored {
            bytes,
            values: stored,
        }
    }

    fn matrix(&self, format: Format, rows: usize, cols: usize) -> Matrix<'_> {
        let size = format.row_bytes(cols).unwrap() * rows;
        Matrix::new(format, rows, cols, &self.bytes[self.bytes.len() - size..]).unwrap()
    }
}

/// Random codes and scales at odd addresses, and their values.
struct Coded {
    format: Format,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
    scales: Vec<u8>,
    /// Codes and scales of every weight.
    codes: Vec<f32>,
    factors: Vec<f32>,
}

/// `len` bytes from `next` at an odd address, after one or two bytes of padding.
fn odd_bytes(len: usize, mut next: impl FnMut() -> u8) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 2);
    let pad = 1 + usize::from(!(bytes.as_ptr() as usize).is_multiple_of(2));
    bytes.resize(pad, 0xff);
    bytes.extend((0..len).map(|_| next()));
    bytes
}

impl Coded {
    fn new(format: Format, rows: usize, cols: usize, random: &mut Random) -> Coded {
        let size = format.row_bytes(cols).unwrap() * rows;
        let width = format.scale_width();
        let count = format.scale_bytes(rows, cols).unwrap() / width;
        let nan = |byte: u8| format.is_fp8() && byte & 0x7f == 0x7f;
        let bytes = odd_bytes(size, || match (random.next() >> 20) as u8 {
            byte if nan(byte) => 0,
            byte => byte,
        });
        let values: Vec<f32> = random.values(count, false);
        let stored = |v: &f32| match width {
            // Exponents around those of the values, and now and then the least.
            1 => vec![(v.to_bits() >> 23) as u8 * u8::from(!v.to_bits().is_multiple_of(32))],
            2 => bf16::from_f32(*v).to_le_bytes().to_vec(),
            _ => v.to_le_bytes().to_vec(),
        };
        let mut values = values.iter().flat_map(stored);
        let scales = odd_bytes(width * count, || values.next().unwrap());
        let mut coded = Coded {
            format,
            rows,
            cols,
            bytes,
            scales,
            codes: Vec::new(),
            factors: Vec::new(),
        };
        coded.decode();
        coded
    }

    /// Makes every byte of codes `byte`.
    fn refill(&mut self, byte: u8) {
        self.bytes.fill(byte);
        self.decode();
    }

    fn decode(&mut self) {
        let Coded {
            format, rows, cols, ..
        } = *self;
        let w = self.matrix();
        let value = |r: usize, j: usize| {
            let row = &w.bytes()[r * format.row_bytes(cols).unwrap()..];
            match format {
                Format::Int8Row => f32::from(row[j] as i8),
                Format::Int2Row => f32::from(row[j / 4] >> (2 * (j % 4)) & 3) - 2.0,
                Format::Fp8Block | Format::Fp8BlockBf16 => e4m3(row[j]),
                Format::Mxfp4 => e2m1(row[j / 2] >> (4 * (j % 2)) & 15),
                _ => f32::from(row[j / 2] >> (4 * (j % 2)) & 15) - 8.0,
            }
        };
        let scale = |r: usize, j: usize| {
            let per_row = format.row_scales(cols);
            let at = match format {
                Format::Int4Group(size) => r * per_row + j / size as usize,
                Format::Fp8Block | Format::Fp8BlockBf16 => r / 128 * per_row + j / 128,
                Format::Mxfp4 => r * per_row + j / 32,
                _ => r,
            };
            match format.scale_width() {
                1 => 2f64.powi(i32::from(w.scales()[at]) - 127) as f32,
                2 => bf16::from_le_bytes(w.scales()[2 * at..][..2].try_into().unwrap()).to_f32(),
                _ => f32::from_le_bytes(w.scales()[4 * at..][..4].try_into().unwrap()),
            }
        };
        let places: Vec<_> = (0..rows)
            .flat_map(|r| (0..cols).map(move |j| (r, j)))
            .collect();
        let codes = places.iter().map(|&(r, j)| value(r, j)).collect();
        let factors = places.iter().map(|&(r, j)| scale(r, j)).collect();
        (self.codes, self.factors) = (codes, factors);
    }

    fn matrix(&self) -> Matrix<'_> {
        let size = self.format.row_bytes(self.cols).unwrap() * self.rows;
        let scales = self.format.scale_bytes(self.rows, self.cols).unwrap();
        Matrix::with_scales(
            self.format,
            self.rows,
            self.cols,
            &self.bytes[self.bytes.len() - size..],
            &self.scales[self.scales.len() - scales..],
        )
        .unwrap()
    }

    fn row(&self, r: usize) -> (&[f32], &[f32]) {
        let row = r * self.cols..(r + 1) * self.cols;
        (&self.codes[row.clone()], &self.factors[row])
    }
}

/// The value of an F8_E4M3 byte, by its definition.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// The value of an FP4 nibble, by its definition.
fn e2m1(nibble: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(nibble >> 1 & 3), f32::from(nibble & 1));
    let magnitude = match exponent {
        0 => mantissa / 2.0,
        _ => (1.0 + mantissa / 2.0) * 2f32.powi(exponent - 1),
    };
    if nibble & 8 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// The reduction order of `packed`, column by column.
fn packed_reference(format: Format, (codes, factors): (&[f32], &[f32]), x: &[f32]) -> f32 {
    let by_row = matches!(format, Format::Int8Row | Format::Int4Row | Format::Int2Row);
    let interleaved = !(format == Format::Int8Row || format.is_fp8());
    let mut lanes = [0f32; LANES];
    for block in (0..codes.len()).step_by(64) {
        for p in 0..64 {
            let j = block
                + if interleaved {
                    4 * (p % 16) + p / 16
                } else {
                    p
                };
            let lane = &mut lanes[p % LANES];
            *lane = match codes.get(j) {
                Some(code) if by_row => code.mul_add(x[j], *lane),
                Some(code) => (code * factors[j]).mul_add(x[j], *lane),
                None => *lane,
            };
        }
    }
    for width in [16, 8, 4, 2, 1] {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
    }
    match by_row && !codes.is_empty() {
        true => lanes[0] * factors[0],
        false => lanes[0],
    }
}

fn check_packed(format: Format, rows: usize, cols: usize, n: usize, seed: u64) {
    let mut random = Random(seed | 1);
    let coded = Coded::new(format, rows, cols, &mut random);
    let w = coded.matrix();
    let x = random.values(n * cols, seed.is_multiple_of(2));
    let a = random.values(rows, false);
    let start = random.values(cols, false);

    let mut expected = Vec::new();
    for c in 0..n {
        let x = &x[c * cols..(c + 1) * cols];
        expected.extend((0..rows).map(|r| packed_reference(format, coded.row(r), x)));
    }
    let mut expected_sum = start.clone();
    for (r, a) in a.iter().enumerate() {
        let (codes, factors) = coded.row(r);
        for ((y, code), factor) in expected_sum.iter_mut().zip(codes).zip(factors) {
            *y = (a * factor).mul_add(*code, *y);
        }
    }
    for isa in Isa::available() {
        let kernel = kernel_for(format, isa);
        let mut y = vec![f32::NAN; n * rows];
        let mut parts: Vec<_> = y.chunks_mut(rows.max(1)).collect();
        kernel.matmul(w, &kernel.arrange(&x, cols), &mut parts);
        assert_eq!(
            bits(&y),
            bits(&expected),
            "{isa:?} {format} [{rows}, {cols}] x {n}"
        );
        let mut y = start.clone();
        kernel.add_rows(w, &a, &mut y);
        assert_eq!(
            bits(&y),
            bits(&expected_sum),
            "{isa:?} {format} [{rows}, {cols}]"
        );
    }
}

#[test]
fn every_packed_width_has_the_same_bits_on_every_instruction_set() {
    for format in PACKED {
        for cols in 0..=270 {
            let (rows, n) = (1 + cols % 5, 1 + cols % 9);
            check_packed(format, rows, cols, n, cols as u64 * 77 + 5);
        }
        check_packed(format, 300, 200, 2, 99);
    }
}

#[test]
fn every_byte_is_decoded_exactly() {
    for format in PACKED {
        let mut random = Random(7);
        let per_byte = 256 / format.row_bytes(256).unwrap();
        let mut coded = Coded::new(format, 1, 256 * per_byte, &mut random);
        let at = coded.bytes.len() - 256;
        (0..=255).for_each(|b| coded.bytes[at + usize::from(b)] = b);
        let w = coded.matrix();
        for isa in Isa::available() {
            let kernel = kernel_for(format, isa);
            let mut y = vec![0f32; w.cols()];
            kernel.add_rows(w, &[1.0], &mut y);
            for (j, y) in y.iter().enumerate() {
                let (byte, field) = ((j / per_byte) as u8, j % per_byte);
                let code = match format {
                    Format::Int8Row => f32::from(byte as i8),
                    Format::Fp8Block | Format::Fp8BlockBf16 => e4m3(byte),
                    Format::Mxfp4 => e2m1(byte >> (4 * field) & 15),
                    Format::Int2Row => f32::from(byte >> (2 * field) & 3) - 2.0,
                    _ => f32::from(byte >> (4 * field) & 15) - 8.0,
                };
                let expected = code * coded.factors[j] + 0.0;
                assert_eq!(bits(&[*y]), bits(&[expected]), "{isa:?} {format} {byte:#x}");
                // The same through a product with a unit vector, where no NaN is near.
                if !format.is_fp8() {
                    let mut x = vec![0f32; w.cols()];
                    x[j] = 1.0;
                    let mut product = [0f32];
                    kernel.matmul(w, &kernel.arrange(&x, w.cols()), &mut [&mut product]);
                    assert_eq!(product[0] + 0.0, expected, "{isa:?} {format} {byte:#x}");
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn packed_threads_tiles_and_columns_do_not_change_a_bit(
        format in 0..PACKED.len(), rows in 1..500usize, cols in 1..700usize, n in 1..10usize, seed: u64,
    ) {
        let mut random = Random(seed | 1);
        let coded = Coded::new(PACKED[format], rows, cols, &mut random);
        let w = coded.matrix();
        let (x, y) = products_at_once(w, n, &mut random)?;
        // Rows cut out anywhere, also inside a block of FP8, and out of what was cut out.
        let (start, end) = (rows / 3, rows - rows / 4);
        let cut = w.slice_rows(0..end).slice_rows(start..end);
        let mut part = vec![0f32; end - start];
        cut.matmul(&Pool::new(1), &x[..cols], 1, &mut part);
        prop_assert_eq!(bits(&part), bits(&y[start..end]));
    }
}

/// `n` columns at once on three threads are the same as one after the other on one, in both directions. The columns [n, cols] and
/// their products [n, rows].
fn products_at_once(
    w: Matrix<'_>,
    n: usize,
    random: &mut Random,
) -> Result<(Vec<f32>, Vec<f32>), TestCaseError> {
    let (rows, cols) = (w.rows(), w.cols());
    let x = random.values(n * cols, false);
    let xt = random.values(n * rows, false);
    let (one, three) = (Pool::new(1), Pool::new(3));
    let (mut y, mut yt) = (vec![0f32; n * rows], vec![0f32; n * cols]);
    w.matmul(&three, &x, n, &mut y);
    w.matmul_transposed(&three, &xt, n, &mut yt);
    for c in 0..n {
        let mut single = vec![0f32; rows];
        w.matmul(&one, &x[c * cols..(c + 1) * cols], 1, &mut single);
        prop_assert_eq!(bits(&single), bits(&y[c * rows..(c + 1) * rows]));
        let mut single = vec![0f32; cols];
        w.matmul_transposed(&one, &xt[c * rows..(c + 1) * rows], 1, &mut single);
        prop_assert_eq!(bits(&single), bits(&yt[c * cols..(c + 1) * cols]));
    }
    Ok((x, y))
}

/// The reduction order of `quant`, element by element.
fn reference(w: &[f32], x: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    for j in 0..w.len().next_multiple_of(LANES) {
        let (w, x) = if j < w.len() {
            (w[j], x[j])
        } else {
            (0.0, 0.0)
        };
        lanes[j % LANES] = w.mul_add(x, lanes[j % LANES]);
    }
    for width in [16, 8, 4, 2, 1] {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
    }
    lanes[0]
}

/// Bits, with every NaN the same.
fn bits(values: &[f32]) -> Vec<u32> {
    values
        .iter()
        .map(|v| if v.is_nan() { f32::NAN } else { *v }.to_bits())
        .collect()
}

fn check(format: Format, rows: usize, cols: usize, n: usize, seed: u64, edges: bool) {
    let mut random = Random(seed | 1);
    let stored = Stored::new(format, &random.values(rows * cols, edges));
    let w = stored.matrix(format, rows, cols);
    let x = random.values(n * cols, edges && seed.is_multiple_of(2));
    let weights = |r: usize| &stored.values[r * cols..(r + 1) * cols];

    let mut expected = Vec::new();
    for c in 0..n {
        expected.extend((0..rows).map(|r| reference(weights(r), &x[c * cols..(c + 1) * cols])));
    }
    let a = random.values(n * rows, false);
    let mut expected_transposed = vec![0f32; n * cols];
    for c in 0..n {
        for r in 0..rows {
            for (j, w) in weights(r).iter().enumerate() {
                let y = &mut expected_transposed[c * cols + j];
                *y = a[c * rows + r].mul_add(*w, *y);
            }
        }
    }

    for isa in Isa::available() {
        let kernel = kernel_for(format, isa);
        let mut y = vec![f32::NAN; n * rows];
        let mut parts: Vec<_> = y.chunks_mut(rows.max(1)).collect();
        kernel.matmul(w, &x, &mut parts);
        assert_eq!(bits(&y), bits(&expected), "{isa:?} {format}");

        let mut y = vec![0f32; n * cols];
        for (c, y) in y.chunks_mut(cols.max(1)).enumerate() {
            kernel.add_rows(w, &a[c * rows..(c + 1) * rows], y);
        }
        assert_eq!(bits(&y), bits(&expected_transposed), "{isa:?} {format}");
    }
}

#[test]
fn every_width_has_the_same_bits_on_every_instruction_set() {
    for format in FORMATS {
        for cols in 0..=200 {
            let (rows, n) = (1 + cols % 5, 1 + cols % 9);
            check(format, rows, cols, n, cols as u64 * 77 + 5, false);
        }
    }
}

proptest! {
    #[test]
    fn edge_values_have_the_same_bits_on_every_instruction_set(
        format in 0..3usize, rows in 1..12usize, cols in 1..200usize, n in 1..10usize, seed: u64,
    ) {
        check(FORMATS[format], rows, cols, n, seed, true);
    }

    #[test]
    fn threads_tiles_and_columns_do_not_change_a_bit(
        format in 0..3usize, rows in 1..400usize, cols in 1..700usize, n in 1..10usize, seed: u64,
    ) {
        let format = FORMATS[format];
        let mut random = Random(seed | 1);
        let stored = Stored::new(format, &random.values(rows * cols, false));
        let w = stored.matrix(format, rows, cols);
        let (x, y) = products_at_once(w, n, &mut random)?;
        let weights = &stored.values[(rows - 1) * cols..];
        prop_assert_eq!(dot(weights, &x[..cols]).to_bits(), y[rows - 1].to_bits());
        let last = w.slice_rows(rows - 1..rows);
        let mut single = [0f32];
        last.matmul(&Pool::new(1), &x[..cols], 1, &mut single);
        prop_assert_eq!(single[0].to_bits(), y[rows - 1].to_bits());
    }
}

#[test]
fn add_row_reads_a_row() {
    for format in FORMATS {
        let stored = Stored::new(format, &Random(3).values(5 * 33, false));
        let w = stored.matrix(format, 5, 33);
        let mut y = vec![0f32; 33];
        w.add_row(3, 1.0, &mut y);
        assert_eq!(y, stored.values[3 * 33..4 * 33]);
        let mut z = vec![0f32; 33];
        axpy(1.0, &y, &mut z);
        assert_eq!(z, y);
    }
}

#[test]
fn every_half_converts_exactly() {
    for format in [Format::F16, Format::Bf16] {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let w = Matrix::new(format, 1, 1 << 16, &bytes).unwrap();
        let expected: Vec<f32> = (0..=u16::MAX)
            .map(|h| match format {
                Format::F16 => f16::from_bits(h).to_f32(),
                _ => bf16::from_bits(h).to_f32(),
            })
            // y starts at +0, which takes the sign of a zero weight.
            .map(|v| v + 0.0)
            .collect();
        for isa in Isa::available() {
            let mut y = vec![0f32; 1 << 16];
            kernel_for(format, isa).add_rows(w, &[1.0], &mut y);
            assert_eq!(bits(&y), bits(&expected), "{isa:?} {format}");
        }
    }
}

#[test]
fn shapes_are_checked() {
    let error = Matrix::new(Format::Bf16, 2, 3, &[0; 11]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the BF16 matrix [2, 3] takes 12 bytes, not 11"
    );
    assert!(matches!(
        Matrix::new(Format::F32, usize::MAX / 2, 3, &[]),
        Err(ShapeError::Overflow { .. })
    ));
    assert!(matches!(
        Matrix::new(Format::F32, 1, usize::MAX, &[]),
        Err(ShapeError::Overflow { .. })
    ));
    assert!(Matrix::new(Format::F16, 0, 7, &[]).is_ok());
    let error = Matrix::with_scales(Format::Int4Group(64), 2, 65, &[0; 66], &[0; 12]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the int4-g64 matrix [2, 65] takes 16 bytes of scales, not 12"
    );
}

#[test]
fn empty_matrices() {
    let pool = Pool::new(2);
    let w = Matrix::new(Format::F32, 3, 0, &[]).unwrap();
    let mut y = [1f32; 6];
    w.matmul(&pool, &[], 2, &mut y);
    assert_eq!(y, [0.0; 6]);
    w.matmul_transposed(&pool, &[0.0; 6], 2, &mut []);
    let w = Matrix::new(Format::F32, 0, 3, &[]).unwrap();
    w.matmul(&pool, &[0.0; 6], 2, &mut []);
    let mut y = [1f32; 6];
    w.matmul_transposed(&pool, &[], 2, &mut y);
    assert_eq!(y, [0.0; 6]);
    assert_eq!(dot(&[], &[]), 0.0);
}
