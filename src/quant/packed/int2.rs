//! Decodes two-bit fields less 2, the lowest first.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::Code;
use super::integer::Integer;
#[cfg(target_arch = "x86_64")]
use super::{
    integer::simd::Bytes,
    simd::{Unpack, fields},
};
#[cfg(target_arch = "x86_64")]
use crate::quant::register::instructions;

/// A two-bit field less 2.
pub struct Int2;

impl Code for Int2 {
    const PER_BYTE: usize = 4;
    const INTERLEAVED: bool = true;

    fn decode(byte: u8, field: usize) -> f32 {
        f32::from(byte >> (2 * field) & 3) - 2.0
    }
}

impl Integer for Int2 {
    const OFFSET: i32 = 2;
}

#[cfg(target_arch = "x86_64")]
impl Unpack<__m256> for Int2 {
    type Block = *const u8;

    instructions! {
        fn block(p: *const u8) -> *const u8 = p;
        fn codes(p: *const u8, part: usize) -> [__m256; 4] =
            fields::<2, 2>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8 * part).cast())));
    }
}

#[cfg(target_arch = "x86_64")]
impl Unpack<__m512> for Int2 {
    type Block = *const u8;

    instructions! {
        fn block(p: *const u8) -> *const u8 = p;
        fn codes(p: *const u8, _part: usize) -> [__m512; 4] = {
            let words = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            // A permutation looks at four bits; the upper two do not matter.
            let values = _mm_castps_si128(_mm_setr_ps(-2.0, -1.0, 0.0, 1.0));
            let table = _mm512_castsi512_ps(_mm512_broadcast_i32x4(values));
            [
                _mm512_permutexvar_ps(words, table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<2>(words), table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(words), table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<6>(words), table),
            ]
        };
    }
}

#[cfg(target_arch = "x86_64")]
impl Bytes<__m256> for Int2 {
    instructions! {
        fn bytes(p: *const u8) -> [__m256i; 2] = {
            let bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
            let fields = _mm256_srlv_epi32(bytes, _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2));
            let mask = _mm256_set1_epi8(3);
            [_mm256_and_si256(fields, mask), _mm256_and_si256(_mm256_srli_epi32::<4>(fields), mask)]
        };
    }
}

#[cfg(target_arch = "x86_64")]
impl Bytes<__m512> for Int2 {
    instructions! {
        fn bytes(p: *const u8) -> __m512i = {
            let bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast()));
            let fields = _mm512_srlv_epi64(bytes, _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6));
            _mm512_and_si512(fields, _mm512_set1_epi32(0x0303_0303))
        };
    }
}
