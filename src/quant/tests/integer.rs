//! Compares products with rounded activations with a transcription of the definition, bit for bit, and with the exact product.

use super::super::dispatch::integer_kernel_for;
use super::*;

/// The formats that have integer products.
const INTEGER: [Format; 6] = [
    Format::Int8Row,
    Format::Int4Row,
    Format::Int2Row,
    Format::Int4Group(64),
    Format::Int4Group(128),
    Format::Int4Group(192),
];

/// Codes and scale of a block of activations.
fn round(x: &[f32]) -> (Vec<i32>, f32) {
    if x.iter().any(|x| !x.is_finite()) {
        return (vec![0; x.len()], f32::NAN);
    }
    let scale = x.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
    let code = |x: &f32| match scale > 0.0 {
        true => (x / scale).clamp(-127.0, 127.0).round_ties_even() as i32,
        false => 0,
    };
    (x.iter().map(code).collect(), scale)
}

/// The definition in `packed::integer`, column by column.
fn integer_reference(format: Format, (codes, factors): (&[f32], &[f32]), x: &[f32]) -> f32 {
    let per_byte = 64 / format.row_bytes(64).unwrap();
    let by_row = !matches!(format, Format::Int4Group(_));
    let mut lanes = [0f32; 16];
    for start in (0..codes.len()).step_by(64) {
        let block = start..codes.len().min(start + 64);
        let (rounded, scale) = round(&x[block.clone()]);
        let factor = match by_row {
            true => scale,
            false => scale * factors[start],
        };
        let mut sums = [0i32; 16];
        for (j, (code, x)) in codes[block].iter().zip(rounded).enumerate() {
            let place = j % per_byte * (64 / per_byte) + j / per_byte;
            sums[place / 4] += *code as i32 * x;
        }
        for (lane, sum) in lanes.iter_mut().zip(sums) {
            *lane = (sum as f32).mul_add(factor, *lane);
        }
    }
    for width in [8, 4, 2, 1] {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
    }
    match by_row && !codes.is_empty() {
        true => lanes[0] * factors[0],
        false => lanes[0],
    }
}

fn check_integer(coded: &Coded, x: &[f32]) {
    let (w, n) = (coded.matrix(), x.len() / coded.cols.max(1));
    let mut expected = Vec::new();
    for c in 0..n {
        let x = &x[c * w.cols()..(c + 1) * w.cols()];
        expected.extend((0..w.rows()).map(|r| integer_reference(w.format(), coded.row(r), x)));
    }
    for isa in Isa::available() {
        let kernel = integer_kernel_for(w.format(), isa).unwrap();
        let mut y = vec![f32::NAN; n * w.rows()];
        let mut parts: Vec<_> = y.chunks_mut(w.rows().max(1)).collect();
        kernel.matmul(w, &kernel.round(x, w.cols()), &mut parts);
        let (format, rows, cols) = (w.format(), w.rows(), w.cols());
        assert_eq!(
            bits(&y),
            bits(&expected),
            "{isa:?} {format} [{rows}, {cols}] x {n}"
        );
    }
}

#[test]
fn every_width_has_the_same_bits_on_every_instruction_set() {
    for format in INTEGER {
        for cols in 0..=270 {
            let (rows, n) = (1 + cols % 5, 1 + cols % 9);
            let mut random = Random(cols as u64 * 77 + 5);
            let coded = Coded::new(format, rows, cols, &mut random);
            check_integer(&coded, &random.values(n * cols, cols % 2 == 0));
        }
    }
}

/// No product is too large for the registers it is added in.
#[test]
fn extreme_codes_do_not_saturate() {
    for format in INTEGER {
        for byte in [0x00, 0x7f, 0x80, 0xff] {
            for sign in [1.0, -1.0] {
                let mut coded = Coded::new(format, 3, 256, &mut Random(9));
                coded.refill(byte);
                check_integer(&coded, &[sign; 2 * 256]);
            }
        }
    }
}

#[test]
fn formats_without_integer_products_are_exact() {
    let pool = Pool::new(1);
    for format in PACKED.iter().filter(|format| !INTEGER.contains(format)) {
        let mut random = Random(5);
        let coded = Coded::new(*format, 7, 150, &mut random);
        let x = random.values(150, false);
        let mut y = [[0f32; 7]; 2];
        for (y, activations) in y.iter_mut().zip([Activations::Exact, Activations::Int8]) {
            let w = coded.matrix().with_activations(activations);
            w.matmul(&pool, &x, 1, y);
        }
        assert_eq!(bits(&y[0]), bits(&y[1]), "{format}");
    }
}

proptest! {
    #[test]
    fn threads_tiles_and_columns_do_not_change_a_bit(
        format in 0..INTEGER.len(), rows in 1..500usize, cols in 1..700usize, n in 1..10usize, seed: u64,
    ) {
        let mut random = Random(seed | 1);
        let coded = Coded::new(INTEGER[format], rows, cols, &mut random);
        let w = coded.matrix().with_activations(Activations::Int8);
        let x = random.values(n * cols, seed % 4 == 0);
        let (one, three) = (Pool::new(1), Pool::new(3));
        let mut y = vec![0f32; n * rows];
        w.matmul(&three, &x, n, &mut y);
        for c in 0..n {
            let mut single = vec![0f32; rows];
            w.matmul(&one, &x[c * cols..(c + 1) * cols], 1, &mut single);
            prop_assert_eq!(bits(&single), bits(&y[c * rows..(c + 1) * rows]));
        }
        let (start, end) = (rows / 3, rows - rows / 4);
        let mut part = vec![0f32; end - start];
        w.slice_rows(start..end).matmul(&one, &x[..cols], 1, &mut part);
        prop_assert_eq!(bits(&part), bits(&y[start..end]));
    }

    /// An activation is off by at most half a scale, which bounds the error of an output. Errors are of either sign and add up to far less:
    /// never 2% of the product of the norms, with activations of all magnitudes from 1/16 to 8.
    #[test]
    fn rounding_changes_little(
        format in 0..INTEGER.len(), rows in 1..20usize, cols in 1..1500usize, seed: u64,
    ) {
        let mut random = Random(seed | 1);
        let coded = Coded::new(INTEGER[format], rows, cols, &mut random);
        let x = random.values(cols, false);
        let (exact, pool) = (coded.matrix(), Pool::new(1));
        let rounded = exact.with_activations(Activations::Int8);
        let (mut y, mut z) = (vec![0f32; rows], vec![0f32; rows]);
        exact.matmul(&pool, &x, 1, &mut y);
        rounded.matmul(&pool, &x, 1, &mut z);
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        for r in 0..rows {
            let (codes, factors) = coded.row(r);
            let weights = codes.iter().zip(factors).map(|(c, f)| f64::from(*c) * f64::from(*f));
            let mut bound = 0.0;
            for (block, w) in x.chunks(64).zip(weights.clone().collect::<Vec<_>>().chunks(64)) {
                let most = block.iter().fold(0f32, |most, x| most.max(x.abs()));
                bound += f64::from(most) / 254.0 * w.iter().map(|w| w.abs()).sum::<f64>();
            }
            let norms = norm(&mut weights.clone()) * norm(&mut x.iter().map(|x| f64::from(*x)));
            let error = f64::from((y[r] - z[r]).abs());
            prop_assert!(error <= 1.001 * bound + 1e-5 * norms, "{error} {bound}");
            prop_assert!(error <= 0.02 * norms, "{error} {norms}");
        }
    }

    #[test]
    fn infinite_and_nan_inputs_stay_visible(
        format in 0..INTEGER.len(), cols in 1..300usize, at: usize, kind in 0..3usize, seed: u64,
    ) {
        let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][kind];
        let mut random = Random(seed | 1);
        let mut coded = Coded::new(INTEGER[format], 2, cols, &mut random);
        let mut x = random.values(cols, false);
        let last = coded.scales.len() - 4;
        let pool = Pool::new(1);
        let mut y = [0f32; 2];
        let mut multiply = |coded: &Coded, x: &[f32]| {
            let w = coded.matrix().with_activations(Activations::Int8);
            w.matmul(&pool, x, 1, &mut y);
            y
        };
        let good = x[at % cols];
        x[at % cols] = bad;
        prop_assert!(multiply(&coded, &x).iter().all(|y| y.is_nan()));
        x[at % cols] = good;
        coded.scales[last..].copy_from_slice(&bad.to_le_bytes());
        prop_assert!(!multiply(&coded, &x)[1].is_finite());
    }
}
