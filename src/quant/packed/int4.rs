//! Decodes nibbles less 8, the low one first.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::Code;
use super::integer::Integer;
#[cfg(target_arch = "x86_64")]
use super::{integer::simd::Bytes, simd::Unpack};
#[cfg(target_arch = "x86_64")]
use crate::quant::register::instructions;

/// A nibble less 8.
pub struct Int4;

impl Code for Int4 {
    const PER_BYTE: usize = 2;
    const INTERLEAVED: bool = true;

    fn decode(byte: u8, field: usize) -> f32 {
        f32::from(byte >> (4 * field) & 15) - 8.0
    }
}

/// The upper two bytes of the value of every nibble, of which the lower two are 0.
#[cfg(target_arch = "x86_64")]
pub(super) const fn upper_bytes(values: &[f32; 16]) -> [[u8; 16]; 2] {
    let mut bytes = [[0; 16]; 2];
    let mut nibble = 0;
    while nibble < 16 {
        let [_, _, third, fourth] = values[nibble].to_le_bytes();
        (bytes[0][nibble], bytes[1][nibble]) = (third, fourth);
        nibble += 1;
    }
    bytes
}

#[cfg(target_arch = "x86_64")]
static UPPER_BYTES: [[u8; 16]; 2] = upper_bytes(&[
    -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
]);

impl Integer for Int4 {
    const OFFSET: i32 = 8;
}

#[cfg(target_arch = "x86_64")]
impl Unpack<__m256> for Int4 {
    /// For each nibble of a byte and each half, the upper two bytes of f32 values: those of even bytes, between those of odd ones.
    type Block = [[__m256i; 2]; 2];

    instructions! {
        // Two look-ups give thirty-two values at once. That is fewer instructions than to make one float of each.
        fn block(p: *const u8) -> [[__m256i; 2]; 2] = {
            let bytes = _mm256_loadu_si256(p.cast());
            // Bytes 0 to 7 and 16 to 23, then the others: what follows works on the halves of a register on their own.
            let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(bytes);
            let mask = _mm256_set1_epi8(15);
            let low = _mm256_and_si256(bytes, mask);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask);
            [values8(low, &UPPER_BYTES), values8(high, &UPPER_BYTES)]
        };
        fn codes(block: [[__m256i; 2]; 2], part: usize) -> [__m256; 4] = {
            let [low, high] = [block[0][part], block[1][part]];
            let odd = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                _mm256_castsi256_ps(_mm256_and_si256(low, odd)),
                _mm256_castsi256_ps(_mm256_and_si256(high, odd)),
            ]
        };
    }
}

/// The upper two bytes of the values of thirty-two nibbles, one a byte, where `table` has those of every nibble.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn values8(nibbles: __m256i, table: &[[u8; 16]; 2]) -> [__m256i; 2] {
    // SAFETY: 16 bytes each.
    let (third, fourth) = unsafe {
        (
            _mm_loadu_si128(table[0].as_ptr().cast()),
            _mm_loadu_si128(table[1].as_ptr().cast()),
        )
    };
    let third = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(third), nibbles);
    let fourth = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(fourth), nibbles);
    [
        _mm256_unpacklo_epi8(third, fourth),
        _mm256_unpackhi_epi8(third, fourth),
    ]
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
pub(super) unsafe fn look_up(p: *const u8, table: __m512) -> [__m512; 4] {
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
impl Unpack<__m512> for Int4 {
    type Block = *const u8;

    instructions! {
        fn block(p: *const u8) -> *const u8 = p;
        fn codes(p: *const u8, _part: usize) -> [__m512; 4] = look_up(p, values());
        // Sixteen products for a group's sixty-four weights.
        fn weights(p: *const u8, _part: usize, scale: __m512) -> [__m512; 4] =
            look_up(p, _mm512_mul_ps(values(), scale));
    }
}

#[cfg(target_arch = "x86_64")]
impl Bytes<__m256> for Int4 {
    instructions! {
        fn bytes(p: *const u8) -> [__m256i; 2] = {
            let bytes = _mm256_loadu_si256(p.cast());
            let mask = _mm256_set1_epi8(15);
            [_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi32::<4>(bytes), mask)]
        };
    }
}

#[cfg(target_arch = "x86_64")]
impl Bytes<__m512> for Int4 {
    instructions! {
        fn bytes(p: *const u8) -> __m512i = {
            let bytes = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast()));
            let fields = _mm512_srlv_epi64(bytes, _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4));
            _mm512_and_si512(fields, _mm512_set1_epi32(0x0f0f_0f0f))
        };
    }
}
