//! Tests the engine on real files and every device.

use std::path::Path;
use std::sync::Arc;

use colibri_ring::{
    Class, DirectMode, Engine, EngineError, EngineKind, Event, File, Files, Options, Priority,
    Range, Replica, SlabId, SlabState, Window,
};

fn range(file: u32, offset: u64, len: u64, part: u8) -> Range {
    Range {
        file,
        offset,
        len,
        part,
    }
}

fn class(bytes: usize, count: usize) -> Class {
    Class { bytes, count }
}

/// Bytes that differ everywhere.
fn pattern(len: usize, seed: u32) -> Vec<u8> {
    let mut x = seed | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x as u8
    };
    (0..len).map(|_| next()).collect()
}

fn open(path: &Path, source: usize) -> Replica {
    Replica::new(Arc::new(File::open(path).unwrap()), source)
}

/// A directory that is not on a tmpfs.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

const KINDS: [EngineKind; 2] = [EngineKind::Auto, EngineKind::Pread];

type Make = fn(&Files, &[Class], Options) -> Result<Engine, EngineError>;

/// With a ring thread and without.
const MAKES: [Make; 2] = [Engine::new, Engine::on_caller];

fn end(engine: &mut Engine) -> Event {
    loop {
        match engine.wait().unwrap() {
            Event::Part(..) => {}
            event => return event,
        }
    }
}

#[test]
fn payloads_are_the_files_bytes() {
    let dir = directory();
    let contents: Vec<Vec<u8>> = (0..3)
        .map(|i| pattern(700_001 + i * 13, i as u32 + 7))
        .collect();
    let replicas: Vec<_> = contents
        .iter()
        .enumerate()
        .map(|(i, bytes)| {
            let path = dir.path().join(format!("{i}.bin"));
            std::fs::write(&path, bytes).unwrap();
            vec![open(&path, 0)]
        })
        .collect();
    for (kind, make) in KINDS
        .into_iter()
        .flat_map(|kind| MAKES.map(|make| (kind, make)))
    {
        for mode in [DirectMode::Auto, DirectMode::Off] {
            let files = Files::new(replicas.clone(), mode).unwrap();
            let options = Options {
                kind,
                chunk_bytes: 64 << 10,
                ..Options::default()
            };
            let class = class(2 << 20, 4);
            let mut engine = make(&files, &[class], options).unwrap();
            for round in 0..40u64 {
                for slab in 0..4u32 {
                    let n = round * 4 + u64::from(slab);
                    let file = (n % 3) as usize;
                    let len = contents[file].len() as u64;
                    let ranges = [
                        range(file as u32, n * 101, 200_000, 0),
                        // The last bytes of the file, whose aligned read reaches past its end.
                        range(file as u32, len - 50_000, 50_000, 1),
                        range((file as u32 + 1) % 3, n, 1, 1),
                    ];
                    let layout = files.layout(&ranges).unwrap();
                    let priority = if n % 2 == 0 {
                        Priority::Demand
                    } else {
                        Priority::Prefetch
                    };
                    engine.read(SlabId(slab), priority, layout);
                }
                engine.flush();
                for _ in 0..4 {
                    let Event::Full(slab) = end(&mut engine) else {
                        panic!("a read failed")
                    };
                    let n = round * 4 + u64::from(slab.0);
                    let file = (n % 3) as usize;
                    let start = (n * 101) as usize;
                    let whole = &contents[file];
                    assert_eq!(engine.payload(slab, 0), &whole[start..start + 200_000]);
                    assert_eq!(engine.payload(slab, 1), &whole[whole.len() - 50_000..]);
                    let other = &contents[(file + 1) % 3];
                    assert_eq!(engine.payload(slab, 2), &other[n as usize..n as usize + 1]);
                    engine.release(slab);
                }
            }
            let stats = engine.stats().unwrap();
            assert!(stats.sources[0].bytes >= 160 * 250_001);
            assert_eq!(stats.sources[0].errors, 0);
            assert_eq!(stats.latency_us.len(), stats.sources[0].reads);
        }
    }
}

#[test]
fn a_part_is_readable_before_the_rest() {
    let dir = directory();
    let path = dir.path().join("a.bin");
    let bytes = pattern(4 << 20, 3);
    std::fs::write(&path, &bytes).unwrap();
    for kind in KINDS {
        let files = Files::new(vec![vec![open(&path, 0)]], DirectMode::Auto).unwrap();
        // One read at a time: the first part must be complete long before the second.
        let window = Window { bytes: 1, reads: 1 };
        let options = Options {
            kind,
            window,
            chunk_bytes: 4096,
            ..Options::default()
        };
        let class = class(4 << 20, 1);
        let mut engine = Engine::new(&files, &[class], options).unwrap();
        let ranges = [range(0, 2 << 20, 4096, 0), range(0, 0, 2 << 20, 1)];
        engine.read(SlabId(0), Priority::Demand, files.layout(&ranges).unwrap());
        engine.flush();
        assert!(matches!(engine.wait().unwrap(), Event::Part(SlabId(0), 0)));
        assert_eq!(
            engine.payload(SlabId(0), 0),
            &bytes[2 << 20..(2 << 20) + 4096]
        );
        assert_eq!(engine.state(SlabId(0)), SlabState::Filling([true, false]));
        assert!(matches!(end(&mut engine), Event::Full(_)));
    }
}

#[test]
#[should_panic(expected = "is used before it is read")]
fn a_slab_cannot_be_used_before_it_is_read() {
    let dir = directory();
    let path = dir.path().join("a.bin");
    std::fs::write(&path, pattern(9000, 3)).unwrap();
    let files = Files::new(vec![vec![open(&path, 0)]], DirectMode::Auto).unwrap();
    let class = class(1 << 20, 1);
    let mut engine = Engine::new(&files, &[class], Options::default()).unwrap();
    let range = range(0, 0, 4096, 0);
    engine.read(SlabId(0), Priority::Demand, files.layout(&[range]).unwrap());
    engine.payload(SlabId(0), 0);
}

#[test]
fn a_file_truncated_later_is_an_error_and_the_other_copy_serves() {
    let dir = directory();
    let (a, b) = (dir.path().join("a.bin"), dir.path().join("b.bin"));
    let bytes = pattern(1 << 20, 5);
    for kind in KINDS {
        std::fs::write(&a, &bytes).unwrap();
        std::fs::write(&b, &bytes).unwrap();
        let alone = Files::new(vec![vec![open(&a, 0)]], DirectMode::Auto).unwrap();
        let both = Files::new(vec![vec![open(&a, 0), open(&b, 1)]], DirectMode::Auto).unwrap();
        std::fs::write(&a, &bytes[..100_000]).unwrap();
        let range = range(0, 5000, 900_000, 0);
        let layout = alone.layout(&[range]).unwrap();
        let class = class(1 << 20, 1);
        let options = Options {
            kind,
            ..Options::default()
        };

        let mut engine = Engine::new(&alone, &[class], options).unwrap();
        engine.read(SlabId(0), Priority::Demand, layout.clone());
        engine.flush();
        match end(&mut engine) {
            Event::Failed(_, e) => {
                let text = e.to_string();
                assert!(
                    text.contains("a.bin") && text.contains("truncated"),
                    "{text}"
                );
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(engine.state(SlabId(0)), SlabState::Free);

        let mut engine = Engine::new(&both, &[class], options).unwrap();
        engine.read(SlabId(0), Priority::Demand, layout);
        engine.flush();
        assert!(matches!(end(&mut engine), Event::Full(_)));
        assert_eq!(engine.payload(SlabId(0), 0), &bytes[5000..905_000]);
        let stats = engine.stats().unwrap();
        assert_eq!(stats.sources[0].errors, 1);
        assert!(stats.sources[1].bytes > 0);
    }
}

#[test]
fn dropping_the_engine_drains_it() {
    let dir = directory();
    let path = dir.path().join("a.bin");
    std::fs::write(&path, pattern(8 << 20, 3)).unwrap();
    for (kind, make) in KINDS
        .into_iter()
        .flat_map(|kind| MAKES.map(|make| (kind, make)))
    {
        for _ in 0..20 {
            let files = Files::new(vec![vec![open(&path, 0)]], DirectMode::Auto).unwrap();
            let class = class(4 << 20, 4);
            let mut engine = make(
                &files,
                &[class],
                Options {
                    kind,
                    ..Options::default()
                },
            )
            .unwrap();
            for slab in 0..4 {
                let range = range(0, u64::from(slab) << 20, 4 << 20, 0);
                let layout = files.layout(&[range]).unwrap();
                engine.read(SlabId(slab), Priority::Demand, layout);
            }
            engine.flush();
            engine.abandon(SlabId(3));
            engine.flush();
        }
    }
}

#[test]
fn direct_reads_are_refused_by_name_on_a_tmpfs() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        return;
    };
    let path = dir.path().join("in-memory.bin");
    std::fs::write(&path, pattern(9000, 3)).unwrap();
    let e = Files::new(vec![vec![open(&path, 0)]], DirectMode::On)
        .unwrap_err()
        .to_string();
    assert!(e.contains("in-memory.bin") && e.contains("tmpfs"), "{e}");
    assert!(
        !Files::new(vec![vec![open(&path, 0)]], DirectMode::Auto)
            .unwrap()
            .all_direct()
    );
}

#[test]
fn a_range_past_the_end_of_its_file_is_refused_by_name() {
    let dir = directory();
    let path = dir.path().join("short.bin");
    std::fs::write(&path, pattern(10_000, 3)).unwrap();
    let files = Files::new(vec![vec![open(&path, 0)]], DirectMode::Auto).unwrap();
    let range = |offset, len| range(0, offset, len, 0);
    assert!(files.layout(&[range(9_000, 1_000)]).is_ok());
    let error = files.layout(&[range(9_000, 1_001)]).unwrap_err();
    let text = error.to_string();
    for named in ["short.bin", "9000", "1001", "10000"] {
        assert!(text.contains(named), "{text}");
    }
}

#[test]
#[should_panic(expected = "belongs to other files")]
fn a_layout_of_other_files_is_refused() {
    let dir = directory();
    let (long, short) = (dir.path().join("long"), dir.path().join("short"));
    std::fs::write(&long, pattern(9000, 3)).unwrap();
    std::fs::write(&short, pattern(10, 3)).unwrap();
    let of = |path| Files::new(vec![vec![open(path, 0)]], DirectMode::Auto).unwrap();
    let class = class(1 << 20, 1);
    let mut engine = Engine::new(&of(&short), &[class], Options::default()).unwrap();
    let range = range(0, 0, 9000, 0);
    let layout = of(&long).layout(&[range]).unwrap();
    engine.read(SlabId(0), Priority::Demand, layout);
}

#[test]
fn a_wait_for_nothing_is_an_error_on_either_thread() {
    let dir = directory();
    let path = dir.path().join("a.bin");
    std::fs::write(&path, pattern(9000, 3)).unwrap();
    let files = Files::new(vec![vec![open(&path, 0)]], DirectMode::Auto).unwrap();
    let class = class(1 << 20, 1);
    let range = range(0, 0, 9000, 0);
    for make in MAKES {
        let mut engine = make(&files, &[class], Options::default()).unwrap();
        for _ in 0..2 {
            let nothing = engine.wait();
            assert!(matches!(nothing, Err(EngineError::NothingPending)));
            // Without a flush: a wait flushes.
            let layout = files.layout(&[range]).unwrap();
            engine.read(SlabId(0), Priority::Demand, layout);
            assert!(matches!(end(&mut engine), Event::Full(_)));
            engine.release(SlabId(0));
        }
    }
}

#[test]
fn two_devices_serve_one_engine() {
    let dir = directory();
    let paths = ["local", "mount"].map(|name| dir.path().join(name));
    let bytes = [pattern(3 << 20, 11), pattern(3 << 20, 12)];
    for (path, bytes) in paths.iter().zip(&bytes) {
        std::fs::write(path, bytes).unwrap();
    }
    let local = open(&paths[0], 0);
    let mount = Replica {
        device: Some(EngineKind::Pread),
        direct: Some(DirectMode::Off),
        drive: local.drive + 1,
        ..open(&paths[1], 1)
    };
    let files = Files::new(vec![vec![local], vec![mount]], DirectMode::Auto).unwrap();
    assert!(!files.all_direct());
    let class = class(2 << 20, 4);
    let options = Options {
        chunk_bytes: 64 << 10,
        ..Options::default()
    };
    for make in MAKES {
        let mut engine = make(&files, &[class], options).unwrap();
        assert!(
            ["uring+pread", "pread"].contains(&engine.device()),
            "{}",
            engine.device()
        );
        for round in 0..50usize {
            for slab in 0..4usize {
                // In turn one file, the other, and both.
                let (local, mount) = (
                    [200_000, 0, 300_000][slab % 3],
                    [0, 700_001, 1_000][slab % 3],
                );
                let range =
                    |file: u32, len| range(file, (round * 4 + slab) as u64, len, file as u8);
                let layout = files.layout(&[range(0, local), range(1, mount)]).unwrap();
                engine.read(SlabId(slab as u32), Priority::Demand, layout);
            }
            for _ in 0..4 {
                let Event::Full(slab) = end(&mut engine) else {
                    panic!("a read failed")
                };
                let start = round * 4 + slab.index();
                for (file, bytes) in bytes.iter().enumerate() {
                    let payload = engine.payload(slab, file);
                    assert_eq!(payload, &bytes[start..start + payload.len()]);
                }
                engine.release(slab);
            }
        }
        let stats = engine.stats().unwrap();
        assert!(stats.sources.iter().all(|s| s.bytes > 0 && s.errors == 0));
    }
}
