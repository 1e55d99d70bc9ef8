//! Computes grouped-query attention over the keys and values of each head.
//!
//! A page holds the keys of a head, and its values, as separate blocks: each is streamed once for all query heads of the group. One token
//! and group of heads is computed at a time, by the same products as any other matrix: no number depends on how tokens were grouped.

use crate::arch::{Gqa, Part, QkNorm, RopeLayout, TensorId};
use crate::model::attention::{INLINE_BYTES, TILES, group_of};
use crate::model::kv::{KvSpan, Rows, span_of};
use crate::model::linear::Linear;
use crate::model::ops;
use crate::model::pass::{Pass, Tokens};
use crate::model::phase::Phase;
use crate::model::rope::{Angle, rotate, rotate_halves};
use crate::model::scratch::{ScratchPool, resize_scratch};
use crate::pool::Pool;
use crate::quant::Matrix;
use crate::weight::{Loader, WeightError};

/// The attention of one layer.
#[derive(Debug)]
pub struct GqaAttention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    /// Norms of queries and keys: of a head, or of all heads.
    norms: Option<[Vec<f32>; 2]>,
    /// By query head, a score without a value.
    sinks: Option<Vec<f32>>,
    /// Positions that a token attends to, its own included.
    window: Option<usize>,
    heads: usize,
    kv_heads: usize,
    /// Dimensions of a head.
    width: usize,
    rope: RopeLayout,
    /// Factor on the scores.
    scale: f32,
    norm_eps: f32,
}

/// Scratch of the tokens, and of the tiles that run at the same time.
#[derive(Debug)]
pub struct GqaScratch {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    outputs: Vec<f32>,
    tiles: ScratchPool<Tile>,
}

impl GqaScratch {
    /// Empty scratch.
    pub fn new() -> GqaScratch {
        GqaScratch {
            q: Vec::new(),
            k: Vec::new(),
            v: Vec::new(),
            outputs: Vec::new(),
            tiles: ScratchPool::new(),
        }
    }
}

/// Scratch of one token and group of heads.
#[derive(Debug, Default)]
struct Tile {
    /// Scores, then probabilities [group, attended positions].
    scores: Vec<f32>,
    /// Scores of one block of a page [group, PAGE].
    block: Vec<f32>,
}

/// Query heads of one token that share a head of keys and values.
#[derive(Clone, Copy)]
struct Heads<'a> {
    /// Their queries [group, width], rotated.
    q: &'a [f32],
    keys: Rows<'a>,
    values: Rows<'a>,
    sinks: Option<&'a [f32]>,
    /// The first attended position, and the one after the last.
    attended: (usize, usize),
}

impl GqaAttention {
    /// Loads the attention of a layer.
    pub fn load(loader: &mut Loader, gqa: &Gqa, layer: usize) -> Result<GqaAttention, WeightError> {
        let rope = loader.arch().rope.layout;
        let id = |part| TensorId::Layer(layer, part);
        let mut linear =
            |weight, bias, has: bool| Linear::load(loader, id(weight), has.then_some(id(bias)));
        let q = linear(Part::Query, Part::QueryBias, gqa.bias)?;
        let k = linear(Part::Key, Part::KeyBias, gqa.bias)?;
        let v = linear(Part::Value, Part::ValueBias, gqa.bias)?;
        let o = linear(Part::Output, Part::OutputBias, gqa.output_bias)?;
        let norms = match gqa.norm {
            QkNorm::None => None,
            QkNorm::Head | QkNorm::Flat => Some([
                loader.vector(id(Part::QueryNorm))?,
                loader.vector(id(Part::KeyNorm))?,
            ]),
        };
        let sinks = (gqa.sinks).then(|| loader.vector(id(Part::Sinks)));
        Ok(GqaAttention {
            q,
            k,
            v,
            o,
            norms,
            sinks: sinks.transpose()?,
            window: gqa.window(layer),
            heads: gqa.heads,
            kv_heads: gqa.kv_heads,
            width: gqa.width,
            rope,
            scale: gqa.scale,
            norm_eps: gqa.norm_eps,
        })
    }

    /// `out` [n, hidden] of the tokens, whose keys and values are added to those of their sequences.
    pub fn forward(
        &self,
        pass: &mut Pass,
        tokens: Tokens,
        spans: &mut [KvSpan],
        scratch: &mut GqaScratch,
        out: &mut [f32],
    ) {
        let (pool, n, width) = (pass.pool, tokens.n, self.width);
        self.extend_cache(pool, tokens, spans, scratch);
        let q_width = self.heads * width;
        let q = resize_scratch(&mut scratch.q, n * q_width);
        self.q.forward(pool, tokens.x, n, q);
        for (i, q) in q.chunks_mut(q_width).enumerate() {
            self.norm_and_rotate(q, 0, tokens.angles_of(i));
        }
        let outputs = resize_scratch(&mut scratch.outputs, n * q_width);
        // Keys and values are read once each, by every query head.
        let attended = |span: &KvSpan| {
            let end = span.position + span.rows;
            span.rows * self.window.map_or(end, |window| window.min(end))
        };
        let attended: usize = spans.iter().map(attended).sum();
        let inline = pool.threads() == 1
            || 2 * size_of::<f32>() * self.heads * width * attended < INLINE_BYTES;
        let shared = self.heads / self.kv_heads;
        let tiles = if inline { 1 } else { TILES };
        let group = group_of(shared, tiles.div_ceil(self.kv_heads));
        let groups = self.heads / group;
        let (q, tiles, spans) = (&*q, &scratch.tiles, &*spans);
        let attend = |tile: usize, out: &mut [f32]| {
            let (i, first) = (tile / groups, tile % groups * group);
            let (span, position) = span_of(spans, i);
            let (head, end) = (first / shared, position + 1);
            let heads = Heads {
                q: &q[i * q_width + first * width..][..group * width],
                keys: span.kv(head),
                values: span.kv(self.kv_heads + head),
                sinks: self.sinks.as_ref().map(|sinks| &sinks[first..][..group]),
                attended: match self.window {
                    Some(window) => (end.saturating_sub(window), end),
                    None => (0, end),
                },
            };
            tiles.with(|tile| self.attend(pool, heads, tile, out));
        };
        if inline {
            let outs = outputs.chunks_mut(group * width);
            outs.enumerate().for_each(|(tile, out)| attend(tile, out));
        } else {
            pool.run_chunks(outputs, group * width, &attend);
        }
        self.o.forward(pool, outputs, n, out);
        pass.timer.lap(Phase::Attention);
    }

    fn extend_cache(
        &self,
        pool: &Pool,
        tokens: Tokens,
        spans: &mut [KvSpan],
        scratch: &mut GqaScratch,
    ) {
        let (heads, width) = (self.kv_heads, self.width);
        let row = heads * width;
        let k = resize_scratch(&mut scratch.k, tokens.n * row);
        let v = resize_scratch(&mut scratch.v, tokens.n * row);
        self.k.forward(pool, tokens.x, tokens.n, k);
        self.v.forward(pool, tokens.x, tokens.n, v);
        for span in spans.iter_mut().filter(|span| !span.computed) {
            for i in 0..span.rows {
                let at = span.row + i;
                let key = &mut k[at * row..][..row];
                self.norm_and_rotate(key, 1, tokens.angles_of(at));
                let value = &v[at * row..][..row];
                let blocks = key.chunks(width).chain(value.chunks(width));
                for (block, values) in blocks.enumerate() {
                    if let Some(to) = span.kv_mut(i, block) {
                        to.copy_from_slice(values);
                    }
                }
            }
        }
    }

    /// Norms queries (`which` 0) or keys (1) of one token, and rotates each head.
    fn norm_and_rotate(&self, x: &mut [f32], which: usize, angles: &[Angle]) {
        if let Some(norms) = &self.norms {
            // The norm of all heads together is as long as they are.
            for x in x.chunks_mut(norms[which].len()) {
                ops::rms_norm_in_place(x, &norms[which], self.norm_eps);
            }
        }
        for head in x.chunks_mut(self.width) {
            match self.rope {
                RopeLayout::Interleaved => rotate(head, angles),
                RopeLayout::HalfSplit => rotate_halves(head, angles),
            }
        }
    }

    /// The outputs `out` [group, width] of some heads.
    fn attend(&self, pool: &Pool, heads: Heads, tile: &mut Tile, out: &mut [f32]) {
        let (width, (first, end)) = (self.width, heads.attended);
        let (group, count) = (heads.q.len() / width, end - first);
        let scores = resize_scratch(&mut tile.scores, group * count);
        let mut start = 0;
        while start < count {
            let keys = Matrix::from_f32(heads.keys.run(first + start, count - start), width);
            let rows = keys.rows();
            let block = resize_scratch(&mut tile.block, group * rows);
            keys.matmul(pool, heads.q, group, block);
            for (scores, block) in scores.chunks_mut(count).zip(block.chunks(rows)) {
                for (score, dot) in scores[start..].iter_mut().zip(block) {
                    *score = dot * self.scale;
                }
            }
            start += rows;
        }
        for (head, scores) in scores.chunks_mut(count).enumerate() {
            match heads.sinks {
                Some(sinks) => ops::softmax_with(scores, sinks[head]),
                None => ops::softmax(scores),
            }
        }
        out.fill(0.0);
        // Block by block for all heads, so that the cache is read once from memory.
        let mut start = 0;
        while start < count {
            let values = Matrix::from_f32(heads.values.run(first + start, count - start), width);
            for (scores, out) in scores.chunks(count).zip(out.chunks_mut(width)) {
                values.add_rows(&scores[start..start + values.rows()], out);
            }
            start += values.rows();
        }
    }
}
