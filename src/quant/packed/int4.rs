//! Nibbles less 8, the low one first.

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

/// A nibble less 8.
pub struct Int4;

impl Code for Int4 {
    const PER_BYTE: usize = 2;
    const INTERLEAVED: bool = true;

    fn decode(byte: u8, field: usize) -> f32 {
        f32::from(byte >> (4 * field) & 15) - 8.0
    }
}

#[cfg(target_arch = "x86_64")]
impl Unpack8 for Int4 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes8(p: *const u8, half: usize) -> [__m256; 4] {
        // SAFETY: 16 + 16 bytes at most, which the caller promises.
        let bytes = unsafe { _mm_loadu_si128(p.add(16 * half).cast()) };
        fields::<4, 8>(_mm256_cvtepu16_epi32(bytes))
    }
}

/// The value of every nibble.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn values() -> __m512 {
    _mm512_setr_ps(
        -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
    )
}

/// What `table` holds for the four nibbles of sixteen 16-bit words: a permutation looks at the low four bits alone.
///
/// # Safety
/// 32 bytes at `p` are readable.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn look_up(p: *const u8, table: __m512) -> [__m512; 4] {
    // SAFETY: the caller's promise.
    let words = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(p.cast()) });
    [
        _mm512_permutexvar_ps(words, table),
        _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(words), table),
        _mm512_permutexvar_ps(_mm512_srli_epi32::<8>(words), table),
        _mm512_permutexvar_ps(_mm512_srli_epi32::<12>(words), table),
    ]
}

#[cfg(target_arch = "x86_64")]
impl Unpack16 for Int4 {
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn codes16(p: *const u8) -> [__m512; 4] {
        // SAFETY: the caller's promise.
        unsafe { look_up(p, values()) }
    }

    // Sixteen products for a group's sixty-four weights.
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn weights16(p: *const u8, scale: __m512) -> [__m512; 4] {
        // SAFETY: the caller's promise.
        unsafe { look_up(p, _mm512_mul_ps(values(), scale)) }
    }
}

impl Integer for Int4 {
    const OFFSET: i32 = 8;
}

#[cfg(target_arch = "x86_64")]
impl Bytes32 for Int4 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes32(p: *const u8) -> [__m256i; 2] {
        // SAFETY: 32 bytes, which the caller promises.
        let bytes = unsafe { _mm256_loadu_si256(p.cast()) };
        let mask = _mm256_set1_epi8(15);
        [
            _mm256_and_si256(bytes, mask),
            _mm256_and_si256(_mm256_srli_epi32::<4>(bytes), mask),
        ]
    }
}

#[cfg(target_arch = "x86_64")]
impl Bytes64 for Int4 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma,f16c")]
    unsafe fn bytes64(p: *const u8) -> __m512i {
        // SAFETY: 32 bytes, which the caller promises.
        let bytes = _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(p.cast()) });
        let shifts = _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4);
        let fields = _mm512_srlv_epi64(bytes, shifts);
        _mm512_and_si512(fields, _mm512_set1_epi32(0x0f0f_0f0f))
    }
}
