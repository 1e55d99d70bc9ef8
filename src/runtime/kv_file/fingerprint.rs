//! What the numbers of a cache depend on: the model, and the settings that change what it computes.

use crc32fast::Hasher;

use crate::arch::{
    Architecture, Attention, ExpertKind, Experts, Gqa, Groups, Mla, QkNorm, Rope, RopeLayout,
    Router, Scoring, Yarn,
};
use crate::model::{LoadOptions, Weights};
use crate::quant::Activations;
use crate::quant::encode::Packing;
use crate::shards::{ShardError, Shards, data_sample};

/// To be raised with every change of the program that changes the last bit of a logit.
const ARITHMETIC: u32 = 1;

/// Equal for caches that can stand for each other. Where a model lies, split over which directories and with which copies, is no part
/// of it, and neither is whether its prediction layer is used: drafts change no row of the other layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Order of additions, rounding.
    pub(super) arithmetic: u32,
    /// CRC-32 of the hyperparameters.
    pub(super) config: u32,
    /// Tensors of the model.
    pub(super) tensors: u64,
    /// Bytes of all tensors.
    pub(super) bytes: u64,
    /// CRC-32 of the names, sizes and headers of the shards.
    pub(super) headers: u32,
    /// CRC-32 of samples of the content of every shard.
    pub(super) weights: u32,
    /// What resident matrices become at load; 0 as they are stored.
    pub(super) dense: u32,
    /// What float and FP8 experts are rounded to; 0 for what is stored.
    pub(super) experts: u32,
    /// Whether attention may be sparse.
    pub(super) dsa: u8,
    /// 1 for activations rounded to int8.
    pub(super) activations: u8,
    /// [`Weights::digest`]; 0 before the resident weights have been loaded, and where nothing sums them up.
    pub(super) resident: u32,
}

impl Fingerprint {
    /// Bytes that one takes in a file.
    pub const BYTES: usize = 46;

    /// That of the model in `shards`, as it is computed with `options` and with experts rounded to `round_experts`. Reads up to 2 MiB of every shard.
    /// What the resident weights add to it comes by [`Fingerprint::with`].
    ///
    /// # Errors
    /// A shard that cannot be read.
    pub fn of(
        shards: &Shards,
        arch: &Architecture,
        options: &LoadOptions,
        round_experts: Option<Packing>,
    ) -> Result<Fingerprint, ShardError> {
        let (headers, weights) = identity(shards)?;
        Ok(Fingerprint {
            arithmetic: ARITHMETIC,
            config: hyperparameters(arch),
            tensors: shards.len() as u64,
            bytes: (shards.iter()).fold(0, |sum, tensor| sum.saturating_add(tensor.bytes)),
            headers,
            weights,
            dense: packing(options.dense),
            experts: packing(round_experts),
            dsa: u8::from(options.dsa),
            activations: match options.activations {
                Activations::Exact => 0,
                Activations::Int8 => 1,
            },
            resident: 0,
        })
    }

    /// The same, with the content of all resident weights.
    #[must_use]
    pub fn with(self, weights: &Weights) -> Fingerprint {
        Fingerprint {
            // 0 means unknown.
            resident: weights.digest().map_or(0, |digest| digest.max(1)),
            ..self
        }
    }

    /// A name that no other one has: 32 hexadecimal digits.
    pub fn name(&self) -> String {
        let settings = [
            self.arithmetic,
            self.dense,
            self.experts,
            self.dsa.into(),
            self.activations.into(),
        ];
        let settings = crc32fast::hash(&settings.map(u32::to_le_bytes).concat());
        let (config, headers, weights) = (self.config, self.headers, self.weights);
        format!("{config:08x}{headers:08x}{weights:08x}{settings:08x}")
    }

    /// What of this one is not the same in `file`, for people.
    pub(super) fn difference(&self, file: &Fingerprint) -> Option<&'static str> {
        let same = [
            (self.config == file.config, "hyperparameters"),
            (self.tensors == file.tensors, "tensors"),
            (self.bytes == file.bytes, "bytes of weights"),
            (self.headers == file.headers, "shards"),
            (self.weights == file.weights, "weights"),
            (
                self.resident == 0 || self.resident == file.resident,
                "resident weights",
            ),
            (self.dsa == file.dsa, "values of --dsa"),
            (self.dense == file.dense, "values of --dense-bits"),
            (self.experts == file.experts, "values of --expert-bits"),
            (
                self.activations == file.activations,
                "values of --activations",
            ),
            (
                self.arithmetic == file.arithmetic,
                "versions of the program's arithmetic",
            ),
        ];
        same.iter().find(|(same, _)| !same).map(|(_, what)| *what)
    }

    /// One of no model, for tests.
    #[cfg(test)]
    pub(super) fn for_tests() -> Fingerprint {
        Fingerprint {
            arithmetic: 1,
            config: 2,
            tensors: 3,
            bytes: 4,
            headers: 5,
            weights: 6,
            dense: 0,
            experts: 0,
            dsa: 1,
            activations: 0,
            resident: 7,
        }
    }

    pub(super) fn to_bytes(self) -> [u8; Fingerprint::BYTES] {
        let mut bytes = [0; Fingerprint::BYTES];
        let mut rest = &mut bytes[..];
        let mut put = |field: &[u8]| {
            let (first, after) = std::mem::take(&mut rest).split_at_mut(field.len());
            first.copy_from_slice(field);
            rest = after;
        };
        put(&self.arithmetic.to_le_bytes());
        put(&self.config.to_le_bytes());
        put(&self.tensors.to_le_bytes());
        put(&self.bytes.to_le_bytes());
        put(&self.headers.to_le_bytes());
        put(&self.weights.to_le_bytes());
        put(&self.dense.to_le_bytes());
        put(&self.experts.to_le_bytes());
        put(&[self.dsa, self.activations]);
        put(&self.resident.to_le_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; Fingerprint::BYTES]) -> Fingerprint {
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Fingerprint {
            arithmetic: u32_at(0),
            config: u32_at(4),
            tensors: u64_at(8),
            bytes: u64_at(16),
            headers: u32_at(24),
            weights: u32_at(28),
            dense: u32_at(32),
            experts: u32_at(36),
            dsa: bytes[40],
            activations: bytes[41],
            resident: u32_at(42),
        }
    }
}

/// A number for what matrices become.
fn packing(packing: Option<Packing>) -> u32 {
    match packing {
        None => 0,
        Some(Packing::Int8) => 8,
        Some(Packing::Int4) => 4,
        Some(Packing::Int4Group(columns)) => columns.saturating_add(0x100),
        Some(Packing::Int2) => 2,
    }
}

/// CRC-32 of everything in the architecture that decides a number. Stop tokens do not, and neither does the longest context.
///
/// The order of the bytes is part of the file format.
fn hyperparameters(arch: &Architecture) -> u32 {
    // Bound by name: a new field does not compile until it is hashed or left out here.
    let Architecture {
        model_type,
        vocab_size,
        hidden_size,
        intermediate_size,
        rms_norm_eps,
        max_position_embeddings: _,
        tie_word_embeddings,
        eos_token_ids: _,
        attention,
        rope,
        indexer,
        mlp,
        router,
        experts,
        shared_width,
        prediction: _,
        names: _,
    } = arch;
    let Rope {
        theta,
        dims,
        layout,
        scaling,
    } = rope;
    let Router {
        top_k,
        scoring,
        bias: selection_bias,
        logit_bias,
        groups,
        normalise,
        scale,
    } = router;
    let Experts { count, width, kind } = experts;
    let index = indexer.as_ref();
    let mut crc = Hasher::new();
    let (heads, widths, bias, attention_scale, norm_eps) = match attention {
        Attention::Mla(mla) => {
            let Mla {
                heads,
                q_rank,
                kv_rank,
                nope,
                rope,
                value,
                bias,
                scale,
                norm_eps,
            } = mla;
            let widths = [q_rank.unwrap_or(0), *kv_rank, *rope, *nope, *value];
            (heads, widths, bias, scale, norm_eps)
        }
        Attention::Gqa(gqa) => {
            let Gqa {
                heads,
                kv_heads,
                width,
                norm,
                bias,
                output_bias,
                sinks,
                windows,
                scale,
                norm_eps,
            } = gqa;
            let norm = match norm {
                QkNorm::None => 0,
                QkNorm::Head => 1,
                QkNorm::Flat => 2,
            };
            crc.update(&[norm, u8::from(*output_bias), u8::from(*sinks)]);
            for window in windows {
                crc.update(&(window.unwrap_or(0) as u64).to_le_bytes());
            }
            (
                heads,
                [*kv_heads, *width, *dims, 0, 0],
                bias,
                scale,
                norm_eps,
            )
        }
    };
    // What the first family has is left out: its files stay valid.
    if (*scoring, *selection_bias, *layout) != (Scoring::Sigmoid, true, RopeLayout::Interleaved) {
        let scoring = match scoring {
            Scoring::Sigmoid => 0,
            Scoring::Softmax => 1,
            Scoring::Chosen => 2,
        };
        let layout = match layout {
            RopeLayout::Interleaved => 0,
            RopeLayout::HalfSplit => 1,
        };
        crc.update(&[
            scoring,
            u8::from(*selection_bias),
            u8::from(*logit_bias),
            layout,
        ]);
    }
    match kind {
        ExpertKind::Silu => {}
        ExpertKind::ClampedPairs { alpha, limit } => {
            crc.update(&alpha.to_le_bytes());
            crc.update(&limit.to_le_bytes());
        }
    }
    for number in [
        *vocab_size,
        *hidden_size,
        *intermediate_size,
        *width,
        mlp.len(),
        *heads,
        shared_width / width,
        *count,
        *top_k,
        widths[0],
        widths[1],
        widths[2],
        widths[3],
        widths[4],
        index.map_or(0, |index| index.top_k),
        index.map_or(0, |index| index.width),
        index.map_or(0, |index| index.heads),
    ] {
        crc.update(&(number as u64).to_le_bytes());
    }
    crc.update(&scale.to_le_bytes());
    crc.update(&rms_norm_eps.to_le_bytes());
    crc.update(&theta.to_le_bytes());
    crc.update(model_type.as_bytes());
    let index_eps = index.map_or(0.0, |index| index.norm_eps);
    for number in [*attention_scale, *norm_eps, index_eps] {
        crc.update(&number.to_le_bytes());
    }
    crc.update(&[normalise, tie_word_embeddings, bias].map(|yes| u8::from(*yes)));
    let kinds = mlp.iter().map(|kind| *kind as u8);
    crc.update(&kinds.collect::<Vec<u8>>());
    let kinds = index.iter().flat_map(|index| &index.layers);
    crc.update(&kinds.map(|kind| *kind as u8).collect::<Vec<u8>>());
    // What only some families have adds nothing for the others: their files stay valid.
    if *groups != Groups::ONE {
        let Groups { count, keep } = *groups;
        crc.update(&[count, keep].map(|n| (n as u64).to_le_bytes()).concat());
    }
    if index.is_some_and(|index| index.layout == RopeLayout::HalfSplit) {
        crc.update(b"half-split indexer");
    }
    if let Some(yarn) = scaling {
        hash_yarn(&mut crc, yarn);
    }
    crc.finalize()
}

fn hash_yarn(crc: &mut Hasher, yarn: &Yarn) {
    let Yarn {
        factor,
        original_length,
        beta_fast,
        beta_slow,
        truncate,
        amplitude,
        score_scale,
    } = yarn;
    for number in [factor, beta_fast, beta_slow, amplitude, score_scale] {
        crc.update(&number.to_le_bytes());
    }
    crc.update(&(*original_length as u64).to_le_bytes());
    crc.update(&[u8::from(*truncate)]);
}

/// CRC-32 of the headers, and of samples of the content, of all shards in the order of their names.
fn identity(shards: &Shards) -> Result<(u32, u32), ShardError> {
    let mut headers: Vec<Hasher> = shards.files().iter().map(|_| Hasher::new()).collect();
    for tensor in shards.iter() {
        let crc = &mut headers[tensor.file];
        crc.update(tensor.name.as_bytes());
        crc.update(format!("{:?}{:?}", tensor.dtype, tensor.shape).as_bytes());
        crc.update(&tensor.offset.to_le_bytes());
    }
    let mut files: Vec<usize> = (0..shards.files().len()).collect();
    let name = |file: &usize| shards.files()[*file].path().file_name();
    files.sort_by(|a, b| name(a).cmp(&name(b)));
    let (mut all_headers, mut weights) = (Hasher::new(), Hasher::new());
    for file in files {
        let shard = &shards.files()[file];
        let name = shard.path().file_name().unwrap_or_default();
        all_headers.update(name.as_encoded_bytes());
        all_headers.update(&shard.size().to_le_bytes());
        all_headers.update(&headers[file].clone().finalize().to_le_bytes());
        weights.update(&data_sample(shard)?.to_le_bytes());
    }
    Ok((all_headers.finalize(), weights.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_names_tell_all_fields_apart() {
        let one = Fingerprint::for_tests();
        let bytes = one.to_bytes();
        assert_eq!(Fingerprint::from_bytes(&bytes), one);
        assert_eq!(one.difference(&one), None);
        let mut seen = std::collections::BTreeSet::new();
        for at in 0..Fingerprint::BYTES {
            let mut changed = bytes;
            changed[at] ^= 0x40;
            let other = Fingerprint::from_bytes(&changed);
            assert_eq!(other.to_bytes(), changed);
            seen.insert(one.difference(&other).unwrap());
        }
        assert_eq!(seen.len(), 11);
        assert_eq!(one.name().len(), 32);
        assert_ne!(Fingerprint { dsa: 0, ..one }.name(), one.name());
    }
}
