//! Computes multi-head latent attention over the compressed cache.
//!
//! Keys and values are never expanded. With W_k and W_v the two halves of a head's rows of `kv_b`, a score is
//! `q_nope . (W_k c) = (W_k^T q_nope) . c`, so that the query is brought to the width of the cache instead
//! (absorbed), and the output is `W_v (sum of p c)`. Prefill, decode and verification all use this one form,
//! one token and group of heads at a time: no number depends on how tokens were grouped.

use crate::arch::{Mla, Part, TensorId};
use crate::model::attention::{INLINE_BYTES, TILES, group_of};
use crate::model::indexer::{Indexer, IndexerScratch, Selection};
use crate::model::kv::{KvSpan, PAGE, Rows, span_of};
use crate::model::linear::Linear;
use crate::model::ops;
use crate::model::pass::{Pass, Tokens};
use crate::model::phase::Phase;
use crate::model::rope::{Angle, rotate};
use crate::model::scratch::{ScratchPool, resize_scratch};
use crate::pool::Pool;
use crate::quant::Matrix;
use crate::weight::{Loader, Weight, WeightError};

/// The attention of one layer.
#[derive(Debug)]
pub struct MlaAttention {
    queries: Queries,
    kv_a: Linear,
    kv_a_norm: Vec<f32>,
    kv_b: Weight,
    o: Linear,
    /// The indexer, in full layers of a model with active sparse attention.
    pub indexer: Option<Indexer>,
    heads: usize,
    nope: usize,
    rope: usize,
    value: usize,
    rank: usize,
    /// Factor on the scores.
    scale: f32,
    norm_eps: f32,
}

/// How queries are projected.
#[derive(Debug)]
enum Queries {
    /// By one matrix.
    Whole(Weight),
    /// By way of a low-rank query, which indexers take too.
    LowRank {
        down: Linear,
        norm: Vec<f32>,
        up: Weight,
    },
}

impl Queries {
    fn load(loader: &mut Loader, layer: usize, mla: &Mla) -> Result<Queries, WeightError> {
        let id = |part| TensorId::Layer(layer, part);
        if mla.q_rank.is_none() {
            return Ok(Queries::Whole(loader.matrix(id(Part::Query))?));
        }
        let bias = mla.bias.then_some(id(Part::QueryDownBias));
        Ok(Queries::LowRank {
            down: Linear::load(loader, id(Part::QueryDown), bias)?,
            norm: loader.vector(id(Part::QueryNorm))?,
            up: loader.matrix(id(Part::QueryUp))?,
        })
    }

    /// The normed low-rank queries [n, rank]; nothing where there are none.
    fn low_rank<'a>(
        &self,
        pool: &Pool,
        tokens: Tokens,
        norm_eps: f32,
        low: &mut Vec<f32>,
        normed: &'a mut Vec<f32>,
    ) -> &'a [f32] {
        let Queries::LowRank { down, norm, .. } = self else {
            return &[];
        };
        let rank = norm.len();
        let low = resize_scratch(low, tokens.n * rank);
        down.forward(pool, tokens.x, tokens.n, low);
        let normed = resize_scratch(normed, tokens.n * rank);
        for (low, normed) in low.chunks(rank).zip(normed.chunks_mut(rank)) {
            ops::rms_norm(low, norm, norm_eps, normed);
        }
        normed
    }

    /// The queries of all heads. `low_rank` is the result of [`Queries::low_rank`].
    fn whole(&self, pool: &Pool, tokens: Tokens, low_rank: &[f32], q: &mut [f32]) {
        match self {
            Queries::Whole(weight) => weight.matrix().matmul(pool, tokens.x, tokens.n, q),
            Queries::LowRank { up, .. } => up.matrix().matmul(pool, low_rank, tokens.n, q),
        }
    }
}

/// Scratch of the tokens, and of the tiles that run at the same time.
#[derive(Debug)]
pub struct MlaScratch {
    low: Vec<f32>,
    q_resid: Vec<f32>,
    kv: Vec<f32>,
    q: Vec<f32>,
    values: Vec<f32>,
    indexer: IndexerScratch,
    tiles: ScratchPool<Tile>,
}

impl MlaScratch {
    /// Empty scratch.
    pub fn new() -> MlaScratch {
        MlaScratch {
            low: Vec::new(),
            q_resid: Vec::new(),
            kv: Vec::new(),
            q: Vec::new(),
            values: Vec::new(),
            indexer: IndexerScratch::new(),
            tiles: ScratchPool::new(),
        }
    }
}

/// Scratch of one token and group of heads.
#[derive(Debug, Default)]
struct Tile {
    /// Absorbed queries [group, rank + rope].
    q: Vec<f32>,
    /// Scores, then probabilities [group, attended positions].
    scores: Vec<f32>,
    /// Scores of one block [group, PAGE].
    block: Vec<f32>,
    /// Cache rows of one block, gathered [PAGE, rank + rope].
    rows: Vec<f32>,
    /// Weighted sums of the cache [group, rank + rope].
    context: Vec<f32>,
}

impl MlaAttention {
    /// Loads the attention of a layer and, if `with_indexer`, its indexer.
    pub fn load(
        loader: &mut Loader,
        mla: &Mla,
        layer: usize,
        with_indexer: bool,
    ) -> Result<MlaAttention, WeightError> {
        let id = |part| TensorId::Layer(layer, part);
        let queries = Queries::load(loader, layer, mla)?;
        let mut linear =
            |weight, bias| Linear::load(loader, id(weight), mla.bias.then_some(id(bias)));
        let kv_a = linear(Part::KvDown, Part::KvDownBias)?;
        let o = linear(Part::Output, Part::OutputBias)?;
        let indexer = with_indexer.then(|| Indexer::load(loader, layer));
        let indexer = indexer.transpose()?;
        Ok(MlaAttention {
            queries,
            kv_a,
            kv_a_norm: loader.vector(id(Part::KvNorm))?,
            kv_b: loader.matrix(id(Part::KvUp))?,
            o,
            indexer,
            heads: mla.heads,
            nope: mla.nope,
            rope: mla.rope,
            value: mla.value,
            rank: mla.kv_rank,
            scale: mla.scale,
            norm_eps: mla.norm_eps,
        })
    }

    /// `out` [n, hidden] of the tokens, whose cache rows are added to those of their sequences. A full layer writes its choice of
    /// positions to `selection`, unless an earlier choice is kept there (then its keys are not added either); any layer uses the
    /// choice it finds.
    pub fn forward(
        &self,
        pass: &mut Pass,
        tokens: Tokens,
        spans: &mut [KvSpan],
        selection: &mut Selection,
        scratch: &mut MlaScratch,
        out: &mut [f32],
    ) {
        let (pool, n) = (pass.pool, tokens.n);
        let q_resid = self.queries.low_rank(
            pool,
            tokens,
            self.norm_eps,
            &mut scratch.low,
            &mut scratch.q_resid,
        );
        self.extend_cache(pool, tokens, spans, &mut scratch.kv);
        if let Some(indexer) = &self.indexer
            && !selection.is_kept()
        {
            pass.timer.lap(Phase::Attention);
            indexer.select(
                pool,
                tokens,
                q_resid,
                spans,
                &mut scratch.indexer,
                selection,
            );
            pass.timer.lap(Phase::Indexer);
        }
        let head = self.nope + self.rope;
        let q = resize_scratch(&mut scratch.q, n * self.heads * head);
        self.queries.whole(pool, tokens, q_resid, q);
        let values = resize_scratch(&mut scratch.values, n * self.heads * self.value);
        // The cache is read once for the scores and once for the sums.
        let attended = |span: &KvSpan| span.rows * (span.position + span.rows);
        let attended: usize = spans.iter().map(attended).sum();
        let cached = 2 * size_of::<f32>() * self.heads * attended * (self.rank + self.rope);
        let read = cached + n * self.kv_b.matrix().bytes().len();
        let inline = pool.threads() == 1 || read < INLINE_BYTES;
        let group = group_of(self.heads, if inline { 1 } else { TILES });
        let groups = self.heads / group;
        let (q, tiles, selection, spans) = (&*q, &scratch.tiles, &*selection, &*spans);
        let attend = |tile: usize, out: &mut [f32]| {
            let (i, first) = (tile / groups, tile % groups * group);
            let (span, position) = span_of(spans, i);
            let heads = Heads {
                first,
                q: &q[(i * self.heads + first) * head..][..group * head],
                angles: tokens.angles_of(i),
                attended: match selection.row(tokens.row + i, position) {
                    Some(picked) => Attended::Some(picked),
                    None => Attended::First(position + 1),
                },
            };
            tiles.with(|tile| self.attend(pool, heads, span.kv(0), tile, out));
        };
        let width = group * self.value;
        if inline {
            let outs = values.chunks_mut(width);
            outs.enumerate().for_each(|(tile, out)| attend(tile, out));
        } else {
            pool.run_chunks(values, width, &attend);
        }
        self.o.forward(pool, values, n, out);
        pass.timer.lap(Phase::Attention);
    }

    fn extend_cache(&self, pool: &Pool, tokens: Tokens, spans: &mut [KvSpan], kv: &mut Vec<f32>) {
        let width = self.rank + self.rope;
        let raw = resize_scratch(kv, tokens.n * width);
        self.kv_a.forward(pool, tokens.x, tokens.n, raw);
        for span in spans {
            for i in 0..span.rows {
                let at = span.row + i;
                let raw = &raw[at * width..][..width];
                let Some(row) = span.kv_mut(i, 0) else { break };
                let (c, k_rope) = row.split_at_mut(self.rank);
                ops::rms_norm(&raw[..self.rank], &self.kv_a_norm, self.norm_eps, c);
                k_rope.copy_from_slice(&raw[self.rank..]);
                rotate(k_rope, tokens.angles_of(at));
            }
        }
    }

    /// The outputs `out` [group, value] of some heads.
    fn attend(&self, pool: &Pool, heads: Heads, cache: Rows, tile: &mut Tile, out: &mut [f32]) {
        let Heads {
            first, attended, ..
        } = heads;
        let kv_b = self.kv_b.matrix();
        let width = cache.width();
        let group = heads.q.len() / (self.nope + self.rope);
        let absorbed = resize_scratch(&mut tile.q, group * width);
        let queries = heads.q.chunks(self.nope + self.rope);
        for (j, (q, absorbed)) in queries.zip(absorbed.chunks_mut(width)).enumerate() {
            let start = (first + j) * (self.nope + self.value);
            let w_k = kv_b.slice_rows(start..start + self.nope);
            let (nope, rope) = absorbed.split_at_mut(self.rank);
            w_k.matmul_transposed(pool, &q[..self.nope], 1, nope);
            rope.copy_from_slice(&q[self.nope..]);
            rotate(rope, heads.angles);
        }

        let count = attended.len();
        let scores = resize_scratch(&mut tile.scores, group * count);
        let mut start = 0;
        while start < count {
            let keys = attended.gather(cache, start, &mut tile.rows);
            let rows = keys.len() / width;
            let block = resize_scratch(&mut tile.block, group * rows);
            Matrix::from_f32(keys, width).matmul(pool, absorbed, group, block);
            for (scores, block) in scores.chunks_mut(count).zip(block.chunks(rows)) {
                for (score, dot) in scores[start..].iter_mut().zip(block) {
                    *score = dot * self.scale;
                }
            }
            start += rows;
        }
        scores.chunks_mut(count).for_each(ops::softmax);

        // The rotated keys are summed along with the rest, which is cheaper than leaving them out.
        let context = resize_scratch(&mut tile.context, group * width);
        context.fill(0.0);
        // Block by block for all heads, so that the cache is read once from memory.
        let mut start = 0;
        while start < count {
            let keys = attended.gather(cache, start, &mut tile.rows);
            let block = Matrix::from_f32(keys, width);
            for (scores, context) in scores.chunks(count).zip(context.chunks_mut(width)) {
                block.add_rows(&scores[start..start + block.rows()], context);
            }
            start += block.rows();
        }
        let contexts = context.chunks(width);
        for (j, (context, out)) in contexts.zip(out.chunks_mut(self.value)).enumerate() {
            let start = (first + j) * (self.nope + self.value) + self.nope;
            let w_v = kv_b.slice_rows(start..start + self.value);
            w_v.matmul(pool, &context[..self.rank], 1, out);
        }
    }
}

/// A group of heads of one token.
#[derive(Clone, Copy)]
struct Heads<'a> {
    /// The first of them.
    first: usize,
    /// Their queries [group, nope + rope].
    q: &'a [f32],
    /// Angles of the token's position.
    angles: &'a [Angle],
    attended: Attended<'a>,
}

/// The positions that a token attends to, ascending.
#[derive(Clone, Copy)]
enum Attended<'a> {
    /// All positions below this one.
    First(usize),
    /// The listed positions.
    Some(&'a [u32]),
}

impl Attended<'_> {
    fn len(&self) -> usize {
        match self {
            Attended::First(count) => *count,
            Attended::Some(picked) => picked.len(),
        }
    }

    /// Cache rows of the attended positions from `start` on, side by side: a page of them at most.
    fn gather<'a>(&self, cache: Rows<'a>, start: usize, buffer: &'a mut Vec<f32>) -> &'a [f32] {
        match self {
            Attended::First(count) => cache.run(start, count - start),
            Attended::Some(picked) => {
                let picked = &picked[start..];
                let rows = PAGE.min(picked.len());
                let buffer = resize_scratch(buffer, rows * cache.width());
                let slots = buffer.chunks_mut(cache.width());
                for (slot, position) in slots.zip(picked) {
                    slot.copy_from_slice(cache.row(*position as usize));
                }
                buffer
            }
        }
    }
}
