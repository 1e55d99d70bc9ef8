//! How far to look ahead: how often the prefetches of each rank come true, layer by layer, and whether they pay.
//!
//! A prediction that comes true moves the read of an expert out of the way of the next layer. One that does not may still be at a drive
//! when the demands come, which then wait for it; and the expert that made room for it may be missed. So a rank is
//! prefetched in a layer as long as its chance p of coming true satisfies
//!
//! ```text
//! p * expert  >  (1 - p) * 4 * (late * at_drives + missed * expert)
//! ```
//!
//! with `expert` the bytes of an expert, `at_drives` the bytes of prefetches that drives may hold at once, `late` how often a wrong prediction was still
//! being read when its layer came, and `missed` how often the expert that made room would have been used. All of them
//! are measured while running.

use super::Lookahead;

/// What decides whether prefetches pay, beside their chance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    /// Bytes of an expert.
    pub expert_bytes: f64,
    /// Bytes of prefetches that the drives may hold at once.
    pub at_drives_bytes: f64,
    /// Experts that a layer keeps.
    pub kept: usize,
}

/// How often something happened of late; the last few dozen times count.
#[derive(Clone, Copy, Debug)]
struct Rate {
    yes: f64,
    all: f64,
}

impl Rate {
    /// Starts as if seen a few times.
    fn new(assumed: f64) -> Rate {
        const SEEN: f64 = 4.0;
        Rate {
            yes: assumed * SEEN,
            all: SEEN,
        }
    }

    fn record(&mut self, yes: bool) {
        const KEEP: f64 = 1.0 - 1.0 / 64.0;
        self.yes = self.yes * KEEP + f64::from(u8::from(yes));
        self.all = self.all * KEEP + 1.0;
    }

    fn get(self) -> f64 {
        self.yes / self.all
    }
}

/// How the early look at a layer's router compares with its decision. Counts are of tokens computed a few at a time:
/// a long prompt uses nearly every expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerStats {
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
    /// Of these, how many were among as many of the likeliest at the last look.
    pub predicted: u64,
}

#[derive(Debug)]
struct Layer {
    by_rank: Vec<Rate>,
    stats: LayerStats,
    /// Passes that could have prefetched for it.
    passes: u64,
}

/// The likeliest experts of a layer, [tokens, ranks], each token's best first.
#[derive(Debug, Default)]
struct Prediction {
    layer: usize,
    ranked: Vec<u32>,
    ranks: usize,
}

/// Decides how many experts are prefetched, and keeps the record of prefetches.
#[derive(Debug)]
pub(super) struct PrefetchPolicy {
    mode: Lookahead,
    top_k: usize,
    costs: Costs,
    layers: Vec<Layer>,
    /// What the last look at a router said.
    prediction: Prediction,
    /// A wrong prediction was still being read when its layer came.
    late: Rate,
    /// A demanded expert was in memory.
    hit: Rate,
}

/// What a wrong prediction costs beyond what is counted: it takes room in the queue from prefetches of other experts, and time on the drive that
/// was not always idle. Measured: see docs/architecture.md.
const MISPREDICT_PENALTY: f64 = 4.0;

/// More tokens at once say little about the prefetches for a single one.
const FEW_TOKENS: usize = 8;

impl PrefetchPolicy {
    pub(super) fn new(
        mode: Lookahead,
        top_k: usize,
        layers: usize,
        costs: Costs,
    ) -> PrefetchPolicy {
        let assumed = |rank: usize| match rank < top_k {
            true => 0.9 - 0.5 * rank as f64 / top_k as f64,
            false => 0.1,
        };
        let by_rank: Vec<Rate> = (0..2 * top_k).map(|r| Rate::new(assumed(r))).collect();
        let layer = |layer| Layer {
            by_rank: by_rank.clone(),
            stats: LayerStats {
                layer,
                ..LayerStats::default()
            },
            passes: 0,
        };
        PrefetchPolicy {
            mode,
            top_k,
            costs,
            layers: (0..layers).map(layer).collect(),
            prediction: Prediction::default(),
            late: Rate::new(1.0),
            hit: Rate::new(0.0),
        }
    }

    /// How many of the likeliest experts of a layer somebody should find out for each token; 0 if prefetches are not wanted. More than are
    /// prefetched, so that it shows when more would pay.
    pub(super) fn candidates(&mut self, layer: usize) -> usize {
        /// A layer for which no prediction pays is looked at once in so many passes.
        const RARELY: u64 = 16;
        match self.mode {
            Lookahead::Off => 0,
            Lookahead::Experts(k) => k.max(self.top_k),
            Lookahead::Auto => {
                let width = self.width(layer);
                let layer = &mut self.layers[layer];
                layer.passes += 1;
                let skipped = width == 0 && !layer.passes.is_multiple_of(RARELY);
                if skipped { 0 } else { layer.by_rank.len() }
            }
        }
    }

    /// How many experts of a layer are prefetched for each token.
    fn width(&self, layer: usize) -> usize {
        match self.mode {
            Lookahead::Off => 0,
            Lookahead::Experts(k) => k,
            Lookahead::Auto => {
                let pays = self.least_chance();
                let by_rank = &self.layers[layer].by_rank;
                by_rank.iter().take_while(|rate| rate.get() >= pays).count()
            }
        }
    }

    /// The chance that a prediction must have to pay.
    fn least_chance(&self) -> f64 {
        let Costs {
            expert_bytes,
            at_drives_bytes,
            kept,
        } = self.costs;
        let used_each = self.hit.get() * self.top_k as f64;
        let missed = if kept == 0 {
            0.0
        } else {
            used_each / kept as f64
        };
        let wrong =
            MISPREDICT_PENALTY * (self.late.get() * at_drives_bytes + missed * expert_bytes);
        wrong / (wrong + expert_bytes)
    }

    /// What a look at the router of `layer` says: `ranked` [tokens, ranks]. `prefetches` becomes the experts to prediction, the likeliest
    /// first.
    pub(super) fn predict(
        &mut self,
        layer: usize,
        ranked: &[u32],
        ranks: usize,
        prefetches: &mut Vec<u32>,
    ) {
        let width = self.width(layer).min(ranks);
        prefetches.clear();
        for rank in 0..width {
            for ids in ranked.chunks_exact(ranks) {
                if !prefetches.contains(&ids[rank]) {
                    prefetches.push(ids[rank]);
                }
            }
        }
        // A later look at the same router is the better one.
        self.prediction.layer = layer;
        self.prediction.ranks = ranks;
        self.prediction.ranked.clear();
        self.prediction.ranked.extend_from_slice(ranked);
    }

    /// The router of a layer chose `ids`, a set, for `tokens` tokens.
    pub(super) fn routed(&mut self, layer: usize, ids: &[u32], tokens: usize) {
        let prediction = std::mem::take(&mut self.prediction);
        if prediction.layer != layer || prediction.ranked.is_empty() || tokens > FEW_TOKENS {
            return;
        }
        let width = self.width(layer).min(prediction.ranks);
        let record = &mut self.layers[layer];
        for token in prediction.ranked.chunks_exact(prediction.ranks) {
            for (rank, id) in token.iter().enumerate() {
                let right = ids.contains(id);
                if let Some(rate) = record.by_rank.get_mut(rank) {
                    rate.record(right);
                }
                record.stats.prefetched += u64::from(rank < width);
                record.stats.right += u64::from(right && rank < width);
                record.stats.predicted += u64::from(right && rank < self.top_k);
            }
        }
        record.stats.used += (tokens * self.top_k) as u64;
    }

    /// A wrong prediction was settled; `late` if it was still being read.
    pub(super) fn wrong(&mut self, late: bool) {
        self.late.record(late);
    }

    /// A demanded expert was in memory, or was not.
    pub(super) fn demanded(&mut self, hit: bool) {
        self.hit.record(hit);
    }

    /// The record of every layer for which there was a prediction.
    pub(super) fn stats(&self) -> Vec<LayerStats> {
        let prefetched = self.layers.iter().filter(|l| l.stats.used > 0);
        let now = |l: &Layer| LayerStats {
            width: self.width(l.stats.layer),
            ..l.stats
        };
        prefetched.map(now).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: Costs = Costs {
        expert_bytes: 8e6,
        at_drives_bytes: 2e6,
        kept: 10,
    };

    fn auto() -> PrefetchPolicy {
        PrefetchPolicy::new(Lookahead::Auto, 4, 3, COSTS)
    }

    /// A look at layer 1 whose first `right` prefetches come true, as those of every token to come.
    fn token(policy: &mut PrefetchPolicy, right: u32, late: bool) {
        let (mut prefetches, ranked) = (Vec::new(), [0, 1, 2, 3, 4, 5, 6, 7]);
        policy.predict(1, &ranked, ranked.len(), &mut prefetches);
        for _ in right..prefetches.len() as u32 {
            policy.wrong(late);
        }
        let ids: Vec<u32> = (0..4).map(|i| if i < right { i } else { 20 + i }).collect();
        policy.routed(1, &ids, 1);
    }

    #[test]
    fn as_many_are_guessed_as_come_true() {
        let mut policy = auto();
        for right in [4, 2, 0, 3] {
            for _ in 0..400 {
                token(&mut policy, right, true);
            }
            assert_eq!(policy.width(1), right as usize);
        }
    }

    #[test]
    fn a_layer_that_cannot_be_foreseen_is_rarely_looked_at() {
        let mut policy = auto();
        for _ in 0..400 {
            token(&mut policy, 0, true);
        }
        let looks = (0..160).filter(|_| policy.candidates(1) > 0).count();
        assert_eq!(looks, 10);
        assert_eq!(policy.candidates(2), 8, "another layer has its own record");
    }

    #[test]
    fn wrong_guesses_that_delay_nobody_are_cheap() {
        let chance = |late| {
            let mut policy = auto();
            (0..400).for_each(|_| policy.wrong(late));
            policy.least_chance()
        };
        assert!((chance(true) - 0.5).abs() < 0.01, "{}", chance(true));
        assert!(chance(false) < 0.01);
    }

    #[test]
    fn a_cache_that_hits_makes_wrong_guesses_dear() {
        let mut policy = auto();
        (0..400).for_each(|_| policy.wrong(false));
        (0..400).for_each(|_| policy.demanded(true));
        // Each of the 10 kept experts is used by 4 in 10 tokens, and that counts four times: 1.6 / (1.6 + 1).
        assert!((policy.least_chance() - 0.615).abs() < 0.01);
    }

    #[test]
    fn precision_and_recall_are_of_what_was_guessed() {
        let mut policy = PrefetchPolicy::new(Lookahead::Experts(2), 4, 3, COSTS);
        token(&mut policy, 1, true);
        token(&mut policy, 3, true);
        let expected = LayerStats {
            layer: 1,
            width: 2,
            prefetched: 4,
            right: 3,
            used: 8,
            predicted: 4,
        };
        assert_eq!(policy.stats(), [expected]);
    }

    #[test]
    fn the_last_look_counts_and_long_prompts_do_not() {
        let mut policy = PrefetchPolicy::new(Lookahead::Experts(1), 1, 2, COSTS);
        let mut prefetches = Vec::new();
        policy.predict(1, &[5], 1, &mut prefetches);
        policy.predict(1, &[6], 1, &mut prefetches);
        policy.routed(1, &[6], 1);
        assert_eq!(policy.stats()[0].right, 1);
        policy.predict(1, &[5; 100], 1, &mut prefetches);
        assert_eq!(prefetches, [5]);
        policy.routed(1, &[5; 100], 100);
        assert_eq!(policy.stats()[0].prefetched, 1);
    }
}
