//! The file against crashes, damage and other people's files, with caches that are made up.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;
use tempfile::TempDir;

use super::head::{RECORDS, SECTOR};
use super::*;
use crate::model::{KvShape, KvSink, KvSource, LayerWidths};

/// Rows in memory, in lists.
#[derive(Debug)]
struct Cache {
    shape: KvShape,
    lists: Vec<Vec<Vec<f32>>>,
    /// Lists of the prediction layer whose first rows are missing.
    late: bool,
}

impl Cache {
    fn new(shape: &KvShape) -> Cache {
        Cache {
            lists: vec![Vec::new(); shape.lists().count()],
            shape: shape.clone(),
            late: false,
        }
    }

    /// The first `tokens` tokens of a file; `None` before its first turn.
    fn read(file: &KvFile, tokens: usize) -> Result<Option<Cache>, KvFileError> {
        let Some(mut cache) = file.shape().map(Cache::new) else {
            return Ok(None);
        };
        file.read(tokens, &mut cache).map(|()| Some(cache))
    }
}

impl KvSource for Cache {
    fn shape(&self) -> KvShape {
        self.shape.clone()
    }

    fn known(&self, list: usize) -> usize {
        let late = self.late
            && self
                .shape
                .lists()
                .nth(list)
                .is_some_and(|(_, ahead)| ahead > 0);
        if late { 0 } else { self.lists[list].len() }
    }

    fn read(&self, list: usize, row: usize, to: &mut [f32]) {
        to.copy_from_slice(&self.lists[list][row]);
    }
}

impl KvSink for Cache {
    fn push(&mut self, list: usize, row: &[f32]) {
        self.lists[list].push(row.to_vec());
    }
}

fn fingerprint() -> Fingerprint {
    Fingerprint::for_tests()
}

fn shape() -> KvShape {
    let layer = |kv, index_key, ahead| LayerWidths {
        kv,
        index_key,
        ahead,
    };
    // The last one is of a layer that predicts.
    KvShape(vec![
        layer(5, Some(3), 0),
        layer(5, None, 0),
        layer(7, Some(2), 1),
    ])
}

/// Row `i` of list `list` is a function of the tokens up to it, as in a model, or up to the one after it.
fn row(ids: &[u32], i: usize, list: usize, width: usize) -> Vec<f32> {
    let ahead = shape().lists().nth(list).map_or(0, |(_, ahead)| ahead);
    let seed = (ids[..=i + ahead].iter()).fold(list as u32 + 1, |h, id| {
        h.wrapping_mul(16_777_619).wrapping_add(*id ^ 0x9e37)
    });
    (0..width as u32)
        .map(|k| f32::from_bits(seed.rotate_left(k)))
        .collect()
}

/// A cache of the first `rows` of `ids`.
fn cache(ids: &[u32], rows: usize) -> Cache {
    let mut cache = Cache::new(&shape());
    for (list, (width, ahead)) in shape().lists().enumerate() {
        for i in 0..rows.min(ids.len().saturating_sub(ahead)) {
            cache.push(list, &row(ids, i, list, width));
        }
    }
    cache
}

/// Whether the file restores exactly `rows` rows of `ids`.
fn assert_has(file: &KvFile, ids: &[u32], rows: usize) {
    assert_eq!(file.ids(), ids);
    assert_eq!(file.rows(), rows);
    assert!(file.turns() == 0 || file.note() == note(ids));
    for keep in BTreeSet::from([0, rows / 2, rows]) {
        let Some(cache) = Cache::read(file, keep).unwrap() else {
            assert_eq!(rows, 0);
            continue;
        };
        assert_eq!(cache.shape(), shape());
        for (list, (width, ahead)) in shape().lists().enumerate() {
            let found = &cache.lists[list];
            // With fewer tokens, the one after the last may be another.
            let certain = match keep < ids.len() {
                true => keep.saturating_sub(ahead),
                false => found.len(),
            };
            assert!(found.len() <= keep && (ahead > 0 || found.len() == keep));
            assert!(found.len() >= certain.min(keep));
            for (i, found) in found.iter().enumerate() {
                let expected = row(ids, i, list, width);
                let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(found), bits(&expected));
            }
        }
    }
}

struct Dir(TempDir);

impl Dir {
    fn new() -> Dir {
        Dir(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("talk.kv")
    }

    fn open(&self) -> Result<KvFile, KvFileError> {
        KvFile::open(&self.path(), fingerprint())
    }

    /// Opens these bytes.
    fn with(&self, bytes: &[u8]) -> Result<KvFile, KvFileError> {
        fs::write(self.path(), bytes).unwrap();
        let opened = self.open();
        assert!(self.bytes() == bytes, "it is untouched");
        opened
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.path()).unwrap()
    }
}

/// What is kept with a text.
fn note(ids: &[u32]) -> Vec<u8> {
    format!("{ids:?}").into_bytes()
}

fn save(file: &mut KvFile, ids: &[u32], rows: usize) {
    file.append(ids, &cache(ids, rows), &note(ids)).unwrap();
}

/// Three turns: one, an addition, one that replaces the end. All bytes after each.
fn three_turns() -> (Dir, Vec<Vec<u8>>) {
    let dir = Dir::new();
    let mut file = dir.open().unwrap();
    let mut states = vec![dir.bytes()];
    for (ids, rows) in TURNS {
        save(&mut file, ids, rows);
        states.push(dir.bytes());
    }
    (dir, states)
}

const TURNS: [(&[u32], usize); 3] = [
    (&[1, 2, 3, 4], 3),
    (&[1, 2, 3, 4, 5, 6, 7], 6),
    (&[1, 2, 3, 4, 5, 9, 9, 9], 8),
];

mod refused;

#[test]
fn turns_are_restored_to_the_last_bit() {
    let dir = Dir::new();
    assert_has(&dir.open().unwrap(), &[], 0);
    let mode = fs::metadata(dir.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for (i, (ids, rows)) in TURNS.into_iter().enumerate() {
        let mut file = dir.open().unwrap();
        save(&mut file, ids, rows);
        assert_has(&file, ids, rows);
        drop(file);
        let file = dir.open().unwrap();
        assert_has(&file, ids, rows);
        assert_eq!(file.turns(), i as u64 + 1);
        assert_eq!(file.bytes(), dir.bytes().len() as u64);
    }
    // Nothing new is no turn; fewer rows than are there take none away.
    let (ids, rows) = TURNS[2];
    let before = dir.bytes();
    let mut file = dir.open().unwrap();
    save(&mut file, ids, rows);
    save(&mut file, ids, rows - 1);
    assert!(dir.bytes() == before);
    // An empty text is one too.
    save(&mut file, &[], 0);
    drop(file);
    assert_has(&dir.open().unwrap(), &[], 0);
    assert_eq!(fs::read_dir(dir.0.path()).unwrap().count(), 1);
}

#[test]
fn long_turns_take_several_records() {
    let dir = Dir::new();
    let ids: Vec<u32> = (0..600_000).collect();
    let mut wide = Cache::new(&KvShape(vec![LayerWidths {
        kv: 100_000,
        index_key: None,
        ahead: 0,
    }]));
    for i in 0..7 {
        wide.push(0, &vec![i as f32; 100_000]);
    }
    dir.open()
        .unwrap()
        .append(&ids, &wide, &[5; 3 << 20])
        .unwrap();
    let file = dir.open().unwrap();
    assert_eq!(file.ids(), ids);
    assert_eq!(file.note(), [5; 3 << 20]);
    let read = Cache::read(&file, 7).unwrap().unwrap();
    assert_eq!(read.lists, wide.lists);
}

/// Writing goes record by record, then the mark: every state in between is the turn before or the turn after.
#[test]
fn every_prefix_of_what_is_written_is_a_whole_turn() {
    let (dir, states) = three_turns();
    for (turn, pair) in states.windows(2).enumerate() {
        let (before, after) = (&pair[0], &pair[1]);
        let known = |turn: usize| turn.checked_sub(1).map_or((&[][..], 0), |t| TURNS[t]);
        let mark = SECTOR * (1 + (turn + 1) % 2);
        for end in before.len()..=after.len() {
            let mut torn = before.clone();
            torn.extend_from_slice(&after[before.len()..end]);
            let mut file = dir.with(&torn).unwrap();
            let (ids, rows) = known(turn);
            assert_has(&file, ids, rows);
            // What is torn is cut off, not continued.
            if end % 7 == 0 {
                save(&mut file, TURNS[turn].0, TURNS[turn].1);
                assert!(dir.bytes() == *after);
            }
        }
        for written in 0..=SECTOR {
            let mut torn = after.clone();
            torn[mark..mark + SECTOR].copy_from_slice(&before[mark..mark + SECTOR]);
            torn[mark..mark + written].copy_from_slice(&after[mark..mark + written]);
            let file = dir.with(&torn).unwrap();
            let (ids, rows) = known(if file.turns() as usize == turn {
                turn
            } else {
                turn + 1
            });
            assert_has(&file, ids, rows);
            assert!(written < SECTOR || file.turns() as usize == turn + 1);
        }
    }
}

/// A mark that is not whole is written again before anything else, so that there is always one.
#[test]
fn a_torn_mark_is_repaired() {
    let (dir, states) = three_turns();
    for mark in [SECTOR, 2 * SECTOR] {
        let mut torn = states[3].clone();
        torn[mark] ^= 1;
        let mut file = dir.with(&torn).unwrap();
        assert_has(&file, TURNS[2].0, TURNS[2].1);
        save(&mut file, &[1, 2], 2);
        drop(file);
        assert_has(&dir.open().unwrap(), &[1, 2], 2);
        let mut older_lost = dir.bytes();
        older_lost[2 * SECTOR] ^= 1;
        assert_has(&dir.with(&older_lost).unwrap(), &[1, 2], 2);
    }
}

/// An empty file is as none; it stays as it is until there is a turn.
#[test]
fn an_empty_file_is_begun() {
    for start in [KvFile::open, KvFile::reset] {
        let dir = Dir::new();
        fs::write(dir.path(), "").unwrap();
        let mut file = start(&dir.path(), fingerprint()).unwrap();
        assert_has(&file, &[], 0);
        assert!(dir.bytes().is_empty());
        let error = dir.open().unwrap_err();
        assert!(matches!(error, KvFileError::InUse { .. }), "{error}");
        save(&mut file, &[4, 2], 2);
        drop(file);
        assert_has(&dir.open().unwrap(), &[4, 2], 2);
        let mode = fs::metadata(dir.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}

/// Turns with and without the prediction layer: the file keeps its rows while it has seen the text from the beginning.
#[test]
fn a_layer_that_predicts_comes_and_goes() {
    let main = KvShape(shape().0[..2].to_vec());
    let without = |ids: &[u32], rows| {
        let mut cache = cache(ids, rows);
        cache.lists.truncate(main.lists().count());
        cache.shape = main.clone();
        cache
    };
    let dir = Dir::new();
    let turn = |ids: &[u32], cache: Cache| {
        let mut file = dir.open().unwrap();
        file.append(ids, &cache, &note(ids)).unwrap();
        drop(file);
        let file = dir.open().unwrap();
        let read = Cache::read(&file, file.rows()).unwrap().unwrap();
        // The key-values of the first layer and of the prediction layer.
        let rows = |list: usize| read.lists.get(list).map(Vec::len);
        assert_eq!(rows(0), Some(file.rows()));
        (file.rows(), rows(3))
    };
    let ids = [1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(turn(&ids[..3], without(&ids[..3], 2)), (2, None));
    // The last row depends on a token that is not among the first 4.
    assert_eq!(turn(&ids[..5], cache(&ids[..5], 4)), (4, Some(3)));
    assert_has(&dir.open().unwrap(), &ids[..5], 4);
    assert_eq!(turn(&ids[..7], without(&ids[..7], 6)), (6, Some(4)));
    // It has begun late.
    let mut late = cache(&ids, 8);
    late.lists[3] = vec![vec![0.5; 7]];
    late.late = true;
    assert_eq!(turn(&ids, late), (8, Some(4)));
    assert_has(&dir.open().unwrap(), &ids, 8);
    // Another end.
    let other = [1, 2, 3, 9, 9];
    assert_eq!(turn(&other, without(&other, 5)), (5, Some(2)));
    assert_eq!(turn(&other, cache(&other, 5)), (5, Some(4)));
    assert_has(&dir.open().unwrap(), &other, 5);
}

/// A changed bit is refused, or is in a mark, of which there are two.
#[test]
fn a_reset_replaces_the_file_with_the_first_turn() {
    let (dir, states) = three_turns();
    let mut flipped = states[3].clone();
    flipped[RECORDS as usize + 40] ^= 1;
    fs::write(dir.path(), &flipped).unwrap();
    let other = Fingerprint {
        weights: 7,
        ..fingerprint()
    };
    let mut file = KvFile::reset(&dir.path(), other).unwrap();
    assert_has(&file, &[], 0);
    assert!(dir.bytes() == flipped, "nothing is lost before");
    save(&mut file, &[8, 8], 2);
    assert!(matches!(
        KvFile::open(&dir.path(), other),
        Err(KvFileError::InUse { .. })
    ));
    save(&mut file, &[8, 8, 8], 3);
    drop(file);
    assert_has(&KvFile::open(&dir.path(), other).unwrap(), &[8, 8, 8], 3);
    let mode = fs::metadata(dir.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(fs::read_dir(dir.0.path()).unwrap().count(), 1);
}

#[test]
fn what_is_cleared_is_gone() {
    let (dir, _) = three_turns();
    let mut file = dir.open().unwrap();
    file.clear().unwrap();
    assert_has(&file, &[], 0);
    assert_eq!(dir.bytes().len(), RECORDS as usize);
    assert!(matches!(dir.open(), Err(KvFileError::InUse { .. })));
    save(&mut file, &[4, 2], 2);
    drop(file);
    assert_has(&dir.open().unwrap(), &[4, 2], 2);
    assert_eq!(fs::read_dir(dir.0.path()).unwrap().count(), 1);
}

#[test]
fn many_make_one_file() {
    let dir = Dir::new();
    let opened: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| dir.open())).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(opened.iter().filter(|o| o.is_ok()).count(), 1);
    let others = opened.iter().filter_map(|o| o.as_ref().err());
    others.for_each(|e| assert!(matches!(e, KvFileError::InUse { .. }), "{e}"));
    assert_eq!(fs::read_dir(dir.0.path()).unwrap().count(), 1);
}

/// A text that is begun again and again does not grow without end.
#[test]
fn waste_is_cleared_away() {
    let dir = Dir::new();
    let mut file = dir.open().unwrap();
    let link = dir.0.path().join("link");
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    file.path = link.clone();
    let ids: Vec<u32> = (0..3000).collect();
    let (mut largest, mut replaced) = (0, 0);
    for turn in 0..60 {
        let ids = [&[turn], &ids[..]].concat();
        let before = file.turns();
        save(&mut file, &ids, 3000);
        replaced += usize::from(file.turns() <= before);
        largest = largest.max(dir.bytes().len());
    }
    assert!(replaced > 1 && largest < 8 << 20, "{replaced} {largest}");
    assert!(link.is_symlink());
    drop(file);
    let ids = [&[59], &ids[..]].concat();
    assert_has(&dir.open().unwrap(), &ids, 3000);
}
