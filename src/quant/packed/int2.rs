//! Two-bit fields less 2, the lowest first.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::Code;
use super::integer::Integer;
#[cfg(target_arch = "x86_64")]
use super::{
    avx2::{Unpack8, fields},
    avx512::Unpack16,
    integer::{avx2::Bytes32, avx512::Bytes64},
};

/// A two-bit field less 2.
pub struct Int2;

impl Code for Int2 {
    const PER_BYTE: usize = 4;
    const INTERLEAVED: bool = true;

    fn decode(byte: u8, field: usize) -> f32 {
        f32::from(byte >> (2 * field) & 3) - 2.0
    }
}

#[cfg(target_arch = "x86_64")]
impl Unpack8 for Int2 {
    type Block = *const u8;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn block8(p: *const u8) -> *const u8 {
        p
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes8(p: *const u8, half: usize) -> [__m256; 4] {
        // SAFETY: 8 + 8 bytes at most, which the caller promises.
        let bytes = unsafe { _mm_loadl_epi64(p.add(8 * half).cast()) };
        fields::<2, 2>(_mm256_cvtepu8_epi32(bytes))
    }
}

#[cfg(target_arch = "x86_64")]
impl Unpack16 for Int2 {
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn codes16(p: *const u8) -> [__m512; 4] {
        // SAFETY: the caller's promise.
        let words = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(p.cast()) });
        // A permutation looks at four bits; the upper two do not matter.
        let table = _mm512_castsi512_ps(_mm512_broadcast_i32x4(_mm_castps_si128(_mm_setr_ps(
            -2.0, -1.0, 0.0, 1.0,
        ))));
        [
            _mm512_permutexvar_ps(words, table),
            _mm512_permutexvar_ps(_mm512_srli_epi32::<2>(words), table),
            _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(words), table),
            _mm512_permutexvar_ps(_mm512_srli_epi32::<6>(words), table),
        ]
    }
}

impl Integer for Int2 {
    const OFFSET: i32 = 2;
}

#[cfg(target_arch = "x86_64")]
impl Bytes32 for Int2 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes32(p: *const u8) -> [__m256i; 2] {
        // SAFETY: 16 bytes, which the caller promises.
        let bytes = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(p.cast()) });
        let fields = _mm256_srlv_epi32(bytes, _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2));
        let mask = _mm256_set1_epi8(3);
        [
            _mm256_and_si256(fields, mask),
            _mm256_and_si256(_mm256_srli_epi32::<4>(fields), mask),
        ]
    }
}

#[cfg(target_arch = "x86_64")]
impl Bytes64 for Int2 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma,f16c")]
    unsafe fn bytes64(p: *const u8) -> __m512i {
        // SAFETY: 16 bytes, which the caller promises.
        let bytes = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(p.cast()) });
        let shifts = _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6);
        let fields = _mm512_srlv_epi64(bytes, shifts);
        _mm512_and_si512(fields, _mm512_set1_epi32(0x0303_0303))
    }
}
