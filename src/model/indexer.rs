//! Chooses the earlier positions that a token attends to: sparse attention (DSA).
//!
//! A full layer scores every earlier position with a few light heads and keeps the best `index_topk`; the
//! shared layers after it reuse that choice. Up to `index_topk` positions attention is dense, but the keys
//! are stored from the first token on, because later tokens will score them.

use std::ops::Range;

use crate::arch::{Part, RopeLayout, TensorId};
use crate::model::kv::{KvSpan, PAGE, Rows};
use crate::model::ops;
use crate::model::pass::Tokens;
use crate::model::rope::{Angle, rotate, rotate_halves};
use crate::model::scratch::{ScratchPool, resize_scratch};
use crate::model::topk::top_k as largest;
use crate::pool::Pool;
use crate::quant::Matrix;
use crate::weight::{Loader, Weight, WeightError};

/// Positions that one tile scores: a whole number of pages.
const RUN: usize = 16 * PAGE;
/// Scores held at a time, in values. One token's scores may exceed it in a very long context.
const MAX_SCORES: usize = 1 << 19;

/// The positions that each token of a slice attends to.
#[derive(Debug)]
pub struct Selection {
    /// Positions kept a token; `None` when attention is dense.
    top_k: Option<usize>,
    /// [tokens, top_k]; the rows of tokens with at most top_k positions are unspecified.
    picked: Vec<u32>,
    /// The positions of every token, while an earlier choice is kept.
    kept: Option<Vec<u32>>,
}

impl Selection {
    /// A selection of `top_k` positions a token, or of all.
    pub fn new(top_k: Option<usize>) -> Selection {
        Selection {
            top_k,
            picked: Vec::new(),
            kept: None,
        }
    }

    /// Until [`Selection::choose_anew`], every token attends to the positions of token `row` at `position`.
    pub fn keep(&mut self, row: usize, position: usize) {
        let kept = match self.row(row, position) {
            Some(picked) => picked.to_vec(),
            None => (0..=position as u32).collect(),
        };
        self.kept = Some(kept);
    }

    /// Ends [`Selection::keep`].
    pub fn choose_anew(&mut self) {
        self.kept = None;
    }

    /// Whether an earlier choice is kept.
    pub fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// Makes room for `tokens` tokens, the last at position `last`.
    pub fn prepare(&mut self, tokens: usize, last: usize) {
        if let Some(top_k) = self.top_k.filter(|k| last >= *k) {
            self.picked.resize(tokens * top_k, 0);
        }
    }

    /// The positions of token `row` at `position`, ascending; `None` for all up to its own.
    pub fn row(&self, row: usize, position: usize) -> Option<&[u32]> {
        if self.kept.is_some() {
            return self.kept.as_deref();
        }
        let top_k = self.top_k.filter(|k| position >= *k)?;
        Some(&self.picked[row * top_k..(row + 1) * top_k])
    }
}

/// The indexer of a full layer.
#[derive(Debug)]
pub struct Indexer {
    wq_b: Weight,
    wk: Weight,
    weights_proj: Weight,
    norm_weight: Vec<f32>,
    norm_bias: Vec<f32>,
    norm_eps: f32,
    layout: RopeLayout,
    heads: usize,
    width: usize,
    /// Factor on the scores of a head.
    scale: f32,
    /// Factor on the weights of the heads.
    weight_scale: f32,
}

/// Scratch of an indexer.
#[derive(Debug)]
pub struct IndexerScratch {
    queries: Vec<f32>,
    keys: Vec<f32>,
    weights: Vec<f32>,
    scores: Vec<f32>,
    /// Scores by head of one page.
    heads: ScratchPool<Vec<f32>>,
    /// Candidates of one token.
    candidates: ScratchPool<Vec<u32>>,
}

impl IndexerScratch {
    /// Empty scratch.
    pub fn new() -> IndexerScratch {
        IndexerScratch {
            queries: Vec::new(),
            keys: Vec::new(),
            weights: Vec::new(),
            scores: Vec::new(),
            heads: ScratchPool::new(),
            candidates: ScratchPool::new(),
        }
    }
}

/// The heads of one token.
#[derive(Clone, Copy)]
struct Heads<'a> {
    /// [heads, width].
    queries: &'a [f32],
    /// [heads].
    weights: &'a [f32],
}

impl Indexer {
    /// Loads the indexer of a layer.
    ///
    /// # Panics
    /// When the architecture has no indexers.
    pub fn load(loader: &mut Loader, layer: usize) -> Result<Indexer, WeightError> {
        let indexer = loader.arch().indexer.as_ref();
        let indexer = indexer.expect("an architecture with indexers");
        let (heads, width) = (indexer.heads, indexer.width);
        let id = |part| TensorId::Layer(layer, part);
        Ok(Indexer {
            wq_b: loader.matrix(id(Part::IndexQuery))?,
            wk: loader.matrix(id(Part::IndexKey))?,
            weights_proj: loader.matrix(id(Part::IndexWeights))?,
            norm_weight: loader.vector(id(Part::IndexNorm))?,
            norm_bias: loader.vector(id(Part::IndexNormBias))?,
            norm_eps: indexer.norm_eps,
            layout: indexer.layout,
            heads,
            width,
            scale: (width as f64).powf(-0.5) as f32,
            weight_scale: (heads as f64).powf(-0.5) as f32,
        })
    }

    fn rotate(&self, head: &mut [f32], angles: &[Angle]) {
        match self.layout {
            RopeLayout::Interleaved => rotate(head, angles),
            RopeLayout::HalfSplit => rotate_halves(head, angles),
        }
    }

    /// Values of a key.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Adds the tokens' keys to those of their sequences, and chooses the positions of tokens that have too many.
    /// `q_resid` is the normed low-rank query [n, q_lora_rank].
    pub fn select(
        &self,
        pool: &Pool,
        tokens: Tokens,
        q_resid: &[f32],
        spans: &mut [KvSpan],
        scratch: &mut IndexerScratch,
        selection: &mut Selection,
    ) {
        self.add_keys(pool, tokens, spans, scratch);
        let Some(top_k) = selection.top_k else { return };
        if spans.iter().all(|span| span.position + span.rows <= top_k) {
            return;
        }
        let n = tokens.n;
        let queries = resize_scratch(&mut scratch.queries, n * self.heads * self.width);
        self.wq_b.matrix().matmul(pool, q_resid, n, queries);
        for (i, heads) in queries.chunks_mut(self.heads * self.width).enumerate() {
            for head in heads.chunks_mut(self.width) {
                self.rotate(head, tokens.angles_of(i));
            }
        }
        let weights = resize_scratch(&mut scratch.weights, n * self.heads);
        let weights_proj = self.weights_proj.matrix();
        weights_proj.matmul(pool, tokens.x, n, weights);
        weights.iter_mut().for_each(|w| *w *= self.weight_scale);
        for span in spans {
            self.choose(pool, tokens.row, span, top_k, scratch, selection);
        }
    }

    /// Chooses the positions of one sequence's tokens. Row `row` of the selection is that of the first token of all.
    fn choose(
        &self,
        pool: &Pool,
        row: usize,
        span: &KvSpan,
        top_k: usize,
        scratch: &mut IndexerScratch,
        selection: &mut Selection,
    ) {
        let Some(keys) = span.index_keys() else {
            return;
        };
        let n = span.rows;
        // Tokens that attend to every position come first, and nothing is computed for them.
        let dense = top_k.saturating_sub(span.position).min(n);
        if dense == n {
            return;
        }
        let stride = (span.position + n).next_multiple_of(RUN);
        let batch = (MAX_SCORES / stride).clamp(1, n - dense);
        let (queries, weights) = (&scratch.queries, &scratch.weights);
        for first in (dense..n).step_by(batch) {
            let count = batch.min(n - first);
            let scores = resize_scratch(&mut scratch.scores, count * stride);
            let runs = stride / RUN;
            pool.run_chunks(scores, RUN, &|tile, scores| {
                let i = first + tile / runs;
                let at = span.row + i;
                let heads = Heads {
                    queries: &queries[at * self.heads * self.width..][..self.heads * self.width],
                    weights: &weights[at * self.heads..][..self.heads],
                };
                let start = tile % runs * RUN;
                let end = (span.position + i + 1).min(start + RUN);
                scratch.heads.with(|by_head| {
                    self.score(pool, heads, keys, start..end, by_head, scores);
                });
            });
            let first_row = row + span.row + first;
            let picked = &mut selection.picked[first_row * top_k..][..count * top_k];
            pool.run_chunks(picked, top_k, &|tile, picked| {
                let positions = span.position + first + tile + 1;
                let scores = &scores[tile * stride..][..positions];
                scratch.candidates.with(|candidates| {
                    largest(scores, top_k, candidates);
                    picked.copy_from_slice(candidates);
                });
            });
        }
    }

    fn add_keys(
        &self,
        pool: &Pool,
        tokens: Tokens,
        spans: &mut [KvSpan],
        scratch: &mut IndexerScratch,
    ) {
        let raw = resize_scratch(&mut scratch.keys, tokens.n * self.width);
        self.wk.matrix().matmul(pool, tokens.x, tokens.n, raw);
        for span in spans {
            for i in 0..span.rows {
                let at = span.row + i;
                let raw = &raw[at * self.width..][..self.width];
                let Some(key) = span.index_key_mut(i) else {
                    break;
                };
                ops::layer_norm(raw, &self.norm_weight, &self.norm_bias, self.norm_eps, key);
                self.rotate(key, tokens.angles_of(at));
            }
        }
    }

    /// Scores of the positions `range` for one token, to `scores[0..]`: the sum over heads of relu(q.k / sqrt(width)) * weight.
    fn score(
        &self,
        pool: &Pool,
        heads: Heads,
        keys: Rows,
        range: Range<usize>,
        by_head: &mut Vec<f32>,
        scores: &mut [f32],
    ) {
        let mut start = range.start;
        while start < range.end {
            let page = Matrix::from_f32(keys.run(start, range.end - start), self.width);
            let rows = page.rows();
            let by_head = resize_scratch(by_head, self.heads * rows);
            page.matmul(pool, heads.queries, self.heads, by_head);
            let scores = &mut scores[start - range.start..][..rows];
            scores.fill(0.0);
            for (by_head, weight) in by_head.chunks(rows).zip(heads.weights) {
                for (score, dot) in scores.iter_mut().zip(by_head) {
                    *score += (dot * self.scale).max(0.0) * weight;
                }
            }
            start += rows;
        }
    }
}
