//! Every path on this CPU gives the bits of a scalar transcription of the reduction order.

use super::kernel::{Isa, kernel_for};
use super::*;
use half::{bf16, f16};
use proptest::prelude::*;

const FORMATS: [Format; 3] = [Format::F32, Format::F16, Format::Bf16];

/// A small generator, so that a case is one number.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A value of order 1; now and then one from the edges when `edges` is set.
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

/// `values` in `format`, at an odd address, and what they became.
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
                Format::Bf16 => {
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

/// The module's definition, written down element by element.
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
fn every_width_has_the_same_bits_on_every_path() {
    for format in FORMATS {
        for cols in 0..=200 {
            let (rows, n) = (1 + cols % 5, 1 + cols % 9);
            check(format, rows, cols, n, cols as u64 * 77 + 5, false);
        }
    }
}

proptest! {
    #[test]
    fn edge_values_have_the_same_bits_on_every_path(
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
        let weights = &stored.values[(rows - 1) * cols..];
        prop_assert_eq!(dot(weights, &x[..cols]).to_bits(), y[rows - 1].to_bits());
        let last = w.rows(rows - 1..rows);
        let mut single = [0f32];
        last.matmul(&one, &x[..cols], 1, &mut single);
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
        "a BF16 matrix [2, 3] takes 12 bytes, not 11"
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
