//! Tests reads that fail or come short.

use super::*;

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
#[cfg_attr(miri, ignore = "needs O_DIRECT")]
fn a_file_system_that_refuses_direct_reads_is_read_through_the_page_cache() {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = dir.path().join("a");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(FILE_BYTES)
        .unwrap();
    let file = Arc::new(File::open(&path).unwrap());
    if file.direct_fd().is_err() {
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
fn a_shorter_copy_never_passes_for_the_file() {
    let mut s = Scheduler::new(
        1,
        &Files::new(vec![copies(&[8192, 4096])], DirectMode::Off).unwrap(),
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
fn the_last_copys_failure_is_reported_after_all_writes() {
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
