//! A conversation that is closed and opened again goes on as if it had never ended, to the last bit of every logit.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use colibri_uring::model::{KvWriter, LoadOptions, ModelError, RunnerOptions, Weights, reusable};
use colibri_uring::pool::Pool;
use colibri_uring::quant::Activations;
use colibri_uring::quant::encode::Packing;
use colibri_uring::runtime::kv_file::{Fingerprint, KvFile};

use crate::fixture::{Fixture, Solo, bits, fixture};

/// A fixture as it is loaded with some settings.
struct Opened {
    fixture: Fixture,
    model: Arc<Weights>,
    pool: Arc<Pool>,
    fingerprint: Fingerprint,
}

impl Opened {
    fn new(name: &str, options: LoadOptions) -> Opened {
        Opened::with(fixture(name), options)
    }

    /// With its prediction layer.
    fn drafting(name: &str) -> Opened {
        Opened::with(fixture(name).drafting(), LoadOptions::default())
    }

    fn with(fixture: Fixture, options: LoadOptions) -> Opened {
        let (shards, config) = (&fixture.shards, &fixture.config);
        Opened {
            fingerprint: Fingerprint::of(shards, config, &options, None).unwrap(),
            model: fixture.model_with(options),
            pool: Arc::new(Pool::new(2)),
            fixture,
        }
    }

    fn solo(&self) -> Solo {
        let options = RunnerOptions::default();
        Solo::new(&self.model, self.fixture.store(), &self.pool, options)
    }

    /// A sequence with what the file has in common with `prompt`.
    fn resumed(&self, file: &KvFile, prompt: &[u32]) -> (Solo, usize) {
        let mut solo = self.solo();
        let kept = reusable(file.ids(), prompt).min(file.rows());
        assert!(file.rows() == 0 || file.ids()[..kept] == prompt[..kept]);
        let Solo { runner, sequence } = &mut solo;
        file.restore(runner, sequence, kept).unwrap();
        (solo, kept)
    }

    /// The logits after the last of `ids`, from the beginning.
    fn logits(&self, ids: &[u32]) -> Vec<u32> {
        bits(self.solo().prefill(ids).unwrap())
    }
}

/// Sparse and dense attention, DSA that is active and that is not, floats and every way of packing.
fn settings() -> Vec<(&'static str, LoadOptions)> {
    let exact = LoadOptions::default();
    let with = |name, change: fn(&mut LoadOptions)| {
        let mut options = exact;
        change(&mut options);
        (name, options)
    };
    vec![
        ("f16-long", exact),
        with("f16-long", |o| o.dsa = false),
        ("bf16-shared", exact),
        ("f32-no-indexer", exact),
        ("int4-grouped", exact),
        with("int4-grouped", |o| o.activations = Activations::Int8),
        ("fp8-block", exact),
        with("bf16-fused-bias", |o| {
            o.dense = Some(Packing::Int4Group(64))
        }),
        ("container-mixed", exact),
        ("qwen3-f16-dense-bias", exact),
        ("qwen3-int4", exact),
    ]
}

#[test]
fn reopened_sequences_go_on_to_the_last_bit() {
    for (name, options) in settings() {
        let opened = Opened::new(name, options);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk.kv");
        let ids = opened.fixture.ids("/score/ids");
        let mut straight = opened.solo();
        let mut expected = Vec::new();
        straight
            .score(&ids, |_, logits| expected.push(bits(logits)))
            .unwrap();
        // Some turns, each with a new runner, the tokens of each at once or one at a time.
        let cuts = [
            1,
            ids.len() / 3,
            ids.len() / 3 + 1,
            ids.len() - 2,
            ids.len(),
        ];
        for (turn, end) in cuts.into_iter().enumerate() {
            let mut file = KvFile::open(&path, opened.fingerprint).unwrap();
            let (mut solo, kept) = opened.resumed(&file, &ids[..end]);
            // All but the last token, which had no rows: it was never fed.
            let before = turn.checked_sub(1).map_or(0, |turn| cuts[turn] - 1);
            assert_eq!(kept, before, "{name}");
            let step = if turn % 2 == 0 { end } else { 1 };
            for (i, ids) in ids[kept..end].chunks(step).enumerate() {
                let logits = bits(solo.prefill(ids).unwrap());
                assert!(
                    logits == expected[kept + i * step + ids.len() - 1],
                    "{name} {turn}"
                );
            }
            solo.truncate(end - 1);
            file.append(&ids[..end], &solo.kv(), b"").unwrap();
        }
        // Another end: the common beginning is not computed again.
        let mut other = ids[..ids.len() / 2].to_vec();
        other.extend([3, 4, 5]);
        let mut file = KvFile::open(&path, opened.fingerprint).unwrap();
        let (mut solo, kept) = opened.resumed(&file, &other);
        assert!(kept >= ids.len() / 2, "{name}");
        let logits = bits(solo.prefill(&other[kept..]).unwrap());
        assert!(logits == opened.logits(&other), "{name}");
        file.append(&other, &solo.kv(), b"").unwrap();
        drop(file);
        let file = KvFile::open(&path, opened.fingerprint).unwrap();
        assert_eq!((file.ids(), file.rows()), (&other[..], other.len()));
        // The same prompt again: the last token is computed, and says the same.
        let (mut solo, kept) = opened.resumed(&file, &other);
        assert_eq!(kept, other.len() - 1);
        assert!(
            bits(solo.prefill(&other[kept..]).unwrap()) == logits,
            "{name}"
        );
    }
}

/// A text that is continued with and without the prediction layer, in turns: one file, and the same logits to the last bit.
#[test]
fn drafts_come_and_go() {
    for name in ["mtp-agrees", "mixed-mtp", "mtp-share", "mtp-container"] {
        let (with, without) = (
            Opened::drafting(name),
            Opened::new(name, LoadOptions::default()),
        );
        assert_eq!(with.fingerprint, without.fingerprint);
        let ids = with.fixture.ids("/score/ids");
        let mut expected = Vec::new();
        let each = |_, logits: &[f32]| expected.push(bits(logits));
        without.solo().score(&ids, each).unwrap();
        let mut straight = with.solo();
        straight.prefill(&ids).unwrap();
        let straight = straight.draft(4, 4).unwrap();
        let cuts = [3, 7, ids.len() / 2, ids.len() - 3, ids.len()];
        for drafting in [
            [true; 5],
            [true, false, true, false, true],
            [false, true, true, false, true],
            [false, false, false, false, true],
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("talk.kv");
            for (end, drafts) in cuts.into_iter().zip(drafting) {
                let opened = if drafts { &with } else { &without };
                let mut file = KvFile::open(&path, opened.fingerprint).unwrap();
                let (mut solo, kept) = opened.resumed(&file, &ids[..end]);
                let before = file.ids().len();
                assert_eq!(kept, before.saturating_sub(1), "{name} {drafting:?}");
                for (i, id) in ids[..end].iter().enumerate().skip(kept) {
                    if drafts && i > 0 {
                        assert_eq!(solo.draft(*id, 2).unwrap().len(), 2);
                    }
                    let logits = bits(solo.prefill(&[*id]).unwrap());
                    assert!(logits == expected[i], "{name} {drafting:?} at {i}");
                }
                solo.truncate(end - 1);
                solo.settle_drafts().unwrap();
                file.append(&ids[..end], &solo.kv(), b"").unwrap();
            }
            let file = KvFile::open(&path, with.fingerprint).unwrap();
            assert_eq!(file.ids(), ids);
            let (mut solo, kept) = with.resumed(&file, &ids);
            solo.prefill(&ids[kept..]).unwrap();
            let drafts = solo.draft(4, 4).unwrap();
            // What the layer has seen of all tokens is there again.
            assert!(drafts == straight || drafting.contains(&false));
            assert_eq!(drafts.len(), 4);
        }
    }
}

#[test]
fn a_sequence_reuses_what_it_has() {
    let opened = Opened::new("f16-long", LoadOptions::default());
    let ids = opened.fixture.ids("/score/ids");
    let mut solo = opened.solo();
    solo.prefill(&ids).unwrap();
    let mut other = ids[..200].to_vec();
    other.extend([7, 8, 9]);
    for (prompt, kept) in [(&ids, ids.len() - 1), (&other, 200), (&ids, 200)] {
        let kept_now = solo.reuse(prompt);
        assert_eq!(kept_now, kept);
        assert_eq!(solo.ids(), &prompt[..kept]);
        let logits = bits(solo.prefill(&prompt[kept..]).unwrap());
        assert!(logits == opened.logits(prompt));
    }
}

#[test]
fn settings_and_models_have_fingerprints_of_their_own() {
    let mut seen = Vec::new();
    for (name, options) in settings() {
        let opened = Opened::new(name, options);
        let again = Fingerprint::of(
            &opened.fixture.shards,
            &opened.fixture.config,
            &options,
            None,
        );
        assert_eq!(again.unwrap(), opened.fingerprint, "{name}");
        assert!(!seen.contains(&opened.fingerprint.name()), "{name}");
        seen.push(opened.fingerprint.name());
    }
}

#[test]
fn caches_that_do_not_fit_are_refused() {
    let opened = Opened::new("f16-long", LoadOptions::default());
    let dense = LoadOptions {
        dsa: false,
        ..LoadOptions::default()
    };
    let without_keys = Opened::new("f16-long", dense);
    let dir = tempfile::tempdir().unwrap();
    let mut file = KvFile::open(&dir.path().join("a.kv"), opened.fingerprint).unwrap();
    let mut solo = opened.solo();
    solo.prefill(&[1, 2, 3]).unwrap();
    file.append(&[1, 2, 3], &solo.kv(), b"").unwrap();
    let refused = |solo: &mut Solo, ids: &[u32]| {
        let Solo { runner, sequence } = solo;
        let shape = file.shape().unwrap();
        let rows = |rows: &mut KvWriter| -> Result<(), ModelError> {
            file.read(3, rows).unwrap();
            Ok(())
        };
        runner
            .restore(sequence, ids.to_vec(), shape, rows)
            .unwrap_err()
    };
    let error = refused(&mut without_keys.solo(), &[1, 2, 3]);
    assert!(matches!(error, ModelError::Cache { .. }), "{error}");
    let error = refused(&mut solo, &[1, 2]);
    assert!(matches!(error, ModelError::Cache { .. }), "{error}");
    let error = refused(&mut solo, &[1, 2, 1 << 20]);
    assert!(matches!(error, ModelError::Token { .. }), "{error}");
    assert_eq!(solo.ids(), [1, 2, 3]);
}

#[test]
fn contexts_end_where_the_model_does() {
    let mut fixture = fixture("f32-smallest");
    fixture.config.max_position_embeddings = 10;
    let (model, pool) = (fixture.model(), Arc::new(Pool::new(1)));
    let mut solo = Solo::new(&model, fixture.store(), &pool, RunnerOptions::default());
    solo.prefill(&[1; 9]).unwrap();
    let error = solo.prefill(&[1, 2]).unwrap_err().to_string();
    assert!(
        error.contains("11 tokens") && error.contains("max_position_embeddings is 10"),
        "{error}"
    );
    solo.decode(1).unwrap();
    assert!(matches!(
        solo.decode(1),
        Err(ModelError::ContextTooLong {
            tokens: 11,
            max: 10
        })
    ));
    assert_eq!(solo.len(), 10);
}

#[test]
fn slices_of_64_and_one_piece_are_the_same() {
    let opened = Opened::new("f16-long", LoadOptions::default());
    let vocab = opened.fixture.config.vocab_size as u32;
    let ids: Vec<u32> = (0..1000u32).map(|i| i * i % 97 * 3 % vocab).collect();
    let logits = |slice| {
        let options = RunnerOptions {
            slice,
            ..RunnerOptions::default()
        };
        let store = opened.fixture.store();
        let mut solo = Solo::new(&opened.model, store, &opened.pool, options);
        let logits = bits(solo.prefill(&ids).unwrap());
        (logits, solo.runner.stats().kv_bytes)
    };
    let whole = logits(usize::MAX);
    assert!(logits(64) == whole);
    assert!(logits(1000 / 3) == whole);
}

const CHILD: &str = "COLIBRI_TEST_KV_CHILD";
const KILLED: &str = "f32-smallest";

/// The conversation after `turn` turns: it grows for some turns, and then another one begins.
fn conversation(turn: u64) -> Vec<u32> {
    let (subject, length) = (turn / 25, 2 + 3 * (turn % 25));
    (0..length)
        .map(|i| ((i * 7 + subject * 13) % 17) as u32)
        .collect()
}

/// The process that the test below kills: saves one turn after the other, and reports each.
#[test]
fn saves_until_it_is_killed() {
    let Some(path) = std::env::var_os(CHILD) else {
        return;
    };
    let opened = Opened::new(KILLED, LoadOptions::default());
    let mut file = KvFile::open(Path::new(&path), opened.fingerprint).unwrap();
    let (mut solo, _) = opened.resumed(&file, &conversation(file.turns() + 1));
    loop {
        let turn = file.turns() + 1;
        let history = conversation(turn);
        let fed = &history[..history.len() - 1];
        let kept = solo.reuse(fed);
        solo.prefill(&fed[kept..]).unwrap();
        file.append(&history, &solo.kv(), b"").unwrap();
        println!("\nsaved {turn}");
    }
}

#[test]
fn killed_at_any_moment_it_has_the_last_whole_turn() {
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("talk.kv");
    let opened = Opened::new(KILLED, LoadOptions::default());
    let (mut seed, mut turns, mut kills) = (12345u64, 0, 0);
    while turns < 200 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "kv_file::saves_until_it_is_killed",
                "--nocapture",
            ])
            .env(CHILD, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let saved = |line: &str| line.strip_prefix("saved ")?.parse::<u64>().ok();
        // From the first turn that it has saved on, or at once.
        let mut told = turns;
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        if seed >> 60 != 0 {
            told = lines.find_map(|line| saved(&line.unwrap())).unwrap();
            std::thread::sleep(Duration::from_micros((seed >> 33) % 20_000));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        told = lines
            .map_while(Result::ok)
            .filter_map(|line| saved(&line))
            .last()
            .unwrap_or(told);
        kills += 1;
        let file = KvFile::open(&path, opened.fingerprint).unwrap();
        // What it said is there, and at most the one that it was saving.
        assert!(
            (told..=told + 1).contains(&file.turns()),
            "{told} {}",
            file.turns()
        );
        turns = file.turns();
        if turns == 0 {
            continue;
        }
        let history = conversation(turns);
        assert_eq!((file.ids(), file.rows()), (&history[..], history.len() - 1));
        let (mut solo, kept) = opened.resumed(&file, &history);
        assert_eq!(kept, history.len() - 1);
        assert!(bits(solo.prefill(&history[kept..]).unwrap()) == opened.logits(&history));
    }
    println!("{turns} turns, killed {kills} times");
}
