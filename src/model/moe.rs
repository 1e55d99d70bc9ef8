//! The mixture of experts of a sparse layer.
//!
//! All tokens of a slice go through a layer's experts together, so that each expert is read once for all of
//! them. The outputs arrive in whatever order the reads complete; they wait in slots, one a token and chosen
//! expert, and are added in ascending expert id. Where a slice has more outputs than slots, its experts are
//! worked off in ascending groups, each hinted while the one before it is computed.

use std::ops::Range;

use crate::config::Config;
use crate::model::clock::{Clock, Phase};
use crate::model::error::ModelError;
use crate::model::mlp::{COLUMNS, Mlp, MlpScratch};
use crate::model::ops;
use crate::model::router::{Choice, Router, RouterScratch};
use crate::model::scratch::sized;
use crate::pool::Pool;
use crate::quant::axpy;
use crate::stream::{ExpertStore, Ready, Want};
use crate::weight::{Loader, WeightError};

/// The resident part of a sparse layer's MLP.
#[derive(Debug)]
pub struct Moe {
    layer: usize,
    /// Chooses the experts.
    pub router: Router,
    shared: Option<Mlp>,
    experts: usize,
    top_k: usize,
    intermediate: usize,
}

/// What is known of the sparse layer after this one: its norm and router, for an early look at its choice.
#[derive(Clone, Copy, Debug)]
pub struct Next<'a> {
    /// Its layer index.
    pub layer: usize,
    /// Its `post_attention_layernorm`.
    pub norm: &'a [f32],
    /// Epsilon of that norm.
    pub eps: f32,
    /// Its router.
    pub router: &'a Router,
    /// Experts a token that are guessed.
    pub guesses: usize,
}

/// Scratch of a sparse layer.
#[derive(Debug)]
pub struct MoeScratch {
    /// Most slots in use at a time, unless one expert alone needs more.
    slots: usize,
    router: RouterScratch,
    choices: Vec<Choice>,
    users: Users,
    /// Ids to ask for.
    ids: Vec<u32>,
    /// Experts that the next sparse layer will probably choose.
    guess: Vec<u32>,
    /// Inputs of some slots [COLUMNS, hidden].
    inputs: Vec<f32>,
    /// Up projections of some slots [COLUMNS, intermediate].
    up: Vec<f32>,
    /// Activations by slot [slots, intermediate].
    middle: Vec<f32>,
    /// Outputs by slot [slots, hidden].
    outputs: Vec<f32>,
    /// Outputs of the shared expert [n, hidden]; before that, the next layer's normed residual.
    shared: Vec<f32>,
    mlp: MlpScratch,
}

impl MoeScratch {
    /// Scratch with room for about `slots` outputs at a time.
    pub fn new(slots: usize) -> MoeScratch {
        MoeScratch {
            slots,
            router: RouterScratch::default(),
            choices: Vec::new(),
            users: Users::default(),
            ids: Vec::new(),
            guess: Vec::new(),
            inputs: Vec::new(),
            up: Vec::new(),
            middle: Vec::new(),
            outputs: Vec::new(),
            shared: Vec::new(),
            mlp: MlpScratch::default(),
        }
    }
}

impl Moe {
    /// Loads `{prefix}.gate` and, unless there are none, `{prefix}.shared_experts`.
    pub fn load(
        loader: &mut Loader,
        prefix: &str,
        config: &Config,
        layer: usize,
    ) -> Result<Moe, WeightError> {
        let width = config.shared_intermediate_size();
        let shared = (width > 0)
            .then(|| Mlp::load(loader, &format!("{prefix}.shared_experts"), config, width))
            .transpose()?;
        Ok(Moe {
            layer,
            router: Router::load(loader, &format!("{prefix}.gate"), config)?,
            shared,
            experts: config.n_routed_experts,
            top_k: config.num_experts_per_tok,
            intermediate: config.moe_intermediate_size,
        })
    }

    /// `out` [n, hidden] of `x` [n, hidden], the normed `residual`.
    ///
    /// # Errors
    /// When an expert cannot be read.
    #[allow(clippy::too_many_arguments)]
    pub fn forward(
        &self,
        pool: &Pool,
        clock: &mut Clock,
        store: &mut ExpertStore,
        x: &[f32],
        residual: &[f32],
        n: usize,
        next: Option<Next>,
        scratch: &mut MoeScratch,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let hidden = x.len() / n;
        self.router
            .route(pool, x, n, &mut scratch.router, &mut scratch.choices);
        scratch
            .users
            .collect(&scratch.choices, self.top_k, self.experts);
        clock.lap(Phase::Router);

        out.fill(0.0);
        let mut group = scratch.users.group(0, scratch.slots);
        let mut first = true;
        while !group.is_empty() {
            scratch.users.ids(group.clone(), &mut scratch.ids);
            store.want(self.layer, &scratch.ids, Want::Demand)?;
            if first && let Some(next) = next {
                next.guess(pool, residual, n, scratch);
            }
            let following = scratch.users.group(group.end, scratch.slots);
            if !following.is_empty() {
                scratch.users.ids(following.clone(), &mut scratch.ids);
                store.want(self.layer, &scratch.ids, Want::Hint)?;
            } else if let Some(next) = next {
                store.want(next.layer, &scratch.guess, Want::Hint)?;
            }
            clock.lap(Phase::Router);
            if first && let Some(shared) = &self.shared {
                let out = sized(&mut scratch.shared, n * hidden);
                shared.forward(pool, x, &mut scratch.mlp, out);
                clock.lap(Phase::Shared);
            }
            self.compute(pool, clock, store, x, hidden, group.clone(), scratch)?;
            scratch
                .users
                .add_outputs(group, hidden, &scratch.outputs, out);
            clock.lap(Phase::Experts);
            (group, first) = (following, false);
        }
        if self.shared.is_some() {
            let shared = &scratch.shared[..out.len()];
            out.iter_mut().zip(shared).for_each(|(o, s)| *o += s);
            clock.lap(Phase::Shared);
        }
        Ok(())
    }

    /// Computes the demanded experts `group` as they arrive, each for the tokens that chose it, into slots.
    #[allow(clippy::too_many_arguments)]
    fn compute(
        &self,
        pool: &Pool,
        clock: &mut Clock,
        store: &mut ExpertStore,
        x: &[f32],
        hidden: usize,
        group: Range<usize>,
        scratch: &mut MoeScratch,
    ) -> Result<(), ModelError> {
        let inter = self.intermediate;
        let users = &scratch.users;
        let slots = users.slots(group.clone(), group.clone()).len();
        let middle = sized(&mut scratch.middle, slots * inter);
        let outputs = sized(&mut scratch.outputs, slots * hidden);
        let inputs = sized(&mut scratch.inputs, COLUMNS * hidden);
        let up_out = sized(&mut scratch.up, COLUMNS * inter);
        let mut done = 0;
        loop {
            clock.lap(Phase::Experts);
            let ready = store.next()?;
            clock.lap(Phase::IoWait);
            match ready {
                Some(Ready::GateUp { expert, gate, up }) => {
                    let expert = expert as usize;
                    let slots = users.slots(group.clone(), expert..expert + 1);
                    let middle = &mut middle[slots.start * inter..slots.end * inter];
                    let columns = COLUMNS * inter;
                    for (users, middle) in users
                        .of(expert)
                        .chunks(COLUMNS)
                        .zip(middle.chunks_mut(columns))
                    {
                        let m = users.len();
                        for (user, input) in users.iter().zip(inputs.chunks_mut(hidden)) {
                            input.copy_from_slice(&x[user.token * hidden..][..hidden]);
                        }
                        let (inputs, up_out) = (&inputs[..m * hidden], &mut up_out[..m * inter]);
                        gate.matmul(pool, inputs, m, middle);
                        up.matmul(pool, inputs, m, up_out);
                        ops::silu_mul(middle, up_out);
                    }
                }
                Some(Ready::Down { expert, down }) => {
                    let expert = expert as usize;
                    let slots = users.slots(group.clone(), expert..expert + 1);
                    let middle = &middle[slots.start * inter..slots.end * inter];
                    let outputs = &mut outputs[slots.start * hidden..slots.end * hidden];
                    down.matmul(pool, middle, slots.len(), outputs);
                    done += slots.len();
                }
                None if done == slots => return Ok(()),
                None => return Err(ModelError::ExpertsLost { layer: self.layer }),
            }
        }
    }
}

impl Next<'_> {
    /// Leaves in `scratch.guess` the experts that this layer would choose if it came now.
    fn guess(&self, pool: &Pool, residual: &[f32], n: usize, scratch: &mut MoeScratch) {
        let hidden = self.norm.len();
        let normed = sized(&mut scratch.shared, n * hidden);
        for (x, normed) in residual.chunks(hidden).zip(normed.chunks_mut(hidden)) {
            ops::rms_norm(x, self.norm, self.eps, normed);
        }
        let (router, guess) = (&mut scratch.router, &mut scratch.guess);
        self.router
            .union(pool, normed, n, self.guesses, router, guess);
    }
}

/// A token that chose an expert.
#[derive(Clone, Copy, Debug, Default)]
struct User {
    token: usize,
    weight: f32,
}

/// The tokens that chose each expert: expert by expert, tokens ascending. Their order is that of the slots.
#[derive(Debug, Default)]
struct Users {
    /// Where each expert's users start; one more at the end.
    starts: Vec<usize>,
    users: Vec<User>,
}

impl Users {
    /// Sorts the choices [tokens, top_k] by expert.
    fn collect(&mut self, choices: &[Choice], top_k: usize, experts: usize) {
        self.starts.clear();
        self.starts.resize(experts + 2, 0);
        // Counted two places up, so that after the sums `starts[e + 1]` is the start of e: it moves to the end of
        // e, which is the start of e + 1, as the users are placed.
        for choice in choices {
            self.starts[choice.expert as usize + 2] += 1;
        }
        for e in 2..self.starts.len() {
            self.starts[e] += self.starts[e - 1];
        }
        self.users.clear();
        self.users.resize(choices.len(), User::default());
        for (i, choice) in choices.iter().enumerate() {
            let at = &mut self.starts[choice.expert as usize + 1];
            self.users[*at] = User {
                token: i / top_k,
                weight: choice.weight,
            };
            *at += 1;
        }
        self.starts.pop();
    }

    /// The users of an expert; none when there is no such expert.
    fn of(&self, expert: usize) -> &[User] {
        match self.starts.get(expert..expert + 2) {
            Some(&[start, end]) => &self.users[start..end],
            _ => &[],
        }
    }

    /// The slots of `experts`, counted from the first slot of `group`; none when they are outside of it.
    fn slots(&self, group: Range<usize>, experts: Range<usize>) -> Range<usize> {
        if experts.start < group.start || experts.end > group.end {
            return 0..0;
        }
        let base = self.starts[group.start];
        self.starts[experts.start] - base..self.starts[experts.end] - base
    }

    /// The longest range of experts from `first` on that has at most `slots` users, or one expert with more.
    /// Empty when no expert from `first` on has users.
    fn group(&self, first: usize, slots: usize) -> Range<usize> {
        let experts = self.starts.len() - 1;
        let used = |e: &usize| !self.of(*e).is_empty();
        let Some(first) = (first..experts).find(used) else {
            return experts..experts;
        };
        let limit = self.starts[first] + slots;
        let end = (first + 1..experts).find(|e| self.starts[e + 1] > limit);
        first..end.unwrap_or(experts)
    }

    /// The experts of `group` that have users, ascending.
    fn ids(&self, group: Range<usize>, ids: &mut Vec<u32>) {
        ids.clear();
        ids.extend(group.filter(|e| !self.of(*e).is_empty()).map(|e| e as u32));
    }

    /// Adds the weighted outputs of `group`, expert by expert, to their tokens' rows of `out`.
    fn add_outputs(&self, group: Range<usize>, hidden: usize, outputs: &[f32], out: &mut [f32]) {
        let users = &self.users[self.starts[group.start]..self.starts[group.end]];
        for (user, output) in users.iter().zip(outputs.chunks(hidden)) {
            let out = &mut out[user.token * hidden..][..hidden];
            axpy(user.weight, output, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        let choice = |expert| Choice {
            expert,
            weight: expert as f32,
        };
        let mut users = Users::default();
        let choices = [1, 4, 1, 2, 1, 4].map(choice);
        users.collect(&choices, 2, 6);
        users
    }

    #[test]
    fn users_are_sorted_by_expert_then_token() {
        let users = users();
        let tokens = |e| users.of(e).iter().map(|u| u.token).collect::<Vec<_>>();
        assert_eq!(
            (tokens(1), tokens(2), tokens(4)),
            (vec![0, 1, 2], vec![1], vec![0, 2])
        );
        assert!(
            [0, 3, 5, 6, 100]
                .into_iter()
                .all(|e| users.of(e).is_empty())
        );
        assert!(users.of(4).iter().all(|u| u.weight == 4.0));
    }

    #[test]
    fn groups_cover_all_used_experts_in_order() {
        let users = users();
        let groups = |slots| {
            let (mut groups, mut ids) = (Vec::new(), Vec::new());
            let mut group = users.group(0, slots);
            while !group.is_empty() {
                users.ids(group.clone(), &mut ids);
                groups.push(ids.clone());
                group = users.group(group.end, slots);
            }
            groups
        };
        assert_eq!(groups(1), [vec![1], vec![2], vec![4]]);
        assert_eq!(groups(3), [vec![1], vec![2, 4]]);
        assert_eq!(groups(6), [vec![1, 2, 4]]);
        assert_eq!(users.slots(2..6, 4..5), 1..3);
        assert_eq!(users.slots(2..6, 1..2), 0..0);
    }
}
