//! Signed bytes.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::Code;
#[cfg(target_arch = "x86_64")]
use super::{avx2::Unpack8, avx512::Unpack16};

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
