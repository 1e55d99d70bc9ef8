//! Decodes signed bytes.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::Code;
use super::integer::Integer;
#[cfg(target_arch = "x86_64")]
use super::{integer::simd::Bytes, simd::Unpack};
#[cfg(target_arch = "x86_64")]
use crate::quant::register::instructions;

/// A signed byte.
pub struct Int8;

impl Code for Int8 {
    const PER_BYTE: usize = 1;
    const INTERLEAVED: bool = false;

    fn decode(byte: u8, _: usize) -> f32 {
        f32::from(byte as i8)
    }
}

impl Integer for Int8 {
    const OFFSET: i32 = 128;
}

#[cfg(target_arch = "x86_64")]
impl Unpack<__m256> for Int8 {
    type Block = *const u8;

    instructions! {
        fn block(p: *const u8) -> *const u8 = p;
        fn codes(p: *const u8, part: usize) -> [__m256; 4] = {
            let mut codes = [_mm256_setzero_ps(); 4];
            for (k, codes) in codes.iter_mut().enumerate() {
                let bytes = _mm_loadl_epi64(p.add(16 * k + 8 * part).cast());
                *codes = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
            }
            codes
        };
    }
}

#[cfg(target_arch = "x86_64")]
impl Unpack<__m512> for Int8 {
    type Block = *const u8;

    instructions! {
        fn block(p: *const u8) -> *const u8 = p;
        fn codes(p: *const u8, _part: usize) -> [__m512; 4] = {
            let mut codes = [_mm512_setzero_ps(); 4];
            for (k, codes) in codes.iter_mut().enumerate() {
                let bytes = _mm_loadu_si128(p.add(16 * k).cast());
                *codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
            }
            codes
        };
    }
}

#[cfg(target_arch = "x86_64")]
impl Bytes<__m256> for Int8 {
    instructions! {
        fn bytes(p: *const u8) -> [__m256i; 2] = {
            let offset = _mm256_set1_epi8(-128);
            [
                _mm256_xor_si256(_mm256_loadu_si256(p.cast()), offset),
                _mm256_xor_si256(_mm256_loadu_si256(p.add(32).cast()), offset),
            ]
        };
    }
}

#[cfg(target_arch = "x86_64")]
impl Bytes<__m512> for Int8 {
    instructions! {
        fn bytes(p: *const u8) -> __m512i =
            _mm512_xor_si512(_mm512_loadu_si512(p.cast()), _mm512_set1_epi32(0x8080_8080_u32 as i32));
    }
}
