//! Decides how many experts to prefetch: compares the drive's idle time that a prefetch uses with the time that demands wait for it.
//!
//! Between the last demanded read of a layer and the next layer's demands the drives are idle. A prefetch is read in this gap. If it comes
//! true, the demands of the next layer have less to read, by as much as the gap held. If not, and if the gap ends before the read
//! does, the demands wait for the bytes that the drives already have. So a candidate with the chance `p` of coming true pays if
//!
//! ```text
//! p * min(read, gap)  >  (1 - p) * min(at_drives, read - gap)
//! ```
//!
//! with `read` the time of reading an expert, `gap` what earlier candidates leave of the gap, and `at_drives` the time of
//! reading the prefetches that drives may hold at once. A candidate for which no gap is left pays nothing.
//! Reading starts with a latency, which demands share: it is no part of `read`, and belongs to the gap (`read_times`).
//! What an earlier prediction prefetches has been read for as long as the gap already lasts.
//! A prefetch evicts only what costs nothing to lose (`Cache::spare`), so eviction has no term here.
//!
//! A router is predicted twice, early and late. Chances and gaps are measured for each of the two, by layer. Chances are those of
//! candidates that had to be read: experts in memory come true more often, because a token repeats experts of the one before it.
//! Where a prediction takes more time than its prefetches are expected to gain, it is made only once in [`RARELY`] passes.
//!
//! A pass may have tokens of several sequences. Each token has its own candidates, and a candidate comes true when any token of the pass
//! chooses it: its read was then needed. In passes of more than [`FEW_TOKENS`] tokens nothing is measured, because together they choose
//! most experts of a layer, and nearly every candidate comes true. Measuring them would widen the prefetches of single tokens for no
//! reason. Such passes prefetch with what smaller ones have measured.

mod averages;
mod read_times;

use std::time::Duration;

use averages::{Mean, Rate, Recent};
use read_times::ReadTimes;

/// How many experts of the next layer are prefetched before its router decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Lookahead {
    /// As many as pay, by what prefetches have cost and brought so far.
    #[default]
    Auto,
    /// None.
    Off,
    /// This many for each token.
    Experts(usize),
}

/// How the predictions of a layer compare with its router's decisions. Counts are of passes with few tokens:
/// a long prompt uses nearly every expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchAccuracy {
    /// Index of the layer in the model.
    pub layer: usize,
    /// Experts that are prefetched for each token now.
    pub width: usize,
    /// Experts that were prefetched.
    pub prefetched: u64,
    /// Of these, how many the router then chose.
    pub right: u64,
    /// Experts that the router chose.
    pub used: u64,
    /// Of these, how many were among the first top_k candidates of the last prediction.
    pub predicted: u64,
}

/// What was measured of the early or the late predictions of a layer.
#[derive(Clone, Debug)]
struct Measured {
    /// How often a candidate that had to be read came true.
    by_rank: Vec<Rate>,
    /// Seconds from the prediction to the router's decision, without those in which demands were being read.
    /// Apart for predictions during which demands are being read, and for those without.
    gaps: [Recent; 2],
    /// Seconds that a prediction takes.
    cost: Mean,
    /// Seconds that its prefetches are expected to gain.
    gain: Mean,
}

#[derive(Debug)]
struct LayerRecord {
    /// Early and late.
    predictions: [Measured; 2],
    accuracy: PrefetchAccuracy,
    /// Passes in which it could have been predicted.
    passes: u64,
}

/// Where a candidate is when it is predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CandidateState {
    InMemory,
    /// An earlier prediction's prefetch is not complete.
    Reading,
    Absent,
}

/// A prediction of the layer that comes next.
#[derive(Debug, Default)]
struct Prediction {
    at: Duration,
    /// [tokens, ranks], each token's most likely first.
    candidates: Vec<u32>,
    /// Of each candidate, whether it had to be read.
    missing: Vec<bool>,
    ranks: usize,
    /// Ranks that were prefetched.
    width: usize,
    /// Whether no demands were being read.
    drained: bool,
}

/// The predictions of the layer that comes next.
#[derive(Debug, Default)]
struct Pending {
    layer: usize,
    /// How many predictions the model could have made, and when it last began one.
    asked: usize,
    began: Duration,
    predictions: [Option<Prediction>; 2],
}

/// Decides how many experts are prefetched, by what prefetches have cost and brought.
#[derive(Debug)]
pub(super) struct PrefetchPolicy {
    mode: Lookahead,
    top_k: usize,
    /// Bytes of prefetches that a drive may hold at once, in experts.
    at_drive: f64,
    /// Drives that take part in reading.
    drives: usize,
    layers: Vec<LayerRecord>,
    pending: Pending,
    reads: ReadTimes,
}

/// Passes of more tokens are not measured; see the module.
const FEW_TOKENS: usize = 8;

/// Below this chance nothing is prefetched, although the drives would be idle: it would displace experts that are worth more.
const MIN_CHANCE: f64 = 0.1;

/// So many predictions are made whatever they gain, because nothing is known of it.
const FIRST: f64 = 4.0;

/// A prediction that gains less than it takes is made once in so many passes.
const RARELY: u64 = 16;

impl PrefetchPolicy {
    /// `at_drive` are the bytes of prefetches that a drive may hold at once, in experts.
    pub(super) fn new(
        mode: Lookahead,
        top_k: usize,
        layers: usize,
        at_drive: f64,
    ) -> PrefetchPolicy {
        let assumed = |rank: usize| match rank < top_k {
            true => 0.9 - 0.5 * rank as f64 / top_k as f64,
            false => 0.1,
        };
        let measured = Measured {
            by_rank: (0..2 * top_k).map(|r| Rate::new(assumed(r))).collect(),
            gaps: Default::default(),
            cost: Mean::default(),
            gain: Mean::default(),
        };
        let layer = |layer| LayerRecord {
            predictions: [measured.clone(), measured.clone()],
            accuracy: PrefetchAccuracy {
                layer,
                ..PrefetchAccuracy::default()
            },
            passes: 0,
        };
        PrefetchPolicy {
            mode,
            top_k,
            at_drive,
            drives: 1,
            layers: (0..layers).map(layer).collect(),
            pending: Pending::default(),
            reads: ReadTimes::default(),
        }
    }

    /// How many candidates of a layer to predict for each token; 0 if none. More than are prefetched, so that it shows when more
    /// would pay. The model asks once for each prediction that it could make.
    pub(super) fn candidates(&mut self, layer: usize, now: Duration) -> usize {
        if self.pending.layer != layer {
            self.pending = Pending {
                layer,
                ..Pending::default()
            };
        }
        self.pending.asked += 1;
        self.pending.began = now;
        match self.mode {
            Lookahead::Off => 0,
            Lookahead::Experts(k) => k.max(self.top_k),
            Lookahead::Auto => {
                let which = (self.pending.asked - 1).min(1);
                let layer = &mut self.layers[layer];
                layer.passes += u64::from(which == 0);
                let measured = &layer.predictions[which];
                let pays = measured.gain.value > measured.cost.value;
                let made = pays || measured.gain.count < FIRST || layer.passes % RARELY < 2;
                match made && !self.reads.needs_batch() {
                    true => measured.by_rank.len(),
                    false => 0,
                }
            }
        }
    }

    /// Takes a prediction for `layer`: `candidates` [tokens, ranks]; `state` tells which experts have to be read. `prefetches`
    /// becomes the experts to prefetch, the most likely first.
    pub(super) fn predict(
        &mut self,
        layer: usize,
        candidates: &[u32],
        ranks: usize,
        now: Duration,
        state: impl Fn(u32) -> CandidateState,
        prefetches: &mut Vec<u32>,
    ) {
        if self.pending.layer != layer || self.pending.asked == 0 {
            self.candidates(layer, now);
        }
        let which = (self.pending.asked - 1).min(1);
        let states: Vec<CandidateState> = candidates.iter().map(|id| state(*id)).collect();
        let width = match self.mode {
            Lookahead::Off => 0,
            Lookahead::Experts(k) => k.min(ranks),
            Lookahead::Auto => {
                let cost = (now - self.pending.began).as_secs_f64();
                let (width, gain) = self.width(layer, which, &states, ranks, now);
                let measured = &mut self.layers[layer].predictions[which];
                measured.cost.record(cost);
                measured.gain.record(gain);
                width
            }
        };
        prefetches.clear();
        for rank in 0..width {
            for of_token in candidates.chunks_exact(ranks) {
                if !prefetches.contains(&of_token[rank]) {
                    prefetches.push(of_token[rank]);
                }
            }
        }
        self.pending.predictions[which] = Some(Prediction {
            at: now,
            candidates: candidates.to_vec(),
            missing: (states.iter())
                .map(|s| *s != CandidateState::InMemory)
                .collect(),
            ranks,
            width,
            drained: self.reads.is_drained(),
        });
    }

    /// Sets how many drives take part in reading.
    pub(super) fn set_drives(&mut self, drives: usize) {
        self.drives = drives;
    }

    /// How many ranks pay in a prediction, and how many seconds they are expected to gain.
    fn width(
        &self,
        layer: usize,
        which: usize,
        states: &[CandidateState],
        ranks: usize,
        now: Duration,
    ) -> (usize, f64) {
        let measured = &self.layers[layer].predictions[which];
        let gaps = &measured.gaps[usize::from(self.reads.is_drained())];
        let read = self.reads.expert();
        let at_drives = self.at_drive * self.drives as f64 * read;
        let mut already = self.already_read(now);
        let (mut before, mut gain) = (0.0, 0.0);
        for rank in 0..ranks.min(measured.by_rank.len()) {
            let p = measured.by_rank[rank].get();
            for of_token in states.chunks_exact(ranks) {
                let left = match of_token[rank] {
                    CandidateState::InMemory => continue,
                    CandidateState::Absent => read,
                    CandidateState::Reading => (read - already).max(0.0),
                };
                already -= read - left;
                let gains = gaps.mean(|gap| {
                    let in_gap = (gap - before).clamp(0.0, left);
                    let begun = (gap - before + at_drives).clamp(0.0, left);
                    p * in_gap - (1.0 - p) * (begun - in_gap)
                });
                let is_read = left == 0.0 && read > 0.0;
                if !is_read && (gains <= 0.0 || p < MIN_CHANCE) {
                    return (rank, gain);
                }
                gain += gains;
                before += left;
            }
        }
        (ranks.min(measured.by_rank.len()), gain)
    }

    /// Seconds in which the drives have read what an earlier prediction prefetched.
    fn already_read(&self, now: Duration) -> f64 {
        let earlier = self.pending.predictions.iter().flatten().next();
        let since = earlier.zip(self.reads.idle_since());
        since.map_or(0.0, |(earlier, idle)| {
            now.saturating_sub(earlier.at.max(idle)).as_secs_f64()
        })
    }

    /// The router of a layer chose `ids` for `tokens` tokens. Measures the predictions of this layer.
    pub(super) fn routed(&mut self, layer: usize, ids: &[u32], tokens: usize, now: Duration) {
        let pending = std::mem::take(&mut self.pending);
        if pending.layer != layer || tokens > FEW_TOKENS {
            return;
        }
        let record = &mut self.layers[layer];
        let taken = pending.predictions.iter().zip(&mut record.predictions);
        for (prediction, measured) in taken {
            let Some(prediction) = prediction else {
                continue;
            };
            let idle = self.reads.idle_since().unwrap_or(now).max(prediction.at);
            let gap = now.saturating_sub(idle).as_secs_f64();
            measured.gaps[usize::from(prediction.drained)].record(gap);
            let each = prediction.candidates.iter().zip(&prediction.missing);
            for (i, (id, missing)) in each.enumerate() {
                let rate = measured.by_rank.get_mut(i % prediction.ranks);
                if let (Some(rate), true) = (rate, *missing) {
                    rate.record(ids.contains(id));
                }
            }
        }
        // The later prediction is the better one.
        let Some(last) = pending.predictions.iter().flatten().last() else {
            return;
        };
        let accuracy = &mut record.accuracy;
        for of_token in last.candidates.chunks_exact(last.ranks) {
            for (rank, id) in of_token.iter().enumerate() {
                let right = ids.contains(id);
                accuracy.prefetched += u64::from(rank < last.width);
                accuracy.right += u64::from(right && rank < last.width);
                accuracy.predicted += u64::from(right && rank < self.top_k);
            }
        }
        accuracy.width = last.width;
        accuracy.used += (tokens * self.top_k) as u64;
    }

    /// Experts of a layer are demanded, of which `missing` have to be read; `alone` if nothing else is being read.
    pub(super) fn demanded(&mut self, missing: f64, alone: bool, now: Duration) {
        self.reads.demanded(missing, alone, now);
    }

    /// A prefetch begins.
    pub(super) fn prefetched(&mut self) {
        self.reads.prefetched();
    }

    /// All demanded experts are in memory; `waited` if the last was waited for, so that this is known exactly.
    pub(super) fn drained(&mut self, waited: bool, now: Duration) {
        self.reads.drained(waited, now);
    }

    /// Of every layer that was predicted.
    pub(super) fn accuracy(&self) -> Vec<PrefetchAccuracy> {
        let predicted = self.layers.iter().filter(|l| l.accuracy.used > 0);
        predicted.map(|layer| layer.accuracy).collect()
    }
}

#[cfg(test)]
mod tests;
