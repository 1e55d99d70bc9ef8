//! Gives AVX2 and AVX-512 registers one interface, so that each inner loop is written once.
//!
//! A loop over a [`Register`] is `#[inline(always)]` and enables no instructions. It runs inside [`Register::run`], which enables them,
//! and there each function below becomes an instruction or two.

use std::arch::x86_64::*;

/// A register of f32 values.
///
/// # Safety of its functions
/// The CPU has the instructions ([`super::Isa`] is the proof of it), and what a pointer stands for is accessible. No alignment is needed.
pub trait Register: Copy {
    /// Values in it.
    const WIDTH: usize;

    /// Calls `f` where the instructions are enabled.
    unsafe fn run<T>(f: impl FnOnce() -> T) -> T;
    /// `value` everywhere.
    unsafe fn splat(value: f32) -> Self;
    /// Part `part` of sixteen values: `first` eight times, then `second`.
    unsafe fn halves(first: f32, second: f32, part: usize) -> Self;
    /// The `WIDTH` values at `p`.
    unsafe fn load(p: *const f32) -> Self;
    /// The first `n` (at most `WIDTH`) values at `p`, then +0. No more than `n` are read.
    unsafe fn load_first(p: *const f32, n: usize) -> Self;
    /// The `WIDTH` IEEE halves at `p`.
    unsafe fn load_f16(p: *const u8) -> Self;
    /// The `WIDTH` bfloat16 values at `p`.
    unsafe fn load_bf16(p: *const u8) -> Self;
    /// Writes `WIDTH` values to `p`.
    unsafe fn store(p: *mut f32, values: Self);
    /// `a + b`.
    unsafe fn add(a: Self, b: Self) -> Self;
    /// `a * b`.
    unsafe fn mul(a: Self, b: Self) -> Self;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self, b: Self, c: Self) -> Self;
    /// y[c][at + r] = the sum of the values of `registers[r][c]`: those half a register apart are added first, then a quarter, and so on.
    unsafe fn sums<const R: usize, const N: usize>(
        registers: &[[Self; N]; R],
        y: &mut [&mut [f32]],
        at: usize,
    );
}

/// Functions of one expression each, which becomes instructions in the caller.
macro_rules! instructions {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? = $body:expr;)+) => {
        $(
            #[inline(always)]
            #[allow(unused_unsafe)]
            unsafe fn $name($($arg: $type),*) $(-> $result)? {
                // SAFETY: the caller's promise.
                unsafe { $body }
            }
        )+
    };
}
pub(super) use instructions;

impl Register for __m256 {
    const WIDTH: usize = 8;

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run<T>(f: impl FnOnce() -> T) -> T {
        f()
    }

    instructions! {
        fn splat(value: f32) -> Self = _mm256_set1_ps(value);
        fn halves(first: f32, second: f32, part: usize) -> Self = match part {
            0 => _mm256_set1_ps(first),
            _ => _mm256_set1_ps(second),
        };
        fn load(p: *const f32) -> Self = _mm256_loadu_ps(p);
        fn load_first(p: *const f32, n: usize) -> Self = {
            let count = _mm256_set1_epi32(n.min(8) as i32);
            _mm256_maskload_ps(p, _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)))
        };
        fn load_f16(p: *const u8) -> Self = _mm256_cvtph_ps(_mm_loadu_si128(p.cast()));
        fn load_bf16(p: *const u8) -> Self = {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        };
        fn store(p: *mut f32, values: Self) = _mm256_storeu_ps(p, values);
        fn add(a: Self, b: Self) -> Self = _mm256_add_ps(a, b);
        fn mul(a: Self, b: Self) -> Self = _mm256_mul_ps(a, b);
        fn fma(a: Self, b: Self, c: Self) -> Self = _mm256_fmadd_ps(a, b, c);
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums<const R: usize, const N: usize>(
        registers: &[[Self; N]; R],
        y: &mut [&mut [f32]],
        at: usize,
    ) {
        for (r, registers) in registers.iter().enumerate() {
            for (y, register) in y.iter_mut().zip(registers) {
                y[at + r] = sum8(*register);
            }
        }
    }
}

impl Register for __m512 {
    const WIDTH: usize = 16;

    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn run<T>(f: impl FnOnce() -> T) -> T {
        f()
    }

    instructions! {
        fn splat(value: f32) -> Self = _mm512_set1_ps(value);
        fn halves(first: f32, second: f32, _part: usize) -> Self =
            _mm512_mask_mov_ps(_mm512_set1_ps(first), 0xff00, _mm512_set1_ps(second));
        fn load(p: *const f32) -> Self = _mm512_loadu_ps(p);
        fn load_first(p: *const f32, n: usize) -> Self = _mm512_maskz_loadu_ps(((1u32 << n.min(16)) - 1) as u16, p);
        fn load_f16(p: *const u8) -> Self = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        fn load_bf16(p: *const u8) -> Self = {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        };
        fn store(p: *mut f32, values: Self) = _mm512_storeu_ps(p, values);
        fn add(a: Self, b: Self) -> Self = _mm512_add_ps(a, b);
        fn mul(a: Self, b: Self) -> Self = _mm512_mul_ps(a, b);
        fn fma(a: Self, b: Self, c: Self) -> Self = _mm512_fmadd_ps(a, b, c);
    }

    /// A row of a small matrix has few blocks, and its sum takes as long as they do. So four sums are made together where there are four.
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    // Nested counts over several arrays read best as counts.
    #[allow(clippy::needless_range_loop)]
    unsafe fn sums<const R: usize, const N: usize>(
        registers: &[[Self; N]; R],
        y: &mut [&mut [f32]],
        at: usize,
    ) {
        if R == 4 {
            for c in 0..N {
                let sums = sum16_by_four(std::array::from_fn(|r| registers[r][c]));
                y[c][at..at + 4].copy_from_slice(&sums);
            }
        } else if N == 4 {
            for r in 0..R {
                let sums = sum16_by_four(std::array::from_fn(|c| registers[r][c]));
                for c in 0..N {
                    y[c][at + r] = sums[c];
                }
            }
        } else {
            for r in 0..R {
                for c in 0..N {
                    y[c][at + r] = sum16(registers[r][c]);
                }
            }
        }
    }
}

/// The lanes of R rows times N columns: as many registers of each as the lanes fill, the others are not used.
pub type Lanes<V, const R: usize, const N: usize> = [[[V; 4]; N]; R];

/// Adds the lanes in pairs: y[c][at + r] is the sum of those of row r and column c, which fill `count` registers.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
// Nested counts over several arrays read best as counts.
#[allow(clippy::needless_range_loop)]
pub unsafe fn add_lanes<V: Register, const R: usize, const N: usize>(
    mut lanes: Lanes<V, R, N>,
    count: usize,
    y: &mut [&mut [f32]],
    at: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut folded = [[V::splat(0.0); N]; R];
        for r in 0..R {
            for c in 0..N {
                let lanes = &mut lanes[r][c];
                if count == 4 {
                    (lanes[0], lanes[1]) = (V::add(lanes[0], lanes[2]), V::add(lanes[1], lanes[3]));
                }
                folded[r][c] = if count > 1 {
                    V::add(lanes[0], lanes[1])
                } else {
                    lanes[0]
                };
            }
        }
        V::sums(&folded, y, at);
    }
}

/// The sum of eight values: those 4 apart, then 2, 1.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum8(values: __m256) -> f32 {
    let four = _mm_add_ps(
        _mm256_castps256_ps128(values),
        _mm256_extractf128_ps::<1>(values),
    );
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    let one = _mm_add_ss(two, _mm_movehdup_ps(two));
    _mm_cvtss_f32(one)
}

#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn sum16(values: __m512) -> f32 {
    let low = _mm512_castps512_ps256(values);
    let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(values)));
    sum8(_mm256_add_ps(low, high))
}

/// Four sums in half as many instructions as one by one.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn sum16_by_four([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
    // Eight lanes of a, then of b.
    let ab = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
    );
    let cd = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b01_00_01_00>(c, d),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d),
    );
    // Four lanes of each.
    let four = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd),
    );
    let two = _mm512_add_ps(four, _mm512_permute_ps::<0b01_00_11_10>(four));
    let one = _mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
    // The first of every four is a sum.
    let firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    let sums = _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, one));
    let mut out = [0.0; 4];
    // SAFETY: `out` has room for four values.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
    out
}

/// How far ahead of the loads weights are prefetched, in bytes. The CPU's own prefetcher stops at page ends and leaves about 8% of
/// the memory bandwidth unused with 2-byte weights.
pub const AHEAD: usize = 2048;

/// Prefetches the `size` bytes that are [`AHEAD`] of `p`, which may be outside the matrix.
#[inline(always)]
pub fn prefetch(p: *const u8, size: usize) {
    for line in (0..size).step_by(64) {
        let at = p.wrapping_add(AHEAD + line);
        // The intrinsic is safe from some version of Rust on.
        #[allow(unused_unsafe)]
        // SAFETY: a prefetch has no effect on an address that cannot be read.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(at.cast())
        };
    }
}
