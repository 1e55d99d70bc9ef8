//! Decides how many experts to prefetch: measures how often each rank of the predictions comes true, layer by layer, and whether it pays.
//!
//! A prediction that comes true moves the read of an expert off the next layer's critical path. A misprediction may still be at a drive
//! when the demands come, which then wait for it; and the expert that was evicted for it may be missed. So a rank is
//! prefetched in a layer while its chance p of coming true satisfies
//!
//! ```text
//! p * expert  >  (1 - p) * MISPREDICT_PENALTY * (late * at_drives + missed * expert)
//! ```
//!
//! with `expert` the bytes of an expert, `at_drives` the bytes of prefetches that drives may hold at once, `late` how often a misprediction was
//! still being read when its layer came, and `missed` how often the evicted expert would have been used. All of them
//! are measured while running.
//!
//! A pass may have tokens of several sequences. Each token has its own candidates, and a candidate comes true when any token of the pass
//! chooses it: its read was then needed. In passes of more than [`FEW_TOKENS`] tokens nothing is measured, because together they choose
//! most experts of a layer, and nearly every candidate comes true. Measuring them would widen the prefetches of single tokens for no
//! reason. Such passes prefetch with the width that smaller ones have measured.

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

/// What a prefetch costs, besides what is measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    /// Bytes of an expert.
    pub expert_bytes: f64,
    /// Bytes of prefetches that a drive may hold at once.
    pub at_drive_bytes: f64,
    /// Slabs of each layer.
    pub per_layer_quota: usize,
}

/// How often something happened, of about the last 64 times.
#[derive(Clone, Copy, Debug)]
struct Rate {
    yes: f64,
    all: f64,
}

impl Rate {
    /// Starts as if measured a few times.
    fn new(assumed: f64) -> Rate {
        const ASSUMED_TIMES: f64 = 4.0;
        Rate {
            yes: assumed * ASSUMED_TIMES,
            all: ASSUMED_TIMES,
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

#[derive(Debug)]
struct LayerRecord {
    by_rank: Vec<Rate>,
    accuracy: PrefetchAccuracy,
    /// Passes in which it could have been predicted.
    passes: u64,
}

/// The last prediction of a layer.
#[derive(Debug, Default)]
struct LayerPrediction {
    layer: usize,
    /// [tokens, ranks], each token's most likely first.
    candidates: Vec<u32>,
    ranks: usize,
}

/// Decides how many experts are prefetched, by what prefetches have cost and brought.
#[derive(Debug)]
pub(super) struct PrefetchPolicy {
    mode: Lookahead,
    top_k: usize,
    costs: Costs,
    /// Drives that hold prefetches; one that is hardly used delays no demand.
    drives: usize,
    layers: Vec<LayerRecord>,
    prediction: LayerPrediction,
    /// How often a misprediction was still being read when its layer came.
    late: Rate,
    /// How often a demanded expert was in memory.
    hit: Rate,
}

/// How much more a misprediction costs than what is counted: it delays prefetches of other experts, on a drive that was not always
/// idle. Measured: see docs/experiments.md.
const MISPREDICT_PENALTY: f64 = 4.0;

/// Passes of more tokens are not measured; see the module.
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
        let layer = |layer| LayerRecord {
            by_rank: by_rank.clone(),
            accuracy: PrefetchAccuracy {
                layer,
                ..PrefetchAccuracy::default()
            },
            passes: 0,
        };
        PrefetchPolicy {
            mode,
            top_k,
            costs,
            drives: 1,
            layers: (0..layers).map(layer).collect(),
            prediction: LayerPrediction::default(),
            late: Rate::new(1.0),
            hit: Rate::new(0.0),
        }
    }

    /// How many candidates of a layer to predict for each token; 0 if none. More than are prefetched, so that it shows when more
    /// would pay.
    pub(super) fn candidates(&mut self, layer: usize) -> usize {
        /// A layer in which no rank pays is predicted once in so many passes.
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

    /// Sets how many drives take part in reading.
    pub(super) fn set_drives(&mut self, drives: usize) {
        self.drives = drives;
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

    /// The chance from which a prefetch pays.
    fn least_chance(&self) -> f64 {
        let Costs {
            expert_bytes,
            at_drive_bytes,
            per_layer_quota,
        } = self.costs;
        let at_drives_bytes = at_drive_bytes * self.drives as f64;
        let used_each = self.hit.get() * self.top_k as f64;
        let missed = match per_layer_quota {
            0 => 0.0,
            quota => used_each / quota as f64,
        };
        let cost = MISPREDICT_PENALTY * (self.late.get() * at_drives_bytes + missed * expert_bytes);
        cost / (cost + expert_bytes)
    }

    /// Takes a prediction for `layer`: `candidates` [tokens, ranks]. `prefetches` becomes the experts to prefetch, the most likely
    /// first.
    pub(super) fn predict(
        &mut self,
        layer: usize,
        candidates: &[u32],
        ranks: usize,
        prefetches: &mut Vec<u32>,
    ) {
        let width = self.width(layer).min(ranks);
        prefetches.clear();
        for rank in 0..width {
            for of_token in candidates.chunks_exact(ranks) {
                if !prefetches.contains(&of_token[rank]) {
                    prefetches.push(of_token[rank]);
                }
            }
        }
        // A later prediction of the same router is the better one.
        self.prediction.layer = layer;
        self.prediction.ranks = ranks;
        self.prediction.candidates.clear();
        self.prediction.candidates.extend_from_slice(candidates);
    }

    /// The router of a layer chose `ids` for `tokens` tokens. Measures the last prediction if it was of this layer.
    pub(super) fn routed(&mut self, layer: usize, ids: &[u32], tokens: usize) {
        let prediction = std::mem::take(&mut self.prediction);
        if prediction.layer != layer || prediction.candidates.is_empty() || tokens > FEW_TOKENS {
            return;
        }
        let width = self.width(layer).min(prediction.ranks);
        let record = &mut self.layers[layer];
        for of_token in prediction.candidates.chunks_exact(prediction.ranks) {
            for (rank, id) in of_token.iter().enumerate() {
                let right = ids.contains(id);
                if let Some(rate) = record.by_rank.get_mut(rank) {
                    rate.record(right);
                }
                record.accuracy.prefetched += u64::from(rank < width);
                record.accuracy.right += u64::from(right && rank < width);
                record.accuracy.predicted += u64::from(right && rank < self.top_k);
            }
        }
        record.accuracy.used += (tokens * self.top_k) as u64;
    }

    /// A prefetch mispredicted; `late` if it was still being read.
    pub(super) fn mispredicted(&mut self, late: bool) {
        self.late.record(late);
    }

    /// A demanded expert was in memory, or was not.
    pub(super) fn demanded(&mut self, hit: bool) {
        self.hit.record(hit);
    }

    /// Of every layer that was predicted.
    pub(super) fn accuracy(&self) -> Vec<PrefetchAccuracy> {
        let predicted = self.layers.iter().filter(|l| l.accuracy.used > 0);
        let now = |l: &LayerRecord| PrefetchAccuracy {
            width: self.width(l.accuracy.layer),
            ..l.accuracy
        };
        predicted.map(now).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: Costs = Costs {
        expert_bytes: 8e6,
        at_drive_bytes: 2e6,
        per_layer_quota: 10,
    };

    fn auto() -> PrefetchPolicy {
        PrefetchPolicy::new(Lookahead::Auto, 4, 3, COSTS)
    }

    /// A token of whose candidates in layer 1 the first `right` come true.
    fn token(policy: &mut PrefetchPolicy, right: u32, late: bool) {
        let (mut prefetches, candidates) = (Vec::new(), [0, 1, 2, 3, 4, 5, 6, 7]);
        policy.predict(1, &candidates, candidates.len(), &mut prefetches);
        for _ in right..prefetches.len() as u32 {
            policy.mispredicted(late);
        }
        let ids: Vec<u32> = (0..4).map(|i| if i < right { i } else { 20 + i }).collect();
        policy.routed(1, &ids, 1);
    }

    #[test]
    fn as_many_are_prefetched_as_come_true() {
        let mut policy = auto();
        for right in [4, 2, 0, 3] {
            for _ in 0..400 {
                token(&mut policy, right, true);
            }
            assert_eq!(policy.width(1), right as usize);
        }
    }

    #[test]
    fn a_layer_that_cannot_be_predicted_is_rarely_predicted() {
        let mut policy = auto();
        for _ in 0..400 {
            token(&mut policy, 0, true);
        }
        let predictions = (0..160).filter(|_| policy.candidates(1) > 0).count();
        assert_eq!(predictions, 10);
        assert_eq!(policy.candidates(2), 8, "another layer has its own record");
    }

    #[test]
    fn mispredictions_that_delay_no_demand_are_cheap() {
        let chance = |late| {
            let mut policy = auto();
            (0..400).for_each(|_| policy.mispredicted(late));
            policy.least_chance()
        };
        assert!((chance(true) - 0.5).abs() < 0.01, "{}", chance(true));
        assert!(chance(false) < 0.01);
    }

    #[test]
    fn a_cache_that_hits_makes_mispredictions_expensive() {
        let mut policy = auto();
        (0..400).for_each(|_| policy.mispredicted(false));
        (0..400).for_each(|_| policy.demanded(true));
        // Each of the 10 cached experts is used by 4 in 10 tokens, and that counts four times: 1.6 / (1.6 + 1).
        assert!((policy.least_chance() - 0.615).abs() < 0.01);
    }

    #[test]
    fn precision_and_recall_are_of_what_was_prefetched() {
        let mut policy = PrefetchPolicy::new(Lookahead::Experts(2), 4, 3, COSTS);
        token(&mut policy, 1, true);
        token(&mut policy, 3, true);
        let expected = PrefetchAccuracy {
            layer: 1,
            width: 2,
            prefetched: 4,
            right: 3,
            used: 8,
            predicted: 4,
        };
        assert_eq!(policy.accuracy(), [expected]);
    }

    #[test]
    fn the_last_prediction_counts_and_long_prompts_do_not() {
        let mut policy = PrefetchPolicy::new(Lookahead::Experts(1), 1, 2, COSTS);
        let mut prefetches = Vec::new();
        policy.predict(1, &[5], 1, &mut prefetches);
        policy.predict(1, &[6], 1, &mut prefetches);
        policy.routed(1, &[6], 1);
        assert_eq!(policy.accuracy()[0].right, 1);
        policy.predict(1, &[5; 100], 1, &mut prefetches);
        assert_eq!(prefetches, [5]);
        policy.routed(1, &[5; 100], 100);
        assert_eq!(policy.accuracy()[0].prefetched, 1);
    }

    #[test]
    fn every_token_has_its_own_candidates_and_any_token_confirms_them() {
        let mut policy = PrefetchPolicy::new(Lookahead::Experts(2), 2, 2, COSTS);
        let mut prefetches = Vec::new();
        // Three tokens of different sequences, three candidates each.
        policy.predict(1, &[1, 2, 3, 4, 2, 5, 6, 1, 7], 3, &mut prefetches);
        assert_eq!(
            prefetches,
            [1, 4, 6, 2],
            "by rank, then by token, each once"
        );
        policy.routed(1, &[1, 2, 8, 9, 6, 9], 3);
        let accuracy = policy.accuracy()[0];
        assert_eq!((accuracy.prefetched, accuracy.right), (6, 5));
        assert_eq!(accuracy.used, 6);
    }
}
