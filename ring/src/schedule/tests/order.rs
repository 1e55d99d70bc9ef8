//! Tests the order of reads.

use super::*;

#[test]
fn demands_go_before_prefetches() {
    let mut s = Scheduler::new(
        3,
        &files(1, 1),
        Window {
            bytes: u64::MAX,
            reads: 100,
        },
    );
    let mut events = Vec::new();
    let (_, c) = chunks(&[(0, 0, 8192, 0)], 4096);
    s.push(SlabId(0), Priority::Prefetch, &c, &mut events);
    s.push(SlabId(1), Priority::Demand, &c, &mut events);
    s.push(SlabId(2), Priority::Prefetch, &c, &mut events);
    s.promote(SlabId(2));
    let order: Vec<u32> = std::iter::from_fn(|| s.next(NOW))
        .map(|op| op.slab.0)
        .collect();
    assert_eq!(order, [1, 1, 2, 2, 0, 0]);
}

#[test]
fn preloads_come_last_and_can_be_promoted() {
    let all = Window {
        bytes: u64::MAX,
        reads: 100,
    };
    let mut s = Scheduler::new(4, &files(1, 1), all);
    let mut events = Vec::new();
    let (_, c) = chunks(&[(0, 0, 4096, 0)], 4096);
    s.push(SlabId(0), Priority::Preload, &c, &mut events);
    s.push(SlabId(1), Priority::Preload, &c, &mut events);
    s.push(SlabId(2), Priority::Prefetch, &c, &mut events);
    s.push(SlabId(3), Priority::Demand, &c, &mut events);
    s.promote(SlabId(1));
    let order: Vec<u32> = std::iter::from_fn(|| s.next(NOW))
        .map(|op| op.slab.0)
        .collect();
    assert_eq!(order, [3, 1, 2, 0]);
}

#[test]
fn the_window_bounds_the_reads_of_a_drive() {
    let mut s = Scheduler::new(
        1,
        &files(1, 1),
        Window {
            bytes: 3 * 4096,
            reads: 10,
        },
    );
    let (_, c) = chunks(&[(0, 0, 20 * 4096, 0)], 4096);
    s.push(SlabId(0), Priority::Demand, &c, &mut Vec::new());
    let ops: Vec<Op> = std::iter::from_fn(|| s.next(NOW)).collect();
    assert_eq!(ops.len(), 3);
    s.complete(ok(ops[1]), NOW, &mut Vec::new());
    assert!(s.next(NOW).is_some());
    assert!(s.next(NOW).is_none());
}

#[test]
fn dropped_chunks_never_reach_a_drive() {
    let mut s = Scheduler::new(
        1,
        &files(1, 1),
        Window {
            bytes: 4096,
            reads: 1,
        },
    );
    let mut events = Vec::new();
    let (_, c) = chunks(&[(0, 0, 4 * 4096, 0)], 4096);
    s.push(SlabId(0), Priority::Prefetch, &c, &mut events);
    let op = s.next(NOW).unwrap();
    events.clear();
    s.drop_waiting(SlabId(0), &mut events);
    assert!(events.is_empty(), "a read is still writing into the slab");
    s.complete(ok(op), NOW, &mut events);
    assert!(matches!(events[..], [Event::Dropped(SlabId(0))]));
    assert!(s.next(NOW).is_none());
    assert!(s.is_idle());
}

#[test]
fn a_dropped_read_that_is_promoted_goes_on() {
    let mut s = Scheduler::new(
        1,
        &files(1, 1),
        Window {
            bytes: 4096,
            reads: 1,
        },
    );
    let mut events = Vec::new();
    let (_, c) = chunks(&[(0, 0, 3 * 4096, 0)], 4096);
    s.push(SlabId(0), Priority::Prefetch, &c, &mut events);
    let op = s.next(NOW).unwrap();
    s.drop_waiting(SlabId(0), &mut events);
    s.promote(SlabId(0));
    s.complete(ok(op), NOW, &mut events);
    let mut reads = 1;
    while let Some(op) = s.next(NOW) {
        reads += 1;
        s.complete(ok(op), NOW, &mut events);
    }
    assert_eq!(reads, 3, "each chunk is read once");
    assert!(matches!(
        events[..],
        [Event::Part(_, 1), Event::Part(_, 0), Event::Full(_)]
    ));
}

#[test]
fn a_wait_is_no_longer_than_the_drive_with_the_fewest_reads() {
    let window = Window {
        bytes: u64::MAX,
        reads: 10,
    };
    let mut s = Scheduler::new(1, &files(1, 1), window);
    assert_eq!(s.fewest_in_flight(), 1);
    let (_, c) = chunks(&[(0, 0, 3 * 4096, 0)], 4096);
    s.push(SlabId(0), Priority::Demand, &c, &mut Vec::new());
    while s.next(NOW).is_some() {}
    assert_eq!(s.fewest_in_flight(), 3);
}
