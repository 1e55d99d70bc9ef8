use proptest::prelude::*;
use std::sync::Arc;

use super::*;
use crate::extent::{Layout, Range};
use crate::file::File;
use crate::replica::DirectMode;

const FILE_BYTES: u64 = 300_001;
const NOW: Duration = Duration::ZERO;

/// `files` files of `copies` copies each; nothing here reads them.
fn files(files: usize, copies: usize) -> Files {
    let temp = tempfile::NamedTempFile::new().unwrap();
    temp.as_file().set_len(FILE_BYTES).unwrap();
    let file = Arc::new(File::open(temp.path()).unwrap());
    let copies = (0..copies)
        .map(|source| Replica::new(file.clone(), source))
        .collect();
    Files::new(vec![copies; files], DirectMode::Off).unwrap()
}

fn chunks(ranges: &[(u32, u64, u64, u8)], chunk: u64) -> (Layout, Vec<Chunk>) {
    let ranges: Vec<Range> = ranges
        .iter()
        .map(|&(file, offset, len, part)| Range {
            file,
            offset,
            len,
            part,
        })
        .collect();
    let layout = Layout::new(&ranges, 4096).unwrap();
    let chunks = layout.chunks(chunk, 4096);
    (layout, chunks)
}

fn ok(op: Op) -> Completion {
    Completion {
        id: op.id,
        result: Ok(op.len.min(FILE_BYTES - op.offset)),
    }
}

fn failed(op: Op, errno: i32) -> Completion {
    Completion {
        id: op.id,
        result: Err(io::Error::from_raw_os_error(errno)),
    }
}

#[test]
fn demand_goes_before_speculation() {
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
    s.push(SlabId(0), Priority::Speculative, &c, &mut events);
    s.push(SlabId(1), Priority::Demand, &c, &mut events);
    s.push(SlabId(2), Priority::Speculative, &c, &mut events);
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
    s.push(SlabId(2), Priority::Speculative, &c, &mut events);
    s.push(SlabId(3), Priority::Demand, &c, &mut events);
    s.promote(SlabId(1));
    let order: Vec<u32> = std::iter::from_fn(|| s.next(NOW))
        .map(|op| op.slab.0)
        .collect();
    assert_eq!(order, [3, 1, 2, 0]);
}

#[test]
fn the_window_bounds_what_a_drive_has() {
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
fn dropped_work_never_reaches_a_drive() {
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
    s.push(SlabId(0), Priority::Speculative, &c, &mut events);
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
fn dropped_work_that_is_wanted_again_goes_on() {
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
    s.push(SlabId(0), Priority::Speculative, &c, &mut events);
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
fn a_failing_copy_is_replaced_and_then_avoided() {
    let mut s = Scheduler::new(
        1,
        &files(1, 2),
        Window {
            bytes: 4096,
            reads: 1,
        },
    );
    let mut events = Vec::new();
    let (_, c) = chunks(&[(0, 0, 3 * 4096, 0)], 4096);
    s.push(SlabId(0), Priority::Demand, &c, &mut events);
    let op = s.next(NOW).unwrap();
    s.complete(failed(op, libc::EIO), NOW, &mut events);
    let mut copies = vec![op.copy];
    while let Some(op) = s.next(NOW) {
        copies.push(op.copy);
        s.complete(ok(op), NOW, &mut events);
    }
    assert_eq!(copies, [0, 1, 1, 1]);
    assert!(matches!(events.last(), Some(Event::Full(_))));
    assert_eq!(s.stats.sources[0].errors, 1);
}

/// Fails the first read of file 0, lets everything else succeed, and returns which copies of file 1 were read.
fn copies_of_the_second_file(error: io::Error) -> Vec<u8> {
    let window = Window {
        bytes: 4096,
        reads: 1,
    };
    let mut s = Scheduler::new(2, &files(2, 2), window);
    let mut events = Vec::new();
    for file in 0..2 {
        let (_, c) = chunks(&[(file, 0, 2 * 4096, 0)], 4096);
        s.push(SlabId(file), Priority::Demand, &c, &mut events);
    }
    let mut first = Some(error);
    let mut copies = Vec::new();
    while let Some(op) = s.next(NOW) {
        if op.file == 1 {
            copies.push(op.copy);
        }
        let result = match first.take() {
            Some(error) => Err(error),
            None => Ok(op.len),
        };
        s.complete(Completion { id: op.id, result }, NOW, &mut events);
    }
    assert!(s.is_idle());
    copies
}

#[test]
fn a_drive_that_fails_is_avoided_for_all_its_files() {
    let broken = io::Error::from_raw_os_error(libc::EIO);
    assert_eq!(copies_of_the_second_file(broken), [1, 1]);
    let truncated = io::ErrorKind::UnexpectedEof.into();
    assert_eq!(copies_of_the_second_file(truncated), [0, 0]);
}

#[test]
fn a_wait_is_never_longer_than_the_drive_with_the_fewest_reads() {
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

#[test]
fn a_file_system_that_refuses_direct_reads_is_read_through_the_page_cache() {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = dir.path().join("a");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(FILE_BYTES)
        .unwrap();
    let file = Arc::new(File::open(&path).unwrap());
    if file.direct().is_err() {
        println!("skipped: no O_DIRECT here");
        return;
    }
    for mode in [DirectMode::Auto, DirectMode::On] {
        let files = Files::new(vec![vec![Replica::new(file.clone(), 0)]], mode).unwrap();
        let mut s = Scheduler::new(
            1,
            &files,
            Window {
                bytes: 4096,
                reads: 1,
            },
        );
        let mut events = Vec::new();
        let (_, c) = chunks(&[(0, 0, 2 * 4096, 0)], 4096);
        s.push(SlabId(0), Priority::Demand, &c, &mut events);
        assert!(s.stats().direct);
        let mut refusals = 0;
        while let Some(op) = s.next(NOW) {
            refusals += u32::from(op.direct);
            let ended = if op.direct {
                failed(op, libc::EINVAL)
            } else {
                ok(op)
            };
            s.complete(ended, NOW, &mut events);
        }
        assert_eq!(refusals, 1, "it is tried once");
        match mode {
            DirectMode::On => assert!(matches!(events.last(), Some(Event::Failed(..)))),
            _ => assert!(matches!(events.last(), Some(Event::Full(_))) && !s.stats().direct),
        }
    }
}

#[test]
fn a_shorter_copy_is_never_taken_for_the_whole() {
    let files_of = |sizes: [u64; 2]| {
        let copy = |(source, size): (usize, u64)| {
            let temp = tempfile::NamedTempFile::new().unwrap();
            temp.as_file().set_len(size).unwrap();
            Replica::new(Arc::new(File::open(temp.path()).unwrap()), source)
        };
        let copies = sizes.into_iter().enumerate().map(copy).collect();
        Files::new(vec![copies], DirectMode::Off).unwrap()
    };
    let mut s = Scheduler::new(
        1,
        &files_of([8192, 4096]),
        Window {
            bytes: 4096,
            reads: 1,
        },
    );
    // As if the first copy had failed before.
    s.files[0][0].failed = true;
    let mut events = Vec::new();
    let (_, c) = chunks(&[(0, 4096, 4096, 0)], 4096);
    s.push(SlabId(0), Priority::Demand, &c, &mut events);
    let op = s.next(NOW).unwrap();
    assert_eq!(op.copy, 1);
    s.complete(
        Completion {
            id: op.id,
            result: Ok(0),
        },
        NOW,
        &mut events,
    );
    assert_eq!(s.next(NOW).unwrap().copy, 0);
}

#[test]
fn the_last_copys_failure_is_an_error_when_nothing_writes_any_more() {
    let mut s = Scheduler::new(
        1,
        &files(1, 1),
        Window {
            bytes: u64::MAX,
            reads: 2,
        },
    );
    let mut events = Vec::new();
    let (_, c) = chunks(&[(0, 0, 4 * 4096, 1)], 4096);
    s.push(SlabId(0), Priority::Demand, &c, &mut events);
    events.clear();
    let (a, b) = (s.next(NOW).unwrap(), s.next(NOW).unwrap());
    s.complete(failed(a, libc::EIO), NOW, &mut events);
    assert!(
        events.is_empty(),
        "the other read is still writing into the slab"
    );
    assert!(s.next(NOW).is_none(), "the rest is pointless");
    s.complete(ok(b), NOW, &mut events);
    match &events[..] {
        [Event::Failed(SlabId(0), e)] => {
            assert_eq!((e.file, e.offset, e.len), (0, 0, 4096));
            assert_eq!(e.source.raw_os_error(), Some(libc::EIO));
        }
        other => panic!("{other:?}"),
    }
    assert!(s.is_idle());
}

#[test]
fn a_truncated_file_is_an_error() {
    let mut s = Scheduler::new(1, &files(1, 1), Window::default());
    let mut events = Vec::new();
    let (_, c) = chunks(&[(0, 290_000, 10_001, 1)], 1 << 20);
    s.push(SlabId(0), Priority::Demand, &c, &mut events);
    let op = s.next(NOW).unwrap();
    s.complete(
        Completion {
            id: op.id,
            result: Ok(4096),
        },
        NOW,
        &mut events,
    );
    assert!(!s.is_idle(), "the rest of a short read waits");
    let op = s.next(NOW).unwrap();
    s.complete(
        Completion {
            id: op.id,
            result: Ok(0),
        },
        NOW,
        &mut events,
    );
    assert!(matches!(events.last(), Some(Event::Failed(..))));
}

/// Reads batches one after the other from drives of these speeds (MiB/s), each of which does one read at a time and has a copy
/// of everything, and returns how long the last batch took, as a multiple of the shortest possible time.
fn batches(speeds: &[f64], chunk: u64, chunks_in_batch: u64, batches: usize) -> f64 {
    let window = Window::default();
    let mut s = Scheduler::new(1, &files(1, speeds.len()), window);
    s.drives = (0..speeds.len() as u64)
        .map(|n| Drive::new(n, window))
        .collect();
    for (drive, route) in s.files[0].iter_mut().enumerate() {
        route.drive = drive;
    }
    let mut now = 0.0;
    let mut batch_time = 0.0;
    // Of each drive: when it will have done everything that it has, and what that is.
    let mut free_at = vec![0.0; speeds.len()];
    let mut at_drives: Vec<(f64, Op)> = Vec::new();
    let chunks: Vec<Chunk> = (0..chunks_in_batch)
        .map(|n| Chunk {
            file: 0,
            offset: n * chunk,
            len: chunk,
            at: n * chunk,
            payload: [chunk, 0],
        })
        .collect();
    for _ in 0..batches {
        let begin = now;
        let mut events = Vec::new();
        s.push(SlabId(0), Priority::Demand, &chunks, &mut events);
        loop {
            while let Some(op) = s.next(Duration::from_secs_f64(now)) {
                let drive = op.copy as usize;
                let took = op.len as f64 / speeds[drive] / f64::from(1 << 20);
                free_at[drive] = now.max(free_at[drive]) + took;
                at_drives.push((free_at[drive], op));
            }
            let Some(i) =
                (0..at_drives.len()).min_by(|&a, &b| at_drives[a].0.total_cmp(&at_drives[b].0))
            else {
                break;
            };
            let (end, op) = at_drives.swap_remove(i);
            now = end;
            let ended = Completion {
                id: op.id,
                result: Ok(op.len),
            };
            s.complete(ended, Duration::from_secs_f64(now), &mut events);
        }
        assert!(s.is_idle() && s.waiting_bytes == [0; 3]);
        batch_time = now - begin;
    }
    let mib = (chunk * chunks_in_batch) as f64 / f64::from(1 << 20);
    batch_time / (mib / speeds.iter().sum::<f64>())
}

#[test]
fn a_batch_that_fits_into_one_window_is_spread_over_all_drives() {
    const MIB: u64 = 1 << 20;
    assert!(batches(&[400.0, 400.0], 2 * MIB, 8, 1) < 1.01);
    assert!(batches(&[400.0; 4], 2 * MIB, 12, 1) < 1.01);
    // Small reads, far from any window.
    assert!(batches(&[400.0; 4], 16 << 10, 12, 1) < 1.01);
}

#[test]
fn a_slow_drive_does_not_hold_the_end_of_a_batch() {
    const MIB: u64 = 1 << 20;
    // Two experts' chunks and eight experts', once the speeds are known. A chunk is 10 ms of the slow drive.
    for (chunks, most) in [(20, 1.25), (80, 1.1)] {
        for speeds in [&[600.0, 200.0][..], &[200.0, 600.0], &[400.0, 50.0, 400.0]] {
            let ratio = batches(speeds, 2 * MIB, chunks, 12);
            assert!(ratio < most, "{speeds:?} {chunks}: {ratio}");
        }
    }
}

proptest! {
    /// Whatever fails, comes short or is dropped, in whatever order reads end: every slab ends exactly once, a full
    /// slab has had every byte written, and nothing is written after the end.
    #[test]
    fn every_slab_ends_once(
        jobs in prop::collection::vec(
            (prop::collection::vec((0u32..2, 0u64..200_000, 1u64..100_000, 0u8..2), 1..4), any::<bool>()), 1..6),
        dice in prop::collection::vec((0u8..12, any::<prop::sample::Index>()), 400),
        copies in 1usize..4,
        chunk in 1u64..60_000,
    ) {
        let mut s = Scheduler::new(jobs.len(), &files(2, copies), Window { bytes: 100_000, reads: 4 });
        let mut events = Vec::new();
        let mut layouts = Vec::new();
        for (i, (ranges, speculative)) in jobs.iter().enumerate() {
            let (layout, c) = chunks(ranges, chunk);
            layouts.push(layout);
            let priority = if *speculative { Priority::Speculative } else { Priority::Demand };
            s.push(SlabId(i as u32), priority, &c, &mut events);
        }
        let mut ended = vec![0; jobs.len()];
        let mut written: Vec<std::collections::HashSet<u64>> = vec![Default::default(); jobs.len()];
        let mut at_device: Vec<Op> = Vec::new();
        let mut dice = dice.iter().cycle();
        loop {
            while let Some(op) = s.next(NOW) {
                prop_assert_eq!(ended[op.slab.index()], 0);
                at_device.push(op);
            }
            if at_device.is_empty() {
                break;
            }
            let (throw, which) = dice.next().unwrap();
            if *throw == 0 {
                s.drop_waiting(SlabId(which.index(jobs.len()) as u32), &mut events);
            }
            if *throw == 1 {
                s.promote(SlabId(which.index(jobs.len()) as u32));
            }
            let op = at_device.swap_remove(which.index(at_device.len()));
            let all = op.len.min(FILE_BYTES.saturating_sub(op.offset));
            let result = match throw {
                2 => Err(io::Error::from_raw_os_error(libc::EIO)),
                3 => Err(io::Error::from_raw_os_error(libc::EINTR)),
                4 | 5 if all > 4096 => Ok(4096 + (all - 4096) / 2),
                _ => Ok(all),
            };
            if let Ok(n) = result {
                written[op.slab.index()].extend((0..n).step_by(512).map(|b| op.at + b));
            }
            s.complete(Completion { id: op.id, result }, NOW, &mut events);
            for event in events.drain(..) {
                match event {
                    Event::Part(slab, part) => {
                        let layout = &layouts[slab.index()];
                        for (range, place) in layout.ranges.iter().zip(&layout.places) {
                            let bytes = *place..place + range.len;
                            let complete = bytes.step_by(512).chain([place + range.len - 1])
                                .all(|b| written[slab.index()].contains(&(b / 512 * 512)));
                            prop_assert!(range.part != part || complete);
                        }
                    }
                    Event::Full(slab) | Event::Dropped(slab) | Event::Failed(slab, _) => {
                        ended[slab.index()] += 1;
                        prop_assert!(at_device.iter().all(|op| op.slab != slab));
                    }
                }
            }
        }
        prop_assert!(s.is_idle());
        prop_assert!(ended.iter().all(|n| *n == 1), "{:?}", ended);
    }
}
