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

use std::time::Duration;

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

/// A mean of about the last 16 values; 0 before the first.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: f64,
    count: f64,
}

impl Mean {
    fn record(&mut self, value: f64) {
        self.count = (self.count + 1.0).min(16.0);
        self.value += (value - self.value) / self.count;
    }
}

/// The last values.
#[derive(Clone, Debug, Default)]
struct Recent {
    values: Vec<f64>,
    next: usize,
}

impl Recent {
    fn record(&mut self, value: f64) {
        const KEPT: usize = 16;
        match self.values.len() < KEPT {
            true => self.values.push(value),
            false => self.values[self.next] = value,
        }
        self.next = (self.next + 1) % KEPT;
    }

    /// The mean of a function of them; 0 if there are none.
    fn mean(&self, of: impl Fn(f64) -> f64) -> f64 {
        let sum: f64 = self.values.iter().map(|value| of(*value)).sum();
        sum / self.values.len().max(1) as f64
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

/// Measures how long demanded experts take to read.
#[derive(Debug, Default)]
struct ReadTimes {
    /// Seconds of an expert.
    expert: Mean,
    /// When the running demands began, and how many experts they had to read.
    began: Duration,
    missing: f64,
    /// When the last demanded read was complete; `None` while some are not.
    drained: Option<Duration>,
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
                match pays || measured.gain.count < FIRST || layer.passes % RARELY < 2 {
                    true => measured.by_rank.len(),
                    false => 0,
                }
            }
        }
    }

    /// Takes a prediction for `layer`: `candidates` [tokens, ranks]; `missing` tells which experts would have to be read. `prefetches`
    /// becomes the experts to prefetch, the most likely first.
    pub(super) fn predict(
        &mut self,
        layer: usize,
        candidates: &[u32],
        ranks: usize,
        now: Duration,
        missing: impl Fn(u32) -> bool,
        prefetches: &mut Vec<u32>,
    ) {
        if self.pending.layer != layer || self.pending.asked == 0 {
            self.candidates(layer, now);
        }
        let which = (self.pending.asked - 1).min(1);
        let missing: Vec<bool> = candidates.iter().map(|id| missing(*id)).collect();
        let width = match self.mode {
            Lookahead::Off => 0,
            Lookahead::Experts(k) => k.min(ranks),
            Lookahead::Auto => {
                let cost = (now - self.pending.began).as_secs_f64();
                let (width, gain) = self.width(layer, which, &missing, ranks);
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
            missing,
            ranks,
            width,
            drained: self.reads.drained.is_some(),
        });
    }

    /// Sets how many drives take part in reading.
    pub(super) fn set_drives(&mut self, drives: usize) {
        self.drives = drives;
    }

    /// How many ranks pay in a prediction, and how many seconds they are expected to gain.
    fn width(&self, layer: usize, which: usize, missing: &[bool], ranks: usize) -> (usize, f64) {
        let measured = &self.layers[layer].predictions[which];
        let gaps = &measured.gaps[usize::from(self.reads.drained.is_some())];
        let read = self.reads.expert.value;
        let at_drives = self.at_drive * self.drives as f64 * read;
        let (mut before, mut gain) = (0.0, 0.0);
        for rank in 0..ranks.min(measured.by_rank.len()) {
            let p = measured.by_rank[rank].get();
            for of_token in missing.chunks_exact(ranks) {
                if !of_token[rank] {
                    continue;
                }
                let gains = gaps.mean(|gap| {
                    let in_gap = (gap - before).clamp(0.0, read);
                    let begun = (gap - before + at_drives).clamp(0.0, read);
                    p * in_gap - (1.0 - p) * (begun - in_gap)
                });
                if gains <= 0.0 || p < MIN_CHANCE {
                    return (rank, gain);
                }
                gain += gains;
                before += read;
            }
        }
        (ranks.min(measured.by_rank.len()), gain)
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
            let idle = self.reads.drained.unwrap_or(now).max(prediction.at);
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

    /// Experts of a layer are demanded, of which `missing` have to be read.
    pub(super) fn demanded(&mut self, missing: f64, now: Duration) {
        self.reads.began = now;
        self.reads.missing = missing;
        self.reads.drained = (missing == 0.0).then_some(now);
    }

    /// All demanded experts are in memory; `waited` if the last was waited for, so that this is known exactly.
    pub(super) fn drained(&mut self, waited: bool, now: Duration) {
        let reads = &mut self.reads;
        if reads.drained.is_some() {
            return;
        }
        reads.drained = Some(now);
        let each = (now - reads.began).as_secs_f64() / reads.missing.max(0.5);
        // What was not waited for was read in less time than this.
        if waited || each < reads.expert.value || reads.expert.count == 0.0 {
            reads.expert.record(each);
        }
    }

    /// Of every layer that was predicted.
    pub(super) fn accuracy(&self) -> Vec<PrefetchAccuracy> {
        let predicted = self.layers.iter().filter(|l| l.accuracy.used > 0);
        predicted.map(|layer| layer.accuracy).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which reading an expert takes 10 ms, and drives hold a quarter of one.
    struct Machine {
        policy: PrefetchPolicy,
        now: Duration,
    }

    fn machine(mode: Lookahead, top_k: usize) -> Machine {
        Machine {
            policy: PrefetchPolicy::new(mode, top_k, 3, 0.25),
            now: Duration::ZERO,
        }
    }

    impl Machine {
        fn spend(&mut self, micros: u64) {
            self.now += Duration::from_micros(micros);
        }

        /// A token: layer 0 reads an expert, then layer 1 is predicted and decides after `gap` microseconds. The first `right` of 8
        /// candidates come true, none of which is in memory. Returns how many are prefetched.
        fn token(&mut self, right: u32, gap: u64) -> usize {
            self.policy.demanded(1.0, self.now);
            self.spend(10_000);
            self.policy.drained(true, self.now);
            let (mut prefetches, candidates) = (Vec::new(), [0, 1, 2, 3, 4, 5, 6, 7]);
            if self.policy.candidates(1, self.now) > 0 {
                self.spend(10);
                (self.policy).predict(1, &candidates, 8, self.now, |_| true, &mut prefetches);
            }
            self.spend(gap);
            let ids: Vec<u32> = (0..4).map(|i| if i < right { i } else { 20 + i }).collect();
            self.policy.routed(1, &ids, 1, self.now);
            prefetches.len()
        }

        fn tokens(&mut self, right: u32, gap: u64) -> usize {
            (0..400).map(|_| self.token(right, gap)).last().unwrap_or(0)
        }
    }

    #[test]
    fn as_many_are_prefetched_as_come_true() {
        let mut machine = machine(Lookahead::Auto, 4);
        for right in [4, 2, 0, 3] {
            assert_eq!(machine.tokens(right, 100_000), right as usize);
        }
    }

    /// In the gap of 1 ms, a tenth of an expert is read. A wrong prefetch delays the demands by a quarter of one.
    #[test]
    fn a_prefetch_must_gain_more_idle_time_than_it_delays_demands() {
        let mut machine = machine(Lookahead::Auto, 4);
        let sometimes = |machine: &mut Machine, wrong: u32| {
            (0..800)
                .map(|i| machine.token(u32::from(i % 10 >= wrong), 1_000))
                .last()
        };
        assert_eq!(
            sometimes(&mut machine, 1),
            Some(1),
            "right nine times in ten"
        );
        assert_eq!(
            sometimes(&mut machine, 4),
            Some(0),
            "right six times in ten"
        );
        // The same chance pays where the gap holds most of an expert.
        let last = (0..800)
            .map(|i| machine.token(u32::from(i % 10 >= 4), 9_000))
            .last();
        assert_eq!(last, Some(1));
    }

    #[test]
    fn no_more_are_prefetched_than_the_gap_holds() {
        let mut machine = machine(Lookahead::Auto, 4);
        assert_eq!(machine.tokens(4, 15_000), 2);
        assert_eq!(machine.tokens(4, 25_000), 3);
    }

    #[test]
    fn a_layer_that_cannot_be_predicted_is_rarely_predicted() {
        let mut machine = machine(Lookahead::Auto, 4);
        machine.tokens(0, 100_000);
        let Machine { policy, now } = &mut machine;
        let mut asked = |layer| {
            let asked = policy.candidates(layer, *now);
            policy.routed(layer, &[], 1, *now);
            usize::from(asked > 0)
        };
        assert_eq!((0..160).map(|_| asked(1)).sum::<usize>(), 20);
        assert_eq!(asked(2), 1, "another layer has its own record");
    }

    /// The drive is so fast that no last read is ever waited for.
    #[test]
    fn reads_that_are_not_waited_for_are_timed_too() {
        let mut machine = machine(Lookahead::Auto, 2);
        let mut prefetches = Vec::new();
        for _ in 0..100 {
            let Machine { policy, now } = &mut machine;
            policy.demanded(1.0, *now);
            *now += Duration::from_millis(10);
            policy.drained(false, *now);
            if policy.candidates(1, *now) > 0 {
                policy.predict(1, &[0, 1], 2, *now, |_| true, &mut prefetches);
            }
            *now += Duration::from_millis(30);
            policy.routed(1, &[0, 1], 1, *now);
        }
        assert_eq!(prefetches, [0, 1]);
    }

    #[test]
    fn early_and_late_predictions_have_separate_chances() {
        let mut machine = machine(Lookahead::Auto, 2);
        let (mut early, mut late) = (Vec::new(), Vec::new());
        for _ in 0..200 {
            let Machine { policy, now } = &mut machine;
            policy.demanded(1.0, *now);
            *now += Duration::from_millis(10);
            policy.drained(true, *now);
            for (candidates, prefetches) in [([8, 9], &mut early), ([0, 1], &mut late)] {
                prefetches.clear();
                if policy.candidates(1, *now) > 0 {
                    policy.predict(1, &candidates, 2, *now, |_| true, prefetches);
                }
                *now += Duration::from_millis(50);
            }
            policy.routed(1, &[0, 1], 1, *now);
        }
        assert_eq!((early, late), (vec![], vec![0, 1]));
    }

    #[test]
    fn experts_in_memory_say_nothing_about_reads() {
        let mut machine = machine(Lookahead::Auto, 2);
        let mut prefetches = Vec::new();
        // Candidates in memory always come true, others never.
        for i in 0..200 {
            let Machine { policy, now } = &mut machine;
            policy.demanded(1.0, *now);
            *now += Duration::from_millis(10);
            policy.drained(true, *now);
            let read = i % 2 == 1;
            policy.candidates(1, *now);
            policy.predict(1, &[0, 1], 2, *now, |_| read, &mut prefetches);
            assert!(i < 150 || prefetches.is_empty() == read);
            *now += Duration::from_millis(100);
            policy.routed(1, if read { &[4, 5] } else { &[0, 1] }, 1, *now);
        }
    }

    #[test]
    fn precision_and_recall_are_of_what_was_prefetched() {
        let mut machine = machine(Lookahead::Experts(2), 4);
        machine.token(1, 0);
        machine.token(3, 0);
        let expected = PrefetchAccuracy {
            layer: 1,
            width: 2,
            prefetched: 4,
            right: 3,
            used: 8,
            predicted: 4,
        };
        assert_eq!(machine.policy.accuracy(), [expected]);
    }

    #[test]
    fn the_last_prediction_counts_and_long_prompts_do_not() {
        let Machine { mut policy, now } = machine(Lookahead::Experts(1), 1);
        let mut prefetches = Vec::new();
        for id in [5, 6] {
            policy.candidates(1, now);
            policy.predict(1, &[id], 1, now, |_| true, &mut prefetches);
        }
        policy.routed(1, &[6], 1, now);
        assert_eq!(policy.accuracy()[0].right, 1);
        policy.predict(1, &[5; 100], 1, now, |_| true, &mut prefetches);
        assert_eq!(prefetches, [5]);
        policy.routed(1, &[5; 100], 100, now);
        assert_eq!(policy.accuracy()[0].prefetched, 1);
    }

    #[test]
    fn every_token_has_its_own_candidates_and_any_token_confirms_them() {
        let Machine { mut policy, now } = machine(Lookahead::Experts(2), 2);
        let mut prefetches = Vec::new();
        // Three tokens of different sequences, three candidates each.
        let candidates = [1, 2, 3, 4, 2, 5, 6, 1, 7];
        policy.predict(1, &candidates, 3, now, |_| true, &mut prefetches);
        assert_eq!(
            prefetches,
            [1, 4, 6, 2],
            "by rank, then by token, each once"
        );
        policy.routed(1, &[1, 2, 8, 9, 6, 9], 3, now);
        let accuracy = policy.accuracy()[0];
        assert_eq!((accuracy.prefetched, accuracy.right), (6, 5));
        assert_eq!(accuracy.used, 6);
    }
}
