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
        self.policy.demanded(1.0, true, self.now);
        self.spend(10_000);
        self.policy.drained(true, self.now);
        let (mut prefetches, candidates) = (Vec::new(), [0, 1, 2, 3, 4, 5, 6, 7]);
        if self.policy.candidates(1, self.now) > 0 {
            self.spend(10);
            (self.policy).predict(
                1,
                &candidates,
                8,
                self.now,
                |_| CandidateState::Absent,
                &mut prefetches,
            );
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
        policy.demanded(1.0, true, *now);
        *now += Duration::from_millis(10);
        policy.drained(false, *now);
        if policy.candidates(1, *now) > 0 {
            policy.predict(
                1,
                &[0, 1],
                2,
                *now,
                |_| CandidateState::Absent,
                &mut prefetches,
            );
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
        policy.demanded(1.0, true, *now);
        *now += Duration::from_millis(10);
        policy.drained(true, *now);
        for (candidates, prefetches) in [([8, 9], &mut early), ([0, 1], &mut late)] {
            prefetches.clear();
            if policy.candidates(1, *now) > 0 {
                policy.predict(
                    1,
                    &candidates,
                    2,
                    *now,
                    |_| CandidateState::Absent,
                    prefetches,
                );
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
        policy.demanded(1.0, true, *now);
        *now += Duration::from_millis(10);
        policy.drained(true, *now);
        let read = i % 2 == 1;
        policy.candidates(1, *now);
        policy.predict(
            1,
            &[0, 1],
            2,
            *now,
            |_| {
                if read {
                    CandidateState::Absent
                } else {
                    CandidateState::InMemory
                }
            },
            &mut prefetches,
        );
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
        policy.predict(
            1,
            &[id],
            1,
            now,
            |_| CandidateState::Absent,
            &mut prefetches,
        );
    }
    policy.routed(1, &[6], 1, now);
    assert_eq!(policy.accuracy()[0].right, 1);
    policy.predict(
        1,
        &[5; 100],
        1,
        now,
        |_| CandidateState::Absent,
        &mut prefetches,
    );
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
    policy.predict(
        1,
        &candidates,
        3,
        now,
        |_| CandidateState::Absent,
        &mut prefetches,
    );
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

/// Reading an expert takes 10 ms. The early prediction has prefetched two experts that come true half of the time, which is too seldom
/// for the gap of the late prediction. After 20 ms both are read.
#[test]
fn what_the_drives_have_read_already_costs_nothing() {
    for (read_for, kept) in [(0, 0), (20_000, 2)] {
        let mut machine = machine(Lookahead::Auto, 2);
        let mut prefetches = Vec::new();
        for i in 0..400 {
            machine.policy.demanded(1.0, true, machine.now);
            machine.spend(10_000);
            machine.policy.drained(true, machine.now);
            let mut predict = |machine: &mut Machine, state| {
                machine.policy.candidates(1, machine.now);
                (machine.policy).predict(1, &[0, 1], 2, machine.now, |_| state, &mut prefetches);
            };
            predict(&mut machine, CandidateState::Absent);
            machine.spend(read_for);
            predict(&mut machine, CandidateState::Reading);
            machine.spend(1_000);
            let ids = if i % 2 == 0 { [0, 1] } else { [8, 9] };
            machine.policy.routed(1, &ids, 1, machine.now);
        }
        assert_eq!(prefetches.len(), kept, "read for {read_for} us");
    }
}

/// Batches take 5 ms and 1 ms for each expert. The drives are idle during the latency of the last demands, also if the next layer
/// decides at once.
#[test]
fn the_latency_of_demands_leaves_time_for_prefetches() {
    for (latency, width) in [(0, 0), (5_000, 4)] {
        let mut machine = machine(Lookahead::Auto, 4);
        let mut prefetches = Vec::new();
        for i in 0..200 {
            let missing = 1 + i % 4;
            machine.policy.demanded(missing as f64, true, machine.now);
            machine.policy.candidates(1, machine.now);
            let candidates = [0, 1, 2, 3];
            let absent = |_| CandidateState::Absent;
            (machine.policy).predict(1, &candidates, 4, machine.now, absent, &mut prefetches);
            machine.spend(latency + missing * 1_000);
            machine.policy.drained(true, machine.now);
            machine.policy.routed(1, &candidates, 1, machine.now);
        }
        assert_eq!(prefetches.len(), width, "latency of {latency} us");
    }
}
