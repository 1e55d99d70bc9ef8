//! Decodes FP4 (E2M1): a sign, two exponent bits with a bias of 1, one mantissa bit; the low nibble first.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::Code;
#[cfg(target_arch = "x86_64")]
use super::int4::{Int4, look_up, upper_bytes, values8};
#[cfg(target_arch = "x86_64")]
use super::simd::Unpack;
#[cfg(target_arch = "x86_64")]
use crate::quant::register::instructions;

/// An FP4 value.
pub struct Fp4;

/// The value of every nibble.
static VALUES: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

impl Code for Fp4 {
    const PER_BYTE: usize = 2;
    const INTERLEAVED: bool = true;

    fn decode(byte: u8, field: usize) -> f32 {
        VALUES[usize::from(byte >> (4 * field) & 15)]
    }
}

#[cfg(target_arch = "x86_64")]
static UPPER_BYTES: [[u8; 16]; 2] = upper_bytes(&VALUES);

#[cfg(target_arch = "x86_64")]
impl Unpack<__m256> for Fp4 {
    /// As that of [`Int4`].
    type Block = [[__m256i; 2]; 2];

    instructions! {
        fn block(p: *const u8) -> [[__m256i; 2]; 2] = {
            let bytes = _mm256_loadu_si256(p.cast());
            let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(bytes);
            let mask = _mm256_set1_epi8(15);
            let low = _mm256_and_si256(bytes, mask);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask);
            [values8(low, &UPPER_BYTES), values8(high, &UPPER_BYTES)]
        };
        fn codes(block: [[__m256i; 2]; 2], part: usize) -> [__m256; 4] =
            <Int4 as Unpack<__m256>>::codes(block, part);
    }
}

#[cfg(target_arch = "x86_64")]
impl Unpack<__m512> for Fp4 {
    type Block = *const u8;

    instructions! {
        fn block(p: *const u8) -> *const u8 = p;
        fn codes(p: *const u8, _part: usize) -> [__m512; 4] =
            look_up(p, _mm512_loadu_ps(VALUES.as_ptr()));
    }
}
