//! Decodes F8_E4M3: a sign, four exponent bits with a bias of 7, three mantissa bits, no infinities; 0x7f and 0xff are NaN.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::Code;
#[cfg(target_arch = "x86_64")]
use super::simd::Unpack;
#[cfg(target_arch = "x86_64")]
use crate::quant::register::instructions;

/// An F8_E4M3 value.
pub struct Fp8;

/// 2 to the difference of the exponent biases of F16 and F8_E4M3.
const BIAS: f32 = 256.0;

impl Code for Fp8 {
    const PER_BYTE: usize = 1;
    const INTERLEAVED: bool = false;

    fn decode(byte: u8, _: usize) -> f32 {
        if byte & 0x7f == 0x7f {
            return f32::NAN;
        }
        // The same fields in an F16, which has room for them; subnormal there where it is subnormal here.
        let bits = u16::from(byte & 0x7f) << 7 | u16::from(byte & 0x80) << 8;
        half::f16::from_bits(bits).to_f32() * BIAS
    }
}

// Always inlined, like the loops around it: a call for every 16 values costs a quarter of the speed.
#[cfg(target_arch = "x86_64")]
instructions! {
    // Sixteen bytes at `p` as F16, 2^-8 times too small.
    fn halves(p: *const u8) -> __m256i = {
        let words = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
        let magnitude = _mm256_and_si256(words, _mm256_set1_epi16(0x7f));
        let sign = _mm256_slli_epi16::<8>(_mm256_xor_si256(words, magnitude));
        let bits = _mm256_or_si256(_mm256_slli_epi16::<7>(magnitude), sign);
        let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
        _mm256_or_si256(bits, _mm256_and_si256(nan, _mm256_set1_epi16(0x7fff)))
    };
}

#[cfg(target_arch = "x86_64")]
impl Unpack<__m256> for Fp8 {
    /// The values of a block as F16: both parts take half of each register.
    type Block = [__m256i; 4];

    instructions! {
        fn block(p: *const u8) -> [__m256i; 4] = [
            halves(p),
            halves(p.add(16)),
            halves(p.add(32)),
            halves(p.add(48)),
        ];
        fn codes(block: [__m256i; 4], part: usize) -> [__m256; 4] = {
            let mut codes = [_mm256_setzero_ps(); 4];
            for (codes, halves) in codes.iter_mut().zip(block) {
                let halves = match part {
                    0 => _mm256_castsi256_si128(halves),
                    _ => _mm256_extracti128_si256::<1>(halves),
                };
                *codes = _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(BIAS));
            }
            codes
        };
    }
}

#[cfg(target_arch = "x86_64")]
impl Unpack<__m512> for Fp8 {
    type Block = *const u8;

    instructions! {
        fn block(p: *const u8) -> *const u8 = p;
        fn codes(p: *const u8, _part: usize) -> [__m512; 4] = {
            let mut codes = [_mm512_setzero_ps(); 4];
            for (k, codes) in codes.iter_mut().enumerate() {
                let halves = _mm512_cvtph_ps(halves(p.add(16 * k)));
                *codes = _mm512_mul_ps(halves, _mm512_set1_ps(BIAS));
            }
            codes
        };
    }
}
