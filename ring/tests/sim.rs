//! Tests scheduler and engine on simulated drives: no read is lost, repeated or stuck, and the drives are busy.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use colibri_ring::sim::{Clock, SimDrive};
use colibri_ring::{
    Class, DirectMode, Engine, Event, File, Files, Options, Priority, Range, Replica, SlabId,
};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const SLAB: u64 = 32 * MIB;
const FILE: u64 = 1 << 40;

/// One file with a copy on each of `drives` drives.
fn copies(drives: usize) -> Files {
    let temp = tempfile::NamedTempFile::new().unwrap();
    temp.as_file().set_len(FILE).unwrap();
    let file = Arc::new(File::open(temp.path()).unwrap());
    let copy = |i| Replica {
        drive: i as u64,
        ..Replica::new(file.clone(), i)
    };
    Files::new(vec![(0..drives).map(copy).collect()], DirectMode::Off).unwrap()
}

fn engine(drives: &[SimDrive], slabs: usize) -> (Engine, Clock) {
    engine_of(&copies(drives.len()), drives, slabs, None)
}

fn engine_of(
    files: &Files,
    drives: &[SimDrive],
    slabs: usize,
    search: Option<(u64, u64)>,
) -> (Engine, Clock) {
    let clock = Clock::default();
    let class = Class {
        bytes: SLAB as usize,
        count: slabs,
    };
    let engine = Engine::simulated(
        files,
        &[class],
        Options {
            search,
            ..Options::default()
        },
        drives.to_vec(),
        clock.clone(),
    );
    (engine.unwrap(), clock)
}

fn drive(mib_per_s: u64) -> SimDrive {
    SimDrive::new(mib_per_s * MIB, Duration::from_micros(100))
}

fn read(engine: &mut Engine, slab: SlabId, priority: Priority, n: u64, bytes: u64) {
    let gate_up = Range {
        file: 0,
        offset: n * SLAB,
        len: bytes / 3 * 2,
        part: 0,
    };
    let down = Range {
        file: 0,
        offset: gate_up.offset + gate_up.len,
        len: bytes / 3,
        part: 1,
    };
    // The layout is the same for any number of copies.
    static FILES: LazyLock<Files> = LazyLock::new(|| copies(1));
    engine.read(slab, priority, FILES.layout(&[gate_up, down]).unwrap());
}

/// Keeps `slabs` reads of `bytes` under way until `total` have ended; MiB/s of virtual time.
fn bandwidth(drives: &[SimDrive], bytes: u64, slabs: usize, total: u64) -> (f64, Engine) {
    bandwidth_of(&copies(drives.len()), drives, bytes, slabs, total, None)
}

fn bandwidth_of(
    files: &Files,
    drives: &[SimDrive],
    bytes: u64,
    slabs: usize,
    total: u64,
    search: Option<(u64, u64)>,
) -> (f64, Engine) {
    let (mut engine, clock) = engine_of(files, drives, slabs, search);
    let mut started = 0;
    for slab in 0..slabs as u32 {
        read(&mut engine, SlabId(slab), Priority::Demand, started, bytes);
        started += 1;
    }
    engine.flush();
    let mut ended = 0;
    while ended < total {
        if let Event::Full(slab) = engine.wait().unwrap() {
            ended += 1;
            engine.release(slab);
            if started < total {
                read(&mut engine, slab, Priority::Demand, started, bytes);
                engine.flush();
                started += 1;
            }
        }
    }
    (
        (total * bytes / MIB) as f64 / clock.now().as_secs_f64(),
        engine,
    )
}

#[test]
fn demands_do_not_wait_for_the_prefetches_behind_them() {
    const DEMANDS: u32 = 4;
    let bytes = 3 * MIB / 16;
    let (mut engine, clock) = engine(&[drive(100)], 6);
    let transfer =
        Duration::from_secs_f64((u64::from(DEMANDS) * bytes) as f64 / (100 * MIB) as f64);
    for batch in 0..50 {
        let began = clock.now();
        engine.begin_batch();
        for slab in 0..6 {
            let priority = match slab < DEMANDS {
                true => Priority::Demand,
                false => Priority::Prefetch,
            };
            read(&mut engine, SlabId(slab), priority, batch, bytes);
        }
        engine.flush();
        let mut demands = 0;
        while engine.is_reading() {
            let Event::Full(slab) = engine.wait().unwrap() else {
                continue;
            };
            demands += u32::from(slab.0 < DEMANDS);
            if slab.0 < DEMANDS && demands == DEMANDS {
                let took = clock.now() - began;
                let expected = transfer + Duration::from_micros(101);
                assert!(took <= expected, "batch {batch}: {took:?} of {expected:?}");
            }
            engine.release(slab);
        }
    }
}

#[test]
fn copies_on_several_drives_give_their_bandwidths_sum() {
    for rates in [
        &[400][..],
        &[400, 400],
        &[400, 400, 400, 400],
        &[600, 200],
        &[7000, 3500, 500],
    ] {
        let drives: Vec<SimDrive> = rates.iter().map(|r| drive(*r)).collect();
        let sum: u64 = rates.iter().sum();
        let (reached, _) = bandwidth(&drives, 20 * MIB, 9, 400);
        assert!(
            reached > 0.95 * sum as f64,
            "{rates:?}: {reached:.0} of {sum} MiB/s"
        );
    }
}

#[test]
fn each_drive_gets_the_smallest_window_that_keeps_it_busy() {
    let found = |drives: &[SimDrive], total, search| {
        let files = copies(drives.len());
        let (reached, mut engine) = bandwidth_of(&files, drives, 20 * MIB, 9, total, search);
        (reached, engine.stats().unwrap().windows)
    };
    let far = SimDrive::new(7000 * MIB, Duration::from_micros(1500));
    let both = [far.clone(), drive(1500)];
    let (fixed, windows) = found(&both, 5000, None);
    assert_eq!(windows, [8 * MIB; 2]);
    let (reached, windows) = found(&both, 5000, Some(Options::SEARCH));
    assert_eq!(windows, [16 * MIB, 4 * MIB]);
    // The search gains more than it costs.
    assert!(reached > 1.05 * fixed, "{reached} MiB/s, {fixed} before");
    // A short run keeps the first window.
    let (_, windows) = found(&[far], 20, Some(Options::SEARCH));
    assert_eq!(windows, [8 * MIB]);
}

#[test]
fn a_drive_that_slows_down_loses_its_share() {
    let mut slowing = drive(400);
    slowing.changes = vec![(Duration::from_secs(1), 100 * MIB)];
    // 800 MiB in the first second, 500 in each after it.
    let (reached, engine) = bandwidth(&[drive(400), slowing], 20 * MIB, 9, 790);
    let seconds = (790 * 20) as f64 / reached;
    let ideal = 1.0 + (790 * 20 - 800) as f64 / 500.0;
    assert!(seconds < ideal * 1.05, "{seconds} s, at best {ideal}");
    drop(engine);
}

#[test]
fn the_others_serve_for_a_drive_that_fails() {
    let mut failing = drive(400);
    failing.fails_at = Some(Duration::from_millis(500));
    let (reached, mut engine) = bandwidth(&[drive(400), failing], 20 * MIB, 9, 400);
    assert!(reached > 0.95 * 400.0, "{reached}");
    let stats = engine.stats().unwrap();
    assert!(
        stats.sources[1].errors > 0 && stats.sources[1].errors < 20,
        "{:?}",
        stats.sources
    );
}

/// Bandwidth in MiB/s, and the share of each drive in the bytes, with weights.
fn weighted_shares(drives: &[SimDrive], weights: &[u32]) -> (f64, Vec<f64>) {
    let mut files = copies(drives.len());
    files.set_weights(weights.to_vec());
    let (reached, mut engine) = bandwidth_of(&files, drives, 20 * MIB, 9, 400, None);
    let sources = engine.stats().unwrap().sources;
    let total: u64 = sources.iter().map(|s| s.bytes).sum();
    let share = |bytes: u64| bytes as f64 / total as f64;
    (reached, sources.iter().map(|s| share(s.bytes)).collect())
}

#[test]
fn weighted_shares_are_kept_whatever_the_drives_give() {
    for rates in [[400, 400, 400], [7000, 300, 50], [100, 2000, 900]] {
        for weights in [[1, 1, 1], [3, 2, 1], [1, 0, 4], [0, 0, 1]] {
            let drives = rates.map(drive);
            let (reached, shares) = weighted_shares(&drives, &weights);
            let sum: u32 = weights.iter().sum();
            let of = |w: u32| f64::from(w) / f64::from(sum);
            for (share, weight) in shares.iter().zip(weights) {
                assert!(
                    (share - of(weight)).abs() < 0.02,
                    "{rates:?} {weights:?}: {shares:?}"
                );
            }
            // The drive with the most bytes for its speed sets the time.
            let bound = (rates.iter().zip(weights).filter(|(_, w)| *w > 0))
                .map(|(rate, w)| *rate as f64 / of(w))
                .fold(f64::INFINITY, f64::min);
            assert!(
                reached > 0.95 * bound,
                "{rates:?} {weights:?}: {reached} of {bound}"
            );
        }
    }
}

#[test]
fn the_others_serve_for_a_weighted_drive_that_fails() {
    let failing = SimDrive {
        fails_at: Some(Duration::from_millis(500)),
        ..drive(400)
    };
    // The others share its bytes in their ratio; a weight of 0 serves when no other copy is left.
    let (_, shares) = weighted_shares(&[drive(400), failing.clone(), drive(400)], &[2, 7, 1]);
    assert!((shares[0] / shares[2] - 2.0).abs() < 0.1, "{shares:?}");
    let (reached, shares) = weighted_shares(&[drive(400), failing.clone()], &[0, 1]);
    assert!(
        shares[0] > 0.9 && reached > 0.95 * 400.0,
        "{shares:?} {reached}"
    );
}

#[test]
fn prefetches_delay_a_demand_by_little() {
    let (mut engine, clock) = engine(&[drive(1000)], 9);
    for slab in 1..9 {
        read(
            &mut engine,
            SlabId(slab),
            Priority::Prefetch,
            u64::from(slab),
            30 * MIB,
        );
    }
    engine.flush();
    clock.advance(Duration::from_millis(100));
    read(&mut engine, SlabId(0), Priority::Demand, 0, 30 * MIB);
    engine.flush();
    let mut done = Vec::new();
    while done.last() != Some(&SlabId(0)) {
        if let Event::Full(slab) = engine.wait().unwrap() {
            done.push(slab);
        }
    }
    let took = clock.now() - Duration::from_millis(100);
    // 30 ms for the demand, and at most a quarter of the window of 8 MiB, and a chunk, before it.
    assert!(took < Duration::from_millis(30 + 5), "{took:?}");
}

/// The time at which each of `count` demands of 2.5 MiB is in, on an otherwise idle drive of 1000 MiB/s.
fn arrivals(count: u64, bursts: bool) -> Vec<Duration> {
    let drives = [SimDrive {
        bursts,
        ..drive(1000)
    }];
    let (mut engine, clock) = engine(&drives, count as usize);
    for slab in 0..count {
        let demand = Priority::Demand;
        read(&mut engine, SlabId(slab as u32), demand, slab, 5 * MIB / 2);
    }
    engine.flush();
    let mut at = vec![Duration::ZERO; count as usize];
    for _ in 0..3 * count {
        if let Event::Full(slab) = engine.wait().unwrap() {
            at[slab.index()] = clock.now();
        }
    }
    at
}

#[test]
fn the_tail_of_a_batch_is_deferred_on_burst_completing_drives() {
    let ms = Duration::from_micros(1000);
    // Two of three are in, and can be computed, while the third is read.
    let at = arrivals(3, true);
    assert!(at[1] < 6 * ms && at[2] > 7 * ms, "{at:?}");
    // A single demand is not split, and a drive that completes reads one by one defers nothing.
    assert_eq!(arrivals(1, true), arrivals(1, false));
    assert!(arrivals(3, false)[2] < 8 * ms);
}

#[test]
fn the_virtual_clock_makes_runs_repeatable() {
    let run = || {
        let drives = [
            drive(700),
            SimDrive {
                short_every: 7,
                ..drive(300)
            },
        ];
        let (reached, mut engine) = bandwidth(&drives, 5 * MIB, 5, 200);
        (reached.to_bits(), engine.stats().unwrap().sources)
    };
    assert_eq!(run(), run());
}

fn any_drive() -> impl Strategy<Value = SimDrive> {
    let change =
        (0u64..2_000, 1u64..5_000).prop_map(|(ms, rate)| (Duration::from_millis(ms), rate * MIB));
    let fails = prop::option::weighted(0.3, (0u64..2_000).prop_map(Duration::from_millis));
    (
        1u64..8_000,
        0u64..500,
        prop::collection::vec(change, 0..3),
        fails,
        prop_oneof![Just(0u64), 2u64..12],
        any::<bool>(),
    )
        .prop_map(
            |(rate, latency, mut changes, fails_at, short_every, bursts)| {
                changes.sort();
                SimDrive {
                    changes,
                    fails_at,
                    short_every,
                    bursts,
                    ..SimDrive::new(rate * MIB, Duration::from_micros(latency))
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000,
        failure_persistence: None, ..ProptestConfig::default() })]

    /// Demands, prefetches, promotions and abandoned reads on any mix of drives: every slab ends once and fails only if all
    /// drives do, and without failures or dropped chunks every byte is read exactly once.
    #[test]
    fn nothing_is_lost_or_read_twice(
        drives in prop::collection::vec(any_drive(), 1..6),
        steps in prop::collection::vec((0u8..8, 0u64..30, 1u64..30 * MIB, 0u64..20), 1..120),
    ) {
        let slabs = 6;
        let (mut engine, clock) = engine(&drives, slabs);
        let mut busy = vec![false; slabs];
        let (mut asked, mut dropped, mut failed) = (0, false, false);
        let mut settle = |event: Event, engine: &mut Engine, busy: &mut Vec<bool>| {
            match event {
                Event::Part(..) => return true,
                Event::Full(slab) => {
                    engine.release(slab);
                    busy[slab.index()] = false;
                }
                Event::Dropped(slab) => {
                    dropped = true;
                    busy[slab.index()] = false;
                }
                Event::Failed(slab, _) => {
                    failed = true;
                    busy[slab.index()] = false;
                }
            }
            true
        };
        for (action, n, bytes, ms) in steps {
            let slab = SlabId((n % slabs as u64) as u32);
            match (action, busy[slab.index()]) {
                (0..4, false) => {
                    let priority = if action < 2 { Priority::Demand } else { Priority::Prefetch };
                    read(&mut engine, slab, priority, n, bytes / 12288 * 12288 + 12288);
                    asked += bytes / 12288 * 12288 + 12288;
                    busy[slab.index()] = true;
                }
                (4, true) => engine.promote(slab),
                (5, true) => engine.abandon(slab),
                _ => clock.advance(Duration::from_millis(ms)),
            }
            engine.flush();
            while let Some(event) = engine.poll().unwrap() {
                settle(event, &mut engine, &mut busy);
            }
        }
        while busy.contains(&true) {
            let event = engine.wait().unwrap();
            settle(event, &mut engine, &mut busy);
        }
        let stats = engine.stats().unwrap();
        let read: u64 = stats.sources.iter().map(|s| s.bytes).sum();
        if drives.iter().any(|d| d.fails_at.is_none()) {
            prop_assert!(!failed);
        }
        if drives.iter().all(|d| d.fails_at.is_none() && d.short_every == 0) && !dropped {
            prop_assert_eq!(read, asked);
        }
    }
}
