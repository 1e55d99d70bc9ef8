//! Values from a counter: any piece of a tensor can be made on its own, in any order, on any thread.

use half::bf16;

use super::tensors::Content;

/// The values of one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    key: u64,
    content: Content,
}

impl Source {
    /// The values of the tensor `name` in the model of this seed.
    pub(super) fn new(seed: u64, name: &str, content: Content) -> Source {
        // FNV-1a: names differ in a digit or two, and the mixing does the rest.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Source {
            key: mix(hash ^ mix(seed)),
            content,
        }
    }

    /// The bytes of the tensor from its byte `at` on, which is a multiple of 8.
    pub(super) fn fill(&self, at: u64, out: &mut [u8]) {
        let random = |word: usize| self.word(at / 8 + word as u64);
        match self.content {
            Content::Hole => out.fill(0),
            Content::Nibbles => words(out, |i| without_zero_nibbles(random(i))),
            Content::Bytes => words(out, |i| without_lowest_bytes(random(i))),
            Content::Fields => words(out, |i| without_zero_fields(random(i))),
            Content::Exponents { centre } => words(out, |i| {
                // The centre or one less.
                let centres = u64::from_le_bytes([centre; 8]);
                centres - (random(i) & 0x0101_0101_0101_0101)
            }),
            Content::Bf16 { bound } => words(out, |i| {
                let bits = random(i);
                let value = |k: u32| {
                    let x = bf16::from_f32(uniform((bits >> (16 * k)) as u16, bound));
                    u64::from(x.to_bits()) << (16 * k)
                };
                value(0) | value(1) | value(2) | value(3)
            }),
            Content::F32 { centre, bound } => words(out, |i| {
                let bits = random(i);
                let value = |k: u32| {
                    let x = centre + uniform((bits >> (32 * k + 16)) as u16, bound);
                    u64::from(x.to_bits()) << (32 * k)
                };
                value(0) | value(1)
            }),
        }
    }

    fn word(&self, counter: u64) -> u64 {
        mix(self
            .key
            .wrapping_add(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }
}

/// The finaliser of SplitMix64.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Fills `out` with little-endian words, the last one cut.
fn words(out: &mut [u8], word: impl Fn(usize) -> u64) {
    let whole = out.len() / 8;
    let mut chunks = out.chunks_exact_mut(8);
    for (i, chunk) in chunks.by_ref().enumerate() {
        chunk.copy_from_slice(&word(i).to_le_bytes());
    }
    let rest = chunks.into_remainder();
    let last = word(whole).to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Symmetric around zero, never quite `bound`.
fn uniform(bits: u16, bound: f32) -> f32 {
    ((f32::from(bits) + 0.5) / 32768.0 - 1.0) * bound
}

/// Nibbles mean their value less 8: without 0 they are symmetric around 8, which replaces it.
fn without_zero_nibbles(x: u64) -> u64 {
    const ONES: u64 = 0x1111_1111_1111_1111;
    let any = x | (x >> 1) | (x >> 2) | (x >> 3);
    x | ((!any & ONES) << 3)
}

/// Fields of two bits mean their value less 2: as nibbles.
fn without_zero_fields(x: u64) -> u64 {
    const ONES: u64 = 0x5555_5555_5555_5555;
    let any = x | (x >> 1);
    x | ((!any & ONES) << 1)
}

/// Replaces bytes of -128 by 0.
fn without_lowest_bytes(x: u64) -> u64 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    // The top bit of a byte of `any` tells whether one of its lower seven bits is set.
    let any = (x & LOW) + LOW;
    x & (any | LOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(name: &str, content: Content, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        Source::new(7, name, content).fill(0, &mut out);
        out
    }

    #[test]
    fn codes_are_symmetric_around_zero() {
        const N: usize = 1 << 16;
        let check = |codes: &[i32], bound: i32| {
            let mut counts = vec![0i64; (2 * bound + 1) as usize];
            codes.iter().for_each(|c| counts[(c + bound) as usize] += 1);
            let ones = codes.len() as i64 / (2 * i64::from(bound) + 2);
            for (i, count) in counts.iter().enumerate() {
                let expected = if i as i32 == bound { 2 * ones } else { ones };
                assert!((count - expected).abs() < expected / 4 + 1, "{i}: {count}");
            }
        };
        let nibbles = bytes("a", Content::Nibbles, N);
        let split = |b: &u8| [i32::from(b & 15) - 8, i32::from(b >> 4) - 8];
        check(&nibbles.iter().flat_map(split).collect::<Vec<_>>(), 7);
        let fields = bytes("a", Content::Fields, N);
        let split = |b: &u8| [0, 2, 4, 6].map(|k| i32::from(b >> k & 3) - 2);
        check(&fields.iter().flat_map(split).collect::<Vec<_>>(), 1);
        let signed = bytes("a", Content::Bytes, 4 * N);
        let signed: Vec<_> = signed.iter().map(|b| i32::from(*b as i8)).collect();
        check(&signed, 127);
    }

    #[test]
    fn floats_lie_around_their_centre() {
        let content = Content::F32 {
            centre: 1.0,
            bound: 0.5,
        };
        let out = bytes("a", content, 1 << 16);
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(&out);
        assert!(values.iter().all(|v| (0.5..1.5).contains(v)));
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        assert!((mean - 1.0).abs() < 0.01);
        let out = bytes("a", Content::Bf16 { bound: 2.0 }, 1 << 16);
        let values: Vec<bf16> = bytemuck::pod_collect_to_vec::<u8, u16>(&out)
            .into_iter()
            .map(bf16::from_bits)
            .collect();
        assert!(values.iter().all(|v| v.to_f32().abs() <= 2.0));
    }

    #[test]
    fn pieces_are_those_of_the_whole_and_names_differ() {
        for content in [Content::Nibbles, Content::Bf16 { bound: 1.0 }] {
            let whole = bytes("a", content, 1003);
            let mut piece = vec![0; 503];
            Source::new(7, "a", content).fill(504 - 4 * 8, &mut piece);
            assert_eq!(piece, whole[472..975]);
            assert_ne!(whole, bytes("b", content, 1003));
        }
    }
}
