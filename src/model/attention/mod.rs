//! Computes the attention of a layer, of whichever kind its architecture has.

mod gqa;
mod mla;

use crate::arch;
use crate::model::indexer::{Indexer, Selection};
use crate::model::kv::KvSpan;
use crate::model::pass::{Pass, Tokens};
use crate::weight::{Loader, WeightError};

use gqa::{GqaAttention, GqaScratch};
use mla::{MlaAttention, MlaScratch};

/// Heads of a tile at most: each block of the cache is read once for all of them.
pub(super) const MAX_GROUP: usize = 8;

/// Attention that reads fewer bytes (of the cache, from L2 mostly) runs on the calling thread: a helper that has gone to sleep since the
/// last product would come too late.
const INLINE_BYTES: usize = 4 << 20;
/// Tiles of a token that threads can share, at least.
const TILES: usize = 4;

/// The attention of one layer.
#[derive(Debug)]
pub enum Attention {
    /// Multi-head latent attention.
    Mla(Box<MlaAttention>),
    /// Grouped-query attention.
    Gqa(Box<GqaAttention>),
}

/// Scratch of attention: only that of the model's kind is ever filled.
#[derive(Debug)]
pub struct AttentionScratch {
    mla: MlaScratch,
    gqa: GqaScratch,
}

impl AttentionScratch {
    /// Empty scratch.
    pub fn new() -> AttentionScratch {
        AttentionScratch {
            mla: MlaScratch::new(),
            gqa: GqaScratch::new(),
        }
    }
}

impl Attention {
    /// Loads the attention of a layer and, if `with_indexer`, its indexer.
    pub fn load(
        loader: &mut Loader,
        layer: usize,
        with_indexer: bool,
    ) -> Result<Attention, WeightError> {
        Ok(match &loader.arch().attention {
            arch::Attention::Mla(mla) => {
                let mla = MlaAttention::load(loader, mla, layer, with_indexer)?;
                Attention::Mla(Box::new(mla))
            }
            arch::Attention::Gqa(gqa) => {
                Attention::Gqa(Box::new(GqaAttention::load(loader, gqa, layer)?))
            }
        })
    }

    /// The indexer, in full layers of a model with active sparse attention.
    pub fn indexer(&self) -> Option<&Indexer> {
        match self {
            Attention::Mla(mla) => mla.indexer.as_ref(),
            Attention::Gqa(_) => None,
        }
    }

    /// `out` [n, hidden] of the tokens, whose cache rows are added to those of their sequences. A full layer writes its choice of
    /// positions to `selection`, unless an earlier choice is kept there (then its keys are not added either); any layer with MLA uses
    /// the choice it finds.
    pub fn forward(
        &self,
        pass: &mut Pass,
        tokens: Tokens,
        spans: &mut [KvSpan],
        selection: &mut Selection,
        scratch: &mut AttentionScratch,
        out: &mut [f32],
    ) {
        match self {
            Attention::Mla(mla) => {
                mla.forward(pass, tokens, spans, selection, &mut scratch.mla, out);
            }
            Attention::Gqa(gqa) => gqa.forward(pass, tokens, spans, &mut scratch.gqa, out),
        }
    }
}

/// The largest divisor of `heads` that is at most [`MAX_GROUP`] and leaves about `tiles` tiles.
fn group_of(heads: usize, tiles: usize) -> usize {
    let most = MAX_GROUP.min(heads.div_ceil(tiles));
    (1..=most)
        .rev()
        .find(|g| heads.is_multiple_of(*g))
        .unwrap_or(1)
}
