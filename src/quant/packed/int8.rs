//! Signed bytes.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::Code;
use super::integer::Integer;
#[cfg(target_arch = "x86_64")]
use super::{avx2::Unpack8, avx512::Unpack16, integer::avx2::Bytes32, integer::avx512::Bytes64};

/// A signed byte.
pub struct Int8;

impl Code for Int8 {
    const PER_BYTE: usize = 1;
    const INTERLEAVED: bool = false;

    fn decode(byte: u8, _: usize) -> f32 {
        f32::from(byte as i8)
    }
}

#[cfg(target_arch = "x86_64")]
impl Unpack8 for Int8 {
    type Block = *const u8;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn block8(p: *const u8) -> *const u8 {
        p
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes8(p: *const u8, half: usize) -> [__m256; 4] {
        // SAFETY: 16 * 3 + 8 + 8 bytes at most, which the caller promises.
        std::array::from_fn(|k| unsafe {
            let bytes = _mm_loadl_epi64(p.add(16 * k + 8 * half).cast());
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
        })
    }
}

#[cfg(target_arch = "x86_64")]
impl Unpack16 for Int8 {
    #[inline]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    unsafe fn codes16(p: *const u8) -> [__m512; 4] {
        // SAFETY: 64 bytes, which the caller promises.
        std::array::from_fn(|k| unsafe {
            let bytes = _mm_loadu_si128(p.add(16 * k).cast());
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
        })
    }
}

impl Integer for Int8 {
    const OFFSET: i32 = 128;
}

#[cfg(target_arch = "x86_64")]
impl Bytes32 for Int8 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes32(p: *const u8) -> [__m256i; 2] {
        let offset = _mm256_set1_epi8(-128);
        // SAFETY: 64 bytes, which the caller promises.
        std::array::from_fn(|half| unsafe {
            _mm256_xor_si256(_mm256_loadu_si256(p.add(32 * half).cast()), offset)
        })
    }
}

#[cfg(target_arch = "x86_64")]
impl Bytes64 for Int8 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma,f16c")]
    unsafe fn bytes64(p: *const u8) -> __m512i {
        // SAFETY: 64 bytes, which the caller promises.
        let bytes = unsafe { _mm512_loadu_si512(p.cast()) };
        _mm512_xor_si512(bytes, _mm512_set1_epi32(0x8080_8080_u32 as i32))
    }
}
