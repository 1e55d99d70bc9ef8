//! The policies. Each is a value for every expert: what is worth least makes room.

use super::trace::{Step, Trace};

/// How experts are ranked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// Time of the last use.
    Lru,
    /// Time of the last use but one.
    Lru2,
    /// Uses, which count half after so many tokens; begins with those of the history, which decay like the others.
    Lfu(f64),
    /// Uses of late, with the first half-life, and the rate of uses in the long run as if it had been seen for `.1` tokens.
    /// The long run begins with the history.
    TwoScales(f64, f64),
    /// Uses of late with a half-life in tokens, but what one of the last `.1` passes used comes before everything else. With `.2`
    /// the counts begin with the history.
    Guarded(f64, u32, bool),
    /// A window of a fifth of the slots by last use; what leaves it stays if it was used more often, by counts that are halved
    /// every 10 uses a slot, than the least recently used one of the others.
    TinyLfu,
    /// Time of the next use: what nobody can know, and the most that is possible.
    Belady,
}

/// Which slots experts compete for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shares {
    /// Each layer has as many.
    Equal,
    /// All layers together.
    Global,
}

/// A way to keep experts.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// How experts are ranked.
    pub value: Value,
    /// What the ranking is over.
    pub shares: Shares,
    /// Share of the slots in which the hottest experts of the history are from the start, and stay.
    pub pinned: f64,
    /// What a pin takes from the slots for the experts of one token must be used by this share of tokens.
    pub hot: f64,
    /// Whether pins are the hottest experts of each layer, or of the model.
    pub pins: Shares,
}

/// Uses of every expert in sessions before: `[layer][expert]`.
pub type History = Vec<Vec<f64>>;

/// Counts the uses in a session.
pub fn history(trace: &Trace) -> History {
    let mut uses = vec![vec![0.0; trace.experts]; trace.layers];
    for step in &trace.steps {
        for (id, n) in &step.used {
            uses[step.layer][*id as usize] += f64::from(*n);
        }
    }
    uses
}

#[derive(Clone, Copy, Debug, Default)]
struct Expert {
    resident: bool,
    pinned: bool,
    /// In the window of [`Value::TinyLfu`].
    window: bool,
    last: f64,
    before: f64,
    /// Decayed uses as of `counted`.
    recent: f64,
    long: f64,
    counted: f64,
    next: f64,
}

/// Long enough that a run does not forget its history, short enough that ten runs do.
const LONG: f64 = 4096.0;

/// Hits and uses of a session under a policy with `slots` for each layer.
pub fn replay(
    trace: &Trace,
    policy: Policy,
    slots: usize,
    history: Option<&History>,
) -> (u64, u64) {
    let mut cache = Replay::new(trace, policy, slots, history);
    let next = next_uses(trace);
    let (mut hits, mut uses) = (0, 0);
    for (at, step) in trace.steps.iter().enumerate() {
        let experts = &cache.experts[step.layer];
        hits += step
            .used
            .iter()
            .filter(|(id, _)| experts[*id as usize].resident)
            .count() as u64;
        uses += step.used.len() as u64;
        cache.step(at as f64 + 1.0, step, &next[at]);
    }
    (hits, uses)
}

/// For each step and expert of it, when it is used next.
fn next_uses(trace: &Trace) -> Vec<Vec<f64>> {
    let mut next = vec![vec![f64::INFINITY; trace.experts]; trace.layers];
    let mut all: Vec<Vec<f64>> = Vec::with_capacity(trace.steps.len());
    for (at, step) in trace.steps.iter().enumerate().rev() {
        let layer = &mut next[step.layer];
        let of = step
            .used
            .iter()
            .map(|(id, _)| std::mem::replace(&mut layer[*id as usize], at as f64 + 1.0));
        all.push(of.collect());
    }
    all.reverse();
    all
}

struct Replay {
    policy: Policy,
    /// [layer][expert].
    experts: Vec<Vec<Expert>>,
    /// Slots that are not for pins: of each layer, or of all.
    free: usize,
    /// The number of the step.
    now: f64,
    /// Uses since counts were halved, by layer.
    uses: Vec<usize>,
    /// Tokens of each layer.
    tokens: Vec<f64>,
    /// Tokens that the long counts stand for.
    seen: Vec<f64>,
}

impl Replay {
    fn new(trace: &Trace, policy: Policy, slots: usize, history: Option<&History>) -> Replay {
        let layers = trace.layers;
        let mut replay = Replay {
            policy,
            experts: vec![vec![Expert::default(); trace.experts]; layers],
            free: slots,
            now: 0.0,
            uses: vec![0; layers],
            tokens: vec![0.0; layers],
            seen: vec![0.0; layers],
        };
        let mut pinned = 0;
        if let Some(history) = history {
            let top_k = trace.steps.iter().map(|s| s.used.len()).min().unwrap_or(1);
            for (layer, uses) in history.iter().enumerate() {
                replay.seen[layer] = uses.iter().sum::<f64>() / top_k as f64;
                for (expert, uses) in replay.experts[layer].iter_mut().zip(uses) {
                    expert.long = *uses;
                    if matches!(
                        policy.value,
                        Value::Lfu(_) | Value::Guarded(_, _, true) | Value::TinyLfu
                    ) {
                        expert.recent = *uses;
                    }
                }
            }
            pinned = replay.pin(
                history,
                (policy.pinned * slots as f64) as usize,
                slots,
                top_k,
            );
        }
        if policy.shares == Shares::Global {
            replay.free = layers * slots - pinned;
        } else {
            replay.free = slots - pinned.div_ceil(layers);
        }
        replay
    }

    /// Pins so many experts a layer; how many that are.
    fn pin(&mut self, history: &History, each: usize, slots: usize, top_k: usize) -> usize {
        let free = history.len() * slots.saturating_sub(top_k);
        let mut hottest: Vec<(usize, usize)> = (0..history.len())
            .flat_map(|layer| (0..history[layer].len()).map(move |id| (layer, id)))
            .filter(|(layer, id)| history[*layer][*id] > 0.0)
            .collect();
        hottest.sort_by(|a, b| history[b.0][b.1].total_cmp(&history[a.0][a.1]));
        let mut by_layer = vec![0; history.len()];
        let mut all = 0;
        for (layer, id) in hottest {
            let full = match self.policy.pins {
                Shares::Equal => by_layer[layer] == each,
                Shares::Global => all == each * history.len(),
            };
            let uses: f64 = history[layer].iter().sum();
            let rate = history[layer][id] * top_k as f64 / uses;
            if !full && (all < free || rate >= self.policy.hot) {
                by_layer[layer] += 1;
                all += 1;
                let expert = &mut self.experts[layer][id];
                (expert.resident, expert.pinned) = (true, true);
            }
        }
        all
    }

    /// The experts of a layer are used; afterwards, what does not fit is gone.
    fn step(&mut self, now: f64, step: &Step, next: &[f64]) {
        let half_life = match self.policy.value {
            Value::Lfu(half_life)
            | Value::Guarded(half_life, ..)
            | Value::TwoScales(half_life, _) => half_life,
            _ => f64::INFINITY,
        };
        let layer = step.layer;
        self.now = now;
        self.tokens[layer] += f64::from(step.tokens);
        let aged = (-f64::from(step.tokens) / LONG).exp2();
        self.seen[layer] = self.seen[layer] * aged + f64::from(step.tokens);
        for ((id, n), next) in step.used.iter().zip(next) {
            let expert = &mut self.experts[layer][*id as usize];
            let passed = self.tokens[layer] - expert.counted;
            expert.recent = expert.recent * (-passed / half_life).exp2() + f64::from(*n);
            expert.long = expert.long * (-passed / LONG).exp2() + f64::from(*n);
            expert.counted = self.tokens[layer];
            if !expert.resident {
                expert.window = true;
            }
            expert.resident = true;
            expert.before = std::mem::replace(&mut expert.last, now);
            expert.next = *next;
        }
        if self.policy.value == Value::TinyLfu {
            self.tiny_lfu(layer, step.used.len());
            return;
        }
        let layers = match self.policy.shares {
            Shares::Equal => layer..layer + 1,
            Shares::Global => 0..self.experts.len(),
        };
        let mut kept: Vec<(f64, f64, usize, usize)> = Vec::new();
        for l in layers {
            for (id, expert) in self.experts[l].iter().enumerate() {
                if expert.resident && !expert.pinned {
                    kept.push((self.value(l, expert), expert.last, l, id));
                }
            }
        }
        let over = kept.len().saturating_sub(self.free);
        kept.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        for (_, _, l, id) in &kept[..over] {
            self.experts[*l][*id].resident = false;
        }
    }

    fn value(&self, layer: usize, expert: &Expert) -> f64 {
        let passed = self.tokens[layer] - expert.counted;
        match self.policy.value {
            Value::Lru | Value::TinyLfu => expert.last,
            Value::Lru2 => expert.before,
            Value::Belady => -expert.next,
            Value::Lfu(half_life) => expert.recent * (-passed / half_life).exp2(),
            Value::Guarded(half_life, passes, _) => {
                let layers = self.experts.len() as f64;
                if self.now - expert.last < layers * f64::from(passes) {
                    1e12 + expert.last
                } else {
                    expert.recent * (-passed / half_life).exp2()
                }
            }
            Value::TwoScales(half_life, weight) => {
                let rate = expert.long * (-passed / LONG).exp2() / self.seen[layer].max(1.0);
                expert.recent * (-passed / half_life).exp2() + weight * rate
            }
        }
    }

    fn tiny_lfu(&mut self, layer: usize, used: usize) {
        let window = (self.free / 5).max(1).min(self.free);
        let main = self.free - window;
        self.uses[layer] += used;
        let experts = &mut self.experts[layer];
        if self.uses[layer] > 10 * self.free.max(1) {
            self.uses[layer] = 0;
            experts.iter_mut().for_each(|e| e.recent /= 2.0);
        }
        let oldest = |experts: &[Expert], in_window: bool| {
            let of = |(_, e): &(usize, &Expert)| e.resident && !e.pinned && e.window == in_window;
            let mut all: Vec<(usize, &Expert)> = experts.iter().enumerate().filter(of).collect();
            all.sort_by(|a, b| a.1.last.total_cmp(&b.1.last));
            (all.len(), all.first().map(|(id, _)| *id))
        };
        while let (n, Some(candidate)) = oldest(experts, true) {
            if n <= window {
                break;
            }
            let (held, victim) = oldest(experts, false);
            match victim {
                _ if held < main => experts[candidate].window = false,
                Some(victim) if experts[candidate].recent > experts[victim].recent => {
                    experts[victim].resident = false;
                    experts[candidate].window = false;
                }
                _ => experts[candidate].resident = false,
            }
        }
    }
}
