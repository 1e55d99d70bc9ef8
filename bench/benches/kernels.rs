//! Speed of the matrix-vector products next to the memory they stream from.
//!
//! `cargo bench -p colibri-bench --bench kernels -- [MIB] [SECTION] [isa=avx2]` with the size of the large matrix
//! (default 1024, at least 32: it should be larger than the last-level cache), a word of one section's title to run only that, and
//! an instruction set to use instead of the best (portable, avx2, avx512). The weights of the engine are on huge pages;
//! `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` gives the bench them too. Every round runs all cases once, so that drift of the
//! machine hits them alike; medians are printed.

use std::hint::black_box;
use std::time::Instant;

use colibri_uring::pool::Pool;
use colibri_uring::quant::{Activations, Format, Isa, Matrix};

const FORMATS: [Format; 8] = [
    Format::F32,
    Format::F16,
    Format::Bf16,
    Format::Int8Row,
    Format::Int4Row,
    Format::Int4Group(64),
    Format::Int2Row,
    Format::Fp8Block,
];
/// The formats that may have activations rounded to int8.
const INTEGER: [Format; 4] = [
    Format::Int8Row,
    Format::Int4Row,
    Format::Int4Group(64),
    Format::Int2Row,
];
const COLS: usize = 6144;
/// Rows of an expert's gate and up, and columns of its down.
const INTERMEDIATE: usize = 2048;
const ROUNDS: usize = 9;

/// A measured thing: its name, work per run (bytes or multiply-adds) and what runs it.
struct Case<'a> {
    name: String,
    work: f64,
    run: Box<dyn FnMut() + 'a>,
}

/// Whether the section called `title` was asked for.
fn selected(title: &str) -> bool {
    let mut words = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--") && !arg.contains('=') && arg.parse::<usize>().is_err())
        .peekable();
    words.peek().is_none() || words.any(|word| title.contains(&word))
}

/// Runs the cases in turn, `ROUNDS` times, and prints the median of work per nanosecond, and the best: where other
/// programs take turns with the bench, that is nearer to what the machine can do.
fn measure(title: &str, unit: &str, cases: &mut [Case<'_>]) {
    if !selected(title) {
        return;
    }
    println!("\n{title}");
    let mut times = vec![Vec::new(); cases.len()];
    for round in 0..=ROUNDS {
        for (case, times) in cases.iter_mut().zip(&mut times) {
            let start = Instant::now();
            (case.run)();
            if round > 0 {
                times.push(start.elapsed().as_nanos() as f64);
            }
        }
    }
    for (case, times) in cases.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!(
            "  {:<28} {:>9.2} {unit}   best {:>9.2}   {:>12.1} us",
            case.name,
            case.work / median,
            case.work / times[0],
            median / 1e3
        );
    }
}

/// Adds up `bytes` in tiles over the pool: no work but reading.
fn read_all(pool: &Pool, bytes: &[u8]) {
    let tile = 128 << 10;
    pool.run(bytes.len().div_ceil(tile), &|i| {
        let part = &bytes[i * tile..bytes.len().min((i + 1) * tile)];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2.
            return unsafe { read_avx2(part) };
        }
        read(part);
    });
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2(bytes: &[u8]) {
    read(bytes);
}

#[inline(always)]
fn read(bytes: &[u8]) {
    let mut sums = [0u64; 16];
    for block in bytes.chunks_exact(128) {
        for (sum, word) in sums.iter_mut().zip(block.chunks_exact(8)) {
            *sum = sum.wrapping_add(u64::from_le_bytes(word.try_into().unwrap()));
        }
    }
    black_box(sums);
}

/// The largest matrix of whole rows that `bytes` hold together with its scales.
fn matrix(format: Format, bytes: &[u8], cols: usize) -> Matrix<'_> {
    let row = format.row_bytes(cols).unwrap();
    let rows = bytes.len() / (row + 4 * format.row_scales(cols));
    let scales = format.scale_bytes(rows, cols).unwrap();
    let (scales, weights) = bytes.split_at(scales);
    Matrix::with_scales(format, rows, cols, &weights[..rows * row], scales).unwrap()
}

/// Bytes of the weights and their scales.
fn stored(w: Matrix<'_>) -> f64 {
    (w.bytes().len() + w.scales().len()) as f64
}

/// Makes the products use the instruction set that was asked for.
fn impose_isa() {
    let Some(name) = std::env::args().find_map(|arg| Some(arg.strip_prefix("isa=")?.to_owned()))
    else {
        return;
    };
    let named = |isa: &Isa| format!("{isa:?}").eq_ignore_ascii_case(&name);
    let isa = Isa::available().into_iter().find(named);
    assert!(
        isa.is_some_and(Isa::impose),
        "this CPU has no {name}, only {:?}",
        Isa::available()
    );
}

fn main() {
    impose_isa();
    let mib: usize = std::env::args()
        .skip(1)
        .find_map(|arg| arg.parse().ok())
        .unwrap_or(1024);
    // Small floats in every format; an odd start, as payloads of tensors have.
    let buffer: Vec<u8> = (0..(mib << 20) + 1)
        .map(|i| if i % 2 == 1 { (i >> 3) as u8 } else { 0x3c })
        .collect();
    let bytes = &buffer[1..];
    let all = std::thread::available_parallelism().map_or(2, |n| n.get());
    let pools: Vec<Pool> = [1, 2, all]
        .into_iter()
        .take(if all > 2 { 3 } else { 2 })
        .map(Pool::new)
        .collect();
    let x = vec![0.5f32; 64 * COLS];

    let mut cases = Vec::new();
    for pool in &pools {
        let threads = pool.threads();
        cases.push(Case {
            name: format!("memory read, {threads} threads"),
            work: bytes.len() as f64,
            run: Box::new(move || read_all(pool, bytes)),
        });
        let exact = FORMATS.map(|format| (format, Activations::Exact));
        let rounded = INTEGER.map(|format| (format, Activations::Int8));
        for (format, activations) in exact.into_iter().chain(rounded) {
            let w = matrix(format, bytes, COLS).with_activations(activations);
            let (mut y, x) = (vec![0f32; w.rows()], &x);
            let note = match activations {
                Activations::Exact => "",
                Activations::Int8 => " x int8",
            };
            cases.push(Case {
                name: format!("{format}{note}, {threads} threads"),
                work: stored(w),
                run: Box::new(move || w.matmul(pool, &x[..COLS], 1, &mut y)),
            });
        }
    }
    measure(
        &format!("Matrix-vector, {mib} MiB of weights, {COLS} columns"),
        "GB/s",
        &mut cases,
    );

    // An expert's matrix at a time, each from another place, is what decode does.
    let mut cases = Vec::new();
    for format in [Format::Int4Group(64), Format::Int8Row] {
        for (rows, cols) in [(INTERMEDIATE, COLS), (COLS, INTERMEDIATE)] {
            for pool in &pools {
                let all = matrix(format, bytes, cols);
                let count = all.rows() / rows;
                let (mut y, x) = (vec![0f32; rows], &x);
                cases.push(Case {
                    name: format!("{format} [{rows}, {cols}], {} threads", pool.threads()),
                    work: stored(all.slice_rows(0..rows)) * count as f64,
                    run: Box::new(move || {
                        for i in 0..count {
                            let w = all.slice_rows(i * rows..(i + 1) * rows);
                            w.matmul(pool, &x[..cols], 1, &mut y);
                        }
                    }),
                });
            }
        }
    }
    measure(
        &format!("Experts' matrices in turn, {mib} MiB"),
        "GB/s",
        &mut cases,
    );

    // How large a matrix must be to be worth sharing.
    let mut cases = Vec::new();
    for kib in [16, 64, 128, 256, 1024, 24 << 10] {
        for pool in &pools {
            let (mut at, x) = (0, &x);
            let w = matrix(Format::Bf16, &bytes[..kib << 10], 1024);
            let mut y = vec![0f32; w.rows()];
            let repeats = (48 << 10) / kib;
            cases.push(Case {
                name: format!("{kib} KiB, {} threads", pool.threads()),
                work: (w.bytes().len() * repeats) as f64,
                run: Box::new(move || {
                    for _ in 0..repeats {
                        at = (at + w.bytes().len()) % (bytes.len() - w.bytes().len());
                        let bytes = &bytes[at..at + w.bytes().len()];
                        let w = Matrix::new(w.format(), w.rows(), w.cols(), bytes).unwrap();
                        w.matmul(pool, &x[..1024], 1, &mut y);
                    }
                }),
            });
        }
    }
    measure(
        "Matrix-vector, BF16, 1024 columns, small matrices back to back (48 MiB in all)",
        "GB/s",
        &mut cases,
    );

    // Arithmetic alone: the weights stay in the second-level cache.
    let mut cases = Vec::new();
    let exact = FORMATS.map(|format| (format, Activations::Exact));
    let rounded = INTEGER.map(|format| (format, Activations::Int8));
    for (format, activations) in exact.into_iter().chain(rounded) {
        let w = matrix(format, &bytes[..384 << 10], 1024).with_activations(activations);
        let (mut y, x, pool) = (vec![0f32; w.rows()], &x, &pools[0]);
        cases.push(Case {
            name: format!("{format}, activations {activations:?}"),
            work: 10.0 * stored(w),
            run: Box::new(move || (0..10).for_each(|_| w.matmul(pool, &x[..1024], 1, &mut y))),
        });
    }
    measure(
        "Cached weights, 384 KiB, 1 thread, matrix-vector",
        "GB/s",
        &mut cases,
    );

    // The matrices of the demo model, and rows of its KV cache: a row's sum takes as long as its products.
    let mut cases = Vec::new();
    for (format, cols) in [
        (Format::Int4Group(64), 128),
        (Format::Int4Group(64), 256),
        (Format::Int8Row, 256),
        (Format::F32, 144),
    ] {
        for n in [1, 2, 4] {
            let size = format.row_bytes(cols).unwrap() + 4 * format.row_scales(cols);
            let w = matrix(format, &bytes[..256 * size], cols);
            let (mut y, x, pool) = (vec![0f32; n * w.rows()], &x, &pools[0]);
            cases.push(Case {
                name: format!("{format} [{}, {cols}], {n} vectors", w.rows()),
                work: 100.0 * (n * w.rows() * cols) as f64,
                run: Box::new(move || {
                    (0..100).for_each(|_| w.matmul(pool, &x[..n * cols], n, &mut y));
                }),
            });
        }
    }
    measure(
        "Small cached matrices, 1 thread",
        "G multiply-adds/s",
        &mut cases,
    );

    for format in [Format::Bf16, Format::Int8Row, Format::Int4Group(64)] {
        let mut cases = Vec::new();
        for n in [1, 2, 3, 4, 8, 16, 64] {
            for pool in &pools {
                let x = &x;
                let w = matrix(format, &bytes[..24 << 20], COLS);
                let mut y = vec![0f32; n * w.rows()];
                cases.push(Case {
                    name: format!("{n} vectors, {} threads", pool.threads()),
                    work: (n * w.rows() * COLS) as f64,
                    run: Box::new(move || w.matmul(pool, &x[..n * COLS], n, &mut y)),
                });
            }
        }
        measure(
            &format!("Several vectors, {format}, 24 MiB"),
            "G multiply-adds/s",
            &mut cases,
        );
    }

    // The absorbed key projection of an attention layer: a block of rows a head.
    let mut cases = Vec::new();
    for format in [
        Format::Bf16,
        Format::Int8Row,
        Format::Int4Group(64),
        Format::Fp8Block,
    ] {
        for pool in &pools {
            const HEADS: usize = 64;
            let w = matrix(format, &bytes[..24 << 20], 512);
            let rows = w.rows() / HEADS;
            let (x, mut y) = (vec![0.5f32; w.rows()], vec![0f32; HEADS * 512]);
            cases.push(Case {
                name: format!("{format}, {} threads", pool.threads()),
                work: stored(w),
                run: Box::new(move || {
                    pool.run_chunks(&mut y, 512, &|head, y| {
                        let rows = head * rows..(head + 1) * rows;
                        let x = &x[rows.clone()];
                        w.slice_rows(rows).matmul_transposed(pool, x, 1, y);
                    });
                }),
            });
        }
    }
    measure(
        "Transposed, 24 MiB, 64 heads of 512 columns",
        "GB/s",
        &mut cases,
    );

    let pool = &pools[1];
    let hand_off = |pause_us: u64| {
        let mut times: Vec<_> = (0..1000)
            .map(|_| {
                let pause = Instant::now();
                while pause.elapsed().as_micros() < u128::from(pause_us) {
                    std::hint::spin_loop();
                }
                let start = Instant::now();
                pool.run(2, &|_| {});
                start.elapsed().as_nanos() as f64
            })
            .collect();
        times.sort_by(f64::total_cmp);
        (times[500] / 1e3, times[990] / 1e3)
    };
    let title = "An empty loop of two tiles on two threads (median, p99)";
    if !selected(title) {
        return;
    }
    println!("\n{title}");
    for pause in [0, 3, 20, 200] {
        let (median, p99) = hand_off(pause);
        println!("  {pause:>4} us after the last: {median:.2} us, {p99:.2} us");
    }
}
