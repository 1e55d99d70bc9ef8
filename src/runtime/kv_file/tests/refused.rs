//! Refuses damaged, foreign and locked KV files, and leaves them as they are.

use super::*;

#[test]
fn what_is_truncated_is_refused() {
    let (dir, states) = three_turns();
    let whole = &states[3];
    for len in (0..whole.len()).filter(|len| len % 3 == 0 || whole.len() - len < 20) {
        match (len, dir.with(&whole[..len])) {
            (0, Ok(empty)) => assert_has(&empty, &[], 0),
            (1..8, Err(KvFileError::Foreign { .. })) => {}
            (8.., Err(error @ KvFileError::Damaged { .. })) => {
                assert!(error.to_string().contains("--kv-reset"), "{error}");
            }
            (_, other) => panic!("{len}: {other:?}"),
        }
    }
}

#[test]
fn every_bit_counts() {
    let (dir, states) = three_turns();
    let whole = &states[3];
    let (ids, rows) = TURNS[2];
    for at in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << (at * 5 % 8);
        let in_marks = (SECTOR..3 * SECTOR).contains(&at);
        match dir.with(&flipped) {
            Ok(file) => {
                assert!(in_marks, "{at}");
                assert_has(&file, ids, rows);
            }
            Err(KvFileError::Foreign { .. }) => assert!(at < 8),
            Err(KvFileError::Version { .. }) => assert!((8..12).contains(&at)),
            Err(KvFileError::Damaged { .. }) => assert!(!in_marks, "{at}"),
            Err(other) => panic!("{at}: {other}"),
        }
    }
}

#[test]
fn other_models_versions_and_files_are_refused_by_name() {
    let (dir, states) = three_turns();
    let whole = &states[3];
    let opened = |fingerprint| KvFile::open(&dir.path(), fingerprint).unwrap_err();
    for (other, named) in [
        (
            Fingerprint {
                weights: 7,
                ..fingerprint()
            },
            "weights",
        ),
        (
            Fingerprint {
                config: 7,
                ..fingerprint()
            },
            "hyperparameters",
        ),
        (
            Fingerprint {
                dsa: 0,
                ..fingerprint()
            },
            "--dsa",
        ),
        (
            Fingerprint {
                dense: 4,
                ..fingerprint()
            },
            "--dense-bits",
        ),
        (
            Fingerprint {
                resident: 8,
                ..fingerprint()
            },
            "resident weights",
        ),
    ] {
        let error = opened(other).to_string();
        let parts = ["talk.kv", named, "--kv-reset", "stays as it is"];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    for version in [0, 1, 2, 4] {
        let mut other = whole.clone();
        other[8] = version;
        let error = dir.with(&other).unwrap_err().to_string();
        let parts = [&format!("version {version} "), "--kv-reset"];
        assert!(parts.iter().all(|part| error.contains(*part)), "{error}");
    }
    for foreign in [&b"notes of mine"[..], &[0; 5000], b"col", b"n"] {
        let error = dir.with(foreign).unwrap_err();
        assert!(matches!(error, KvFileError::Foreign { .. }), "{error}");
        let error = KvFile::reset(&dir.path(), fingerprint()).unwrap_err();
        assert!(matches!(error, KvFileError::Foreign { .. }), "{error}");
        assert_eq!(dir.bytes(), foreign);
    }
    let error = KvFile::open(dir.0.path(), fingerprint()).unwrap_err();
    assert!(matches!(error, KvFileError::Directory { .. }), "{error}");
}

#[test]
fn a_cache_of_another_shape_is_refused() {
    let (dir, states) = three_turns();
    let mut file = dir.open().unwrap();
    let other = KvShape(shape().0[..1].to_vec());
    let error = file.append(&[1], &Cache::new(&other), b"").unwrap_err();
    assert!(matches!(error, KvFileError::Shape { .. }), "{error}");
    assert!(dir.bytes() == states[3]);
}

#[test]
fn two_at_once_are_not_possible() {
    let dir = Dir::new();
    let first = dir.open().unwrap();
    let error = dir.open().unwrap_err();
    assert!(matches!(error, KvFileError::InUse { .. }), "{error}");
    assert!(matches!(
        KvFile::reset(&dir.path(), fingerprint()),
        Err(KvFileError::InUse { .. })
    ));
    drop(first);
    dir.open().unwrap();
}

#[test]
fn a_link_to_nowhere_is_an_error() {
    let dir = Dir::new();
    std::os::unix::fs::symlink("nowhere/at/all", dir.path()).unwrap();
    let error = dir.open().unwrap_err();
    assert!(matches!(error, KvFileError::Dangling { .. }), "{error}");
    assert!(error.to_string().contains("nowhere/at/all"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_turns_are_restored(
        turns in prop::collection::vec((0usize..12, prop::collection::vec(0u32..4, 0..9), 0usize..9), 1..12),
    ) {
        let dir = Dir::new();
        let mut ids: Vec<u32> = Vec::new();
        let mut rows = 0;
        for (kept, new, unfed) in turns {
            let before = ids.clone();
            ids.truncate(kept);
            ids.extend(new);
            let computed = ids.len().saturating_sub(unfed);
            let common = before.iter().zip(&ids).take_while(|(a, b)| a == b).count();
            let mut file = dir.open().unwrap();
            save(&mut file, &ids, computed);
            rows = computed.max(rows.min(common));
            drop(file);
            assert_has(&dir.open().unwrap(), &ids, rows);
        }
    }

    #[test]
    fn no_bytes_panic(
        noise in prop::collection::vec(any::<u8>(), 0..300),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        numbers in prop::collection::vec(prop_oneof![0u32..12, any::<u32>()], 0..12), kind in 1u32..7,
    ) {
        let (dir, states) = three_turns();
        let whole = &states[3];
        let _ = dir.with(&noise);
        let _ = dir.with(&[&whole[..RECORDS as usize], &noise].concat());
        let mut changed = whole.clone();
        for (index, byte) in changes {
            let at = index.index(changed.len());
            changed[at] = byte;
        }
        if let Ok(file) = dir.with(&changed) {
            prop_assert!(file.turns() >= 2);
        }
        // Records with right checksums and any numbers.
        let payload: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let kinds = [record::Kind::Shape, record::Kind::Turn, record::Kind::Ids, record::Kind::Rows, record::Kind::End, record::Kind::Note];
        let record = record::Head::of(kinds[kind as usize - 1], &payload);
        let (mut within, mut fresh) = (State::empty(), State::empty());
        let _ = fresh.apply(&record, &payload);
        let shape = [5u32, 3, 0, 5, 0, 1].map(u32::to_le_bytes).concat();
        let turn = [1u64, 0].map(u64::to_le_bytes).concat();
        for (kind, payload) in [(record::Kind::Shape, &shape), (record::Kind::Turn, &turn)] {
            within.apply(&record::Head::of(kind, payload), payload).unwrap();
        }
        let _ = within.apply(&record, &payload);
    }
}
