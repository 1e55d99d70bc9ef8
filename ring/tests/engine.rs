//! The engine against real files, on every device.

use std::path::Path;
use std::sync::Arc;

use colibri_ring::arena::{Class, SlabId};
use colibri_ring::drive::Window;
use colibri_ring::engine::{Engine, EngineError, EngineKind, Options, SlabState};
use colibri_ring::extent::{Layout, Range};
use colibri_ring::file::File;
use colibri_ring::replica::{DirectMode, Files, Replica};
use colibri_ring::schedule::{Event, Priority};

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

/// A directory on the disk, not on a tmpfs.
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
            let class = Class {
                bytes: 2 << 20,
                count: 4,
            };
            let mut engine = make(&files, &[class], options).unwrap();
            for round in 0..40u64 {
                for slab in 0..4u32 {
                    let n = round * 4 + u64::from(slab);
                    let file = (n % 3) as usize;
                    let len = contents[file].len() as u64;
                    let ranges = [
                        Range {
                            file: file as u32,
                            offset: n * 101,
                            len: 200_000,
                            part: 0,
                        },
                        // The last bytes of the file, whose aligned read reaches past its end.
                        Range {
                            file: file as u32,
                            offset: len - 50_000,
                            len: 50_000,
                            part: 1,
                        },
                        Range {
                            file: (file as u32 + 1) % 3,
                            offset: n,
                            len: 1,
                            part: 1,
                        },
                    ];
                    let layout = Layout::new(&ranges, files.align()).unwrap();
                    let priority = if n % 2 == 0 {
                        Priority::Demand
                    } else {
                        Priority::Speculative
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
        let class = Class {
            bytes: 4 << 20,
            count: 1,
        };
        let mut engine = Engine::new(&files, &[class], options).unwrap();
        let ranges = [
            Range {
                file: 0,
                offset: 2 << 20,
                len: 4096,
                part: 0,
            },
            Range {
                file: 0,
                offset: 0,
                len: 2 << 20,
                part: 1,
            },
        ];
        engine.read(
            SlabId(0),
            Priority::Demand,
            Layout::new(&ranges, files.align()).unwrap(),
        );
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
    let class = Class {
        bytes: 1 << 20,
        count: 1,
    };
    let mut engine = Engine::new(&files, &[class], Options::default()).unwrap();
    let range = Range {
        file: 0,
        offset: 0,
        len: 4096,
        part: 0,
    };
    engine.read(
        SlabId(0),
        Priority::Demand,
        Layout::new(&[range], files.align()).unwrap(),
    );
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
        let range = Range {
            file: 0,
            offset: 5000,
            len: 900_000,
            part: 0,
        };
        let layout = Layout::new(&[range], 4096).unwrap();
        let class = Class {
            bytes: 1 << 20,
            count: 1,
        };
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
            let class = Class {
                bytes: 4 << 20,
                count: 4,
            };
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
                let range = Range {
                    file: 0,
                    offset: u64::from(slab) << 20,
                    len: 4 << 20,
                    part: 0,
                };
                let layout = Layout::new(&[range], files.align()).unwrap();
                engine.read(SlabId(slab), Priority::Demand, layout);
            }
            engine.flush();
            engine.abandon(SlabId(3));
            engine.flush();
        }
    }
}

#[test]
fn direct_reads_are_refused_by_name_where_they_are_impossible() {
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
