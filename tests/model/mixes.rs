//! Random mixes of sequences against solo runs: a row's bits never depend on what else a pass computes, or on how its sequence came to
//! its tokens.
//!
//! `COLIBRI_MIXES=N` runs N cases a model instead of [`CASES`].

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use colibri_ring::{EngineKind, Options};
use colibri_uring::model::{
    LoadOptions, Logits, ModelError, Runner, RunnerOptions, Sequence, Step, Weights, swap_victim,
};
use colibri_uring::pool::Pool;
use colibri_uring::stream::Lookahead;
use colibri_uring::stream::slots::Budget;

use crate::fixture::{Fixture, Solo, bits, fixture};
use crate::rng::Rng;

/// Cases of each model.
const CASES: usize = 40;

/// The models: MLA with dense and sparse attention, GQA, packed and float experts, with a prediction layer and without.
const MODELS: [(&str, bool); 9] = [
    ("f32-smallest", false),
    ("f32-no-indexer", false),
    ("f16-long", false),
    ("int4-grouped", false),
    ("qwen3-f16-dense-bias", false),
    ("mtp-agrees", true),
    ("mixed-mtp", true),
    ("mtp-share", true),
    ("mtp-container", true),
];

/// A text and the logits after each of its tokens.
pub struct Text {
    pub ids: Vec<u32>,
    pub logits: Vec<Vec<u32>>,
}

/// A model, and texts that a solo run has computed.
pub struct World {
    pub fixture: Fixture,
    pub weights: Arc<Weights>,
    pub texts: Vec<Text>,
}

impl World {
    pub fn new(name: &str, drafting: bool) -> World {
        let fixture = match drafting {
            true => fixture(name).drafting(),
            false => fixture(name),
        };
        let weights = fixture.model_with(LoadOptions::default());
        let vocab = fixture.config.vocab_size;
        let mut rng = Rng(0x9E37_79B9_7F4A_7C15);
        let pool = Arc::new(Pool::new(2));
        let mut texts: Vec<Text> = Vec::new();
        for i in 0..12 {
            // Half of the texts begin like another one, cut anywhere.
            let mut ids = match i % 2 == 1 {
                true => {
                    let other: &Text = &texts[rng.below(texts.len())];
                    other.ids[..1 + rng.below(other.ids.len() - 1)].to_vec()
                }
                false => Vec::new(),
            };
            let len = ids.len() + 1 + rng.pick(&[0, 9, 70, 140]) + rng.below(40);
            ids.extend((ids.len()..len.min(300)).map(|_| rng.below(vocab) as u32));
            let mut solo = Solo::new(&weights, fixture.store(), &pool, RunnerOptions::default());
            let mut logits = Vec::new();
            solo.score(&ids, |_, row| logits.push(bits(row))).unwrap();
            // The end is what the model says, so that drafts are accepted.
            for _ in 0..20 {
                let last: Vec<f32> = (logits[logits.len() - 1].iter())
                    .map(|bits| f32::from_bits(*bits))
                    .collect();
                let id = colibri_uring::model::ops::argmax(&last).unwrap();
                ids.push(id);
                logits.push(bits(solo.decode(id).unwrap()));
            }
            texts.push(Text { ids, logits });
        }
        World {
            fixture,
            weights,
            texts,
        }
    }

    fn runner(&self, rng: &mut Rng, stop: &Arc<AtomicBool>, swap_dir: &Path) -> Runner {
        let lookahead = rng.pick(&[Lookahead::Off, Lookahead::Auto, Lookahead::Experts(2)]);
        let slots = rng.pick(&[0, 1, 4, usize::MAX]);
        let engine = Options {
            kind: rng.pick(&[EngineKind::Auto, EngineKind::Pread]),
            ..Options::default()
        };
        let budget = Budget::SlotsPerLayer(slots);
        let store = self.fixture.store_of(budget, lookahead, engine);
        let options = RunnerOptions {
            scratch_bytes: rng.pick(&[0, 20_000, 100_000, 16 << 20]),
            slice: rng.pick(&[1, 3, 17, 64, usize::MAX]),
            // From one page for each of a few sequences to enough for all.
            kv_tokens: Some(64 * rng.pick(&[6, 8, 12, 200])),
            swap_dir: Some(swap_dir.to_path_buf()),
            stop: Some(Arc::clone(stop)),
            ..RunnerOptions::default()
        };
        let pool = Pool::new(1 + rng.below(2));
        Runner::new(Arc::clone(&self.weights), store, pool, options)
    }
}

/// Stops a pass at its begin, or in the middle of a layer.
struct Stop {
    flag: Arc<AtomicBool>,
    /// Reports of progress until the flag is set; 0 for never.
    countdown: Arc<AtomicUsize>,
}

impl Stop {
    fn new() -> Stop {
        Stop {
            flag: Arc::default(),
            countdown: Arc::default(),
        }
    }

    fn watch(&self, runner: &mut Runner) {
        let (flag, countdown) = (Arc::clone(&self.flag), Arc::clone(&self.countdown));
        runner.observe(move |_| {
            let left = countdown.load(Ordering::Relaxed);
            countdown.store(left.saturating_sub(1), Ordering::Relaxed);
            if left == 1 {
                flag.store(true, Ordering::Relaxed);
            }
        });
    }

    /// Draws when the next pass is stopped, if it is.
    fn arm(&self, rng: &mut Rng) {
        match rng.below(12) {
            0 => self.flag.store(true, Ordering::Relaxed),
            1 | 2 => self.countdown.store(1 + rng.below(60), Ordering::Relaxed),
            _ => {}
        }
    }

    fn disarm(&self) -> bool {
        self.countdown.store(0, Ordering::Relaxed);
        self.flag.swap(false, Ordering::Relaxed)
    }
}

/// A sequence that follows a text.
struct Follower<'w> {
    text: &'w Text,
    sequence: Sequence,
}

impl<'w> Follower<'w> {
    fn new(world: &'w World, runner: &mut Runner, rng: &mut Rng) -> Follower<'w> {
        let text = &world.texts[rng.below(world.texts.len())];
        let mut sequence = runner.sequence();
        if rng.one_in(3) {
            sequence.stop_drafting();
        }
        let mut follower = Follower { text, sequence };
        if !rng.one_in(4) {
            follower.reuse(runner);
        }
        follower
    }

    /// Begins with what other sequences have computed.
    fn reuse(&mut self, runner: &mut Runner) {
        let ids = &self.text.ids;
        let reused = runner.match_prefix(&mut self.sequence, ids).unwrap();
        assert!(reused < ids.len());
        assert_eq!(self.sequence.ids(), &ids[..reused]);
    }

    fn left(&self) -> usize {
        self.text.ids.len() - self.sequence.len()
    }

    /// What a pass appends: a few tokens of the text, or one with drafts.
    fn ids(&mut self, runner: &mut Runner, rng: &mut Rng) -> (Vec<u32>, Logits) {
        let at = self.sequence.len();
        if self.sequence.can_draft() && rng.one_in(2) {
            let id = self.text.ids[at];
            let room = 4000 - at;
            let n = (1 + rng.below(4)).min(room);
            let drafts = runner.draft(&mut self.sequence, id, n).unwrap();
            return ([vec![id], drafts].concat(), Logits::All);
        }
        let most = rng.pick(&[1, 1, 5, 70, 200]);
        let n = (1 + rng.below(most)).min(self.left());
        let logits = rng.pick(&[Logits::None, Logits::Last, Logits::Last, Logits::All]);
        (self.text.ids[at..at + n].to_vec(), logits)
    }

    /// Compares the logits of the tokens from `at` on, of which `ids` were appended, and takes back what is not the text's.
    fn check(&mut self, at: usize, ids: &[u32], logits: &[f32], which: Logits, vocab: usize) {
        let same = ids.iter().zip(&self.text.ids[at..]);
        let right = same.take_while(|(a, b)| a == b).count();
        assert!(right > 0);
        let rows: Vec<usize> = match which {
            Logits::None => vec![],
            Logits::Last => vec![ids.len() - 1],
            Logits::All => (0..right).collect(),
        };
        assert_eq!(logits.len() % vocab, 0);
        for (row, i) in rows.into_iter().enumerate() {
            let found = bits(&logits[row * vocab..][..vocab]);
            assert!(found == self.text.logits[at + i], "position {}", at + i);
        }
        self.sequence.truncate(at + right);
    }
}

/// One pass of some of the followers.
fn pass(runner: &mut Runner, followers: &mut [Follower], stop: &Stop, rng: &mut Rng) {
    let vocab = runner.weights().config().vocab_size;
    let mut chosen: Vec<(usize, &mut Follower, Vec<u32>, Logits)> = Vec::new();
    for follower in followers {
        let resident = !follower.sequence.is_swapped() && follower.left() > 0;
        if resident && !rng.one_in(3) {
            let (ids, logits) = follower.ids(runner, rng);
            chosen.push((follower.sequence.len(), follower, ids, logits));
        }
    }
    if chosen.is_empty() {
        return;
    }
    let mut steps: Vec<Step> = (chosen.iter_mut())
        .map(|(_, follower, ids, logits)| Step {
            sequence: &mut follower.sequence,
            ids,
            logits: *logits,
        })
        .collect();
    stop.arm(rng);
    let result = runner.forward(&mut steps);
    let stopped = stop.disarm();
    let failed = match result {
        Ok(logits) => {
            let all: Vec<Vec<f32>> = (0..chosen.len()).map(|i| logits.of(i).to_vec()).collect();
            for ((at, follower, ids, which), logits) in chosen.into_iter().zip(all) {
                assert_eq!(follower.sequence.len(), at + ids.len());
                follower.check(at, &ids, &logits, which, vocab);
            }
            return;
        }
        Err(error) => error,
    };
    match failed {
        ModelError::Stopped => assert!(stopped),
        ModelError::OutOfPages { needed, free } => assert!(needed > 0, "{needed} of {free}"),
        error => panic!("{error}"),
    }
    for (at, follower, ids, _) in chosen {
        let more = follower.sequence.len() - at;
        assert_eq!(follower.sequence.ids()[at..], ids[..more]);
        if matches!(failed, ModelError::OutOfPages { .. }) {
            assert_eq!(more, 0);
        }
        // Drafts may be among the tokens of complete slices.
        let same = ids[..more].iter().zip(&follower.text.ids[at..]);
        let right = same.take_while(|(a, b)| a == b).count();
        follower.sequence.truncate(at + right);
    }
}

/// Frees pages as a scheduler would, and brings sequences back.
fn schedule(runner: &mut Runner, followers: &mut [Follower], rng: &mut Rng) {
    if runner.free_pages() < 4 || rng.one_in(6) {
        let victim = swap_victim(followers.iter().map(|follower| &follower.sequence));
        if let Some(victim) = victim {
            let sequence = &mut followers[victim].sequence;
            let (len, free) = (sequence.len(), runner.free_pages());
            runner.swap_out(sequence).unwrap();
            assert!(sequence.is_swapped() && sequence.len() == len);
            assert!(runner.free_pages() >= free);
            if len > 0 {
                let again = runner.decode(sequence, 0).unwrap_err();
                assert!(matches!(again, ModelError::SwappedOut), "{again}");
            }
        }
    }
    for follower in followers {
        let sequence = &mut follower.sequence;
        if sequence.is_swapped() {
            if rng.one_in(4) {
                sequence.truncate(rng.below(sequence.len() + 1));
            }
            if rng.one_in(2) {
                match runner.swap_in(sequence) {
                    Ok(()) => assert!(!sequence.is_swapped()),
                    Err(ModelError::OutOfPages { .. }) => assert!(sequence.is_swapped()),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

fn case(world: &World, seed: u64) {
    let mut rng = Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    rng.below(1);
    let (stop, dir) = (Stop::new(), tempfile::tempdir().unwrap());
    let mut runner = world.runner(&mut rng, &stop.flag, dir.path());
    stop.watch(&mut runner);
    let mut followers: Vec<Follower> = (0..1 + rng.below(16))
        .map(|_| Follower::new(world, &mut runner, &mut rng))
        .collect();
    for _ in 0..12 {
        pass(&mut runner, &mut followers, &stop, &mut rng);
        schedule(&mut runner, &mut followers, &mut rng);
        let at = rng.below(followers.len());
        let follower = &mut followers[at];
        let resident = !follower.sequence.is_swapped();
        match rng.below(6) {
            0 => {
                let keep = rng.below(follower.sequence.len() + 1);
                follower.sequence.truncate(keep);
            }
            1 if resident => runner.publish(&mut follower.sequence).unwrap(),
            2 if resident => follower.reuse(&mut runner),
            3 => *follower = Follower::new(world, &mut runner, &mut rng),
            _ => {}
        }
    }
    // What is not swapped out in the end goes on alone.
    for follower in followers.iter_mut().filter(|f| !f.sequence.is_swapped()) {
        if let Some(id) = follower.text.ids.get(follower.sequence.len()).copied() {
            let at = follower.sequence.len();
            match runner.decode(&mut follower.sequence, id) {
                Ok(logits) => assert!(bits(logits) == follower.text.logits[at]),
                Err(error) => assert!(matches!(error, ModelError::OutOfPages { .. }), "{error}"),
            }
        }
    }
    drop(followers);
    assert_eq!(
        dir.path().read_dir().unwrap().count(),
        0,
        "swap files have no names"
    );
    assert_eq!(runner.free_pages(), runner.pages(), "no page is lost");
}

#[test]
fn every_mix_equals_solo_runs() {
    let cases = std::env::var("COLIBRI_MIXES").map_or(CASES, |n| n.parse().unwrap());
    for (name, drafting) in MODELS {
        let world = World::new(name, drafting);
        for seed in 0..cases as u64 {
            println!("{name} {seed}");
            case(&world, seed + 1);
        }
    }
}
