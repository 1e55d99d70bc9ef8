//! Computes the mixture of experts of a sparse layer.
//!
//! All rows of a batch go through a layer's experts together, so that each expert is read once for all of them. Outputs are computed
//! in the order in which reads complete. They wait in slots, one for each row and chosen expert, and are added in ascending expert id:
//! a row's sum depends on nothing else in the batch. Where a batch has more outputs than slots, its experts are computed in ascending
//! groups, each prefetched while the one before it is computed.

use std::ops::Range;

use crate::arch::{ExpertKind, Part, TensorId};
use crate::model::assignments::ExpertAssignments;
use crate::model::error::ModelError;
use crate::model::mlp::{COLUMNS, Mlp, MlpScratch};
use crate::model::ops;
use crate::model::pass::Pass;
use crate::model::phase::Phase;
use crate::model::rounding::Rounding;
use crate::model::router::{Choice, Router, RouterScratch};
use crate::model::scratch::resize_scratch;
use crate::pool::Pool;
use crate::quant::Matrix;
use crate::quant::encode::NotFinite;
use crate::stream::catalog::Projection;
use crate::stream::{Ready, Urgency};
use crate::weight::{Damage, Loader, Weight, WeightError};

/// The resident part of a sparse layer's MLP.
#[derive(Debug)]
pub struct Moe {
    layer: usize,
    /// Chooses the experts.
    pub router: Router,
    shared: Option<Mlp>,
    experts: usize,
    top_k: usize,
    hidden: usize,
    intermediate: usize,
    kind: Kind,
}

/// [`ExpertKind`] with the biases: a row for each expert.
#[derive(Debug)]
enum Kind {
    Silu,
    ClampedPairs {
        alpha: f32,
        limit: f32,
        gate_up: Weight,
        down: Weight,
    },
}

/// Norm and router of a later sparse layer, to predict its choice.
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
}

/// Scratch of a sparse layer.
#[derive(Debug)]
pub struct MoeScratch {
    /// Most slots in use at a time, unless one expert alone needs more.
    slots: usize,
    router: RouterScratch,
    choices: Vec<Choice>,
    assignments: ExpertAssignments,
    /// Ids to ask for.
    ids: Vec<u32>,
    /// The likely experts of a later sparse layer [n, ranks], best first.
    candidates: Vec<u32>,
    /// Inputs of some slots [COLUMNS, hidden].
    inputs: Vec<f32>,
    /// Up projections of some slots [COLUMNS, intermediate], or both projections in pairs.
    up: Vec<f32>,
    /// Activations by slot [slots, intermediate].
    middle: Vec<f32>,
    /// Outputs by slot [slots, hidden].
    outputs: Vec<f32>,
    /// Outputs of the shared expert [n, hidden].
    shared: Vec<f32>,
    /// The residual as normed for the next layer's router [n, hidden].
    ahead: Vec<f32>,
    mlp: MlpScratch,
    rounding: Option<Rounding>,
}

impl MoeScratch {
    /// Scratch with room for about `slots` outputs at a time. `rounding` is applied to the experts.
    pub fn new(slots: usize, rounding: Option<Rounding>) -> MoeScratch {
        MoeScratch {
            slots,
            router: RouterScratch::default(),
            choices: Vec::new(),
            assignments: ExpertAssignments::default(),
            ids: Vec::new(),
            candidates: Vec::new(),
            inputs: Vec::new(),
            up: Vec::new(),
            middle: Vec::new(),
            outputs: Vec::new(),
            shared: Vec::new(),
            ahead: Vec::new(),
            mlp: MlpScratch::default(),
            rounding,
        }
    }
}

impl Moe {
    /// Loads the router and the shared expert, if the architecture has one.
    pub fn load(loader: &mut Loader, layer: usize) -> Result<Moe, WeightError> {
        let arch = loader.arch();
        let shared = (arch.shared_width > 0)
            .then(|| Mlp::load(loader, layer, Part::SHARED))
            .transpose()?;
        let mut bias = |part| loader.matrix(TensorId::Layer(layer, part));
        let kind = match arch.experts.kind {
            ExpertKind::Silu => Kind::Silu,
            ExpertKind::ClampedPairs { alpha, limit } => Kind::ClampedPairs {
                alpha,
                limit,
                gate_up: bias(Part::ExpertGateUpBias)?,
                down: bias(Part::ExpertDownBias)?,
            },
        };
        Ok(Moe {
            layer,
            kind,
            router: Router::load(loader, layer)?,
            shared,
            experts: arch.experts.count,
            top_k: arch.router.top_k,
            hidden: arch.hidden_size,
            intermediate: arch.experts.width,
        })
    }

    /// `out` [n, hidden] of `x` [n, hidden], the normed `residual`. The choice of `next` is predicted on the way.
    ///
    /// # Errors
    /// When an expert cannot be read, or the stop flag is set.
    pub fn forward(
        &self,
        pass: &mut Pass,
        x: &[f32],
        residual: &[f32],
        next: Option<Next>,
        scratch: &mut MoeScratch,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let (pool, hidden) = (pass.pool, self.hidden);
        let n = x.len() / hidden;
        let (router, choices) = (&mut scratch.router, &mut scratch.choices);
        self.router.route(pool, x, n, router, choices);
        (scratch.assignments).collect(choices, self.top_k, self.experts);
        scratch.ids.clear();
        scratch
            .ids
            .extend(choices.iter().map(|choice| choice.expert));
        pass.store.routed(self.layer, &scratch.ids)?;
        pass.timer.lap(Phase::Router);

        out.fill(0.0);
        let mut group = scratch.assignments.group(0, scratch.slots);
        let mut first = true;
        while !group.is_empty() {
            scratch.assignments.ids(group.clone(), &mut scratch.ids);
            pass.store
                .request(self.layer, &scratch.ids, Urgency::Demand)?;
            let following = scratch.assignments.group(group.end, scratch.slots);
            if !following.is_empty() {
                scratch.assignments.ids(following.clone(), &mut scratch.ids);
                pass.store
                    .request(self.layer, &scratch.ids, Urgency::Prefetch)?;
            } else if let Some(next) = next {
                next.predict(pass, residual, scratch)?;
            }
            pass.timer.lap(Phase::Router);
            if first && let Some(shared) = &self.shared {
                let out = resize_scratch(&mut scratch.shared, n * hidden);
                shared.forward(pool, x, &mut scratch.mlp, out, |_| {});
                pass.timer.lap(Phase::Shared);
            }
            self.compute(pass, x, group.clone(), scratch)?;
            scratch
                .assignments
                .add_outputs(group, hidden, &scratch.outputs, out);
            pass.timer.lap(Phase::Experts);
            (group, first) = (following, false);
        }
        if self.shared.is_some() {
            let shared = &scratch.shared[..out.len()];
            out.iter_mut().zip(shared).for_each(|(o, s)| *o += s);
            pass.timer.lap(Phase::Shared);
        }
        Ok(())
    }

    /// Computes the demanded experts `group` as they arrive, each for the tokens that chose it, into slots.
    fn compute(
        &self,
        pass: &mut Pass,
        x: &[f32],
        group: Range<usize>,
        scratch: &mut MoeScratch,
    ) -> Result<(), ModelError> {
        let (pool, hidden, inter) = (pass.pool, self.hidden, self.intermediate);
        let assignments = &scratch.assignments;
        let slots = assignments.slots(group.clone(), group.clone()).len();
        let middle = resize_scratch(&mut scratch.middle, slots * inter);
        let outputs = resize_scratch(&mut scratch.outputs, slots * hidden);
        let inputs = resize_scratch(&mut scratch.inputs, COLUMNS * hidden);
        let up_out = resize_scratch(&mut scratch.up, COLUMNS * self.up_width());
        let mut rounding = scratch.rounding.as_mut();
        let mut done = 0;
        loop {
            pass.timer.lap(Phase::Experts);
            pass.check_stop()?;
            let ready = pass.store.next()?;
            pass.timer.lap(Phase::IoWait);
            match ready {
                Some(Ready::GateUp {
                    expert: id,
                    gate,
                    up,
                }) => {
                    pass.timer.expert(id, false);
                    let expert = id as usize;
                    let [gate, up] = match rounded(&mut rounding, pool, [gate, up]) {
                        Ok(rounded) => rounded,
                        Err((i, found)) => {
                            let bad = [Projection::Gate, Projection::Up][i];
                            return Err(pass.store.not_finite(self.layer, id, bad, found).into());
                        }
                    };
                    let slots = assignments.slots(group.clone(), expert..expert + 1);
                    let middle = &mut middle[slots.start * inter..slots.end * inter];
                    let columns = COLUMNS * inter;
                    for (tokens, middle) in assignments
                        .of(expert)
                        .chunks(COLUMNS)
                        .zip(middle.chunks_mut(columns))
                    {
                        let m = tokens.len();
                        for (token, input) in tokens.iter().zip(inputs.chunks_mut(hidden)) {
                            input.copy_from_slice(&x[token.row * hidden..][..hidden]);
                        }
                        let up_out = &mut up_out[..m * self.up_width()];
                        self.gate_up(
                            pool,
                            expert,
                            [gate, up],
                            &inputs[..m * hidden],
                            up_out,
                            middle,
                        );
                    }
                    let matrices = [(Projection::Gate, gate), (Projection::Up, up)];
                    if let Some((bad, damage)) = damage(middle, &matrices) {
                        return Err(pass.store.damaged(self.layer, id, bad, damage).into());
                    }
                }
                Some(Ready::Down { expert: id, down }) => {
                    pass.timer.expert(id, true);
                    let expert = id as usize;
                    let [down] = match rounded(&mut rounding, pool, [down]) {
                        Ok(rounded) => rounded,
                        Err((_, found)) => {
                            let bad = Projection::Down;
                            return Err(pass.store.not_finite(self.layer, id, bad, found).into());
                        }
                    };
                    let slots = assignments.slots(group.clone(), expert..expert + 1);
                    let middle = &middle[slots.start * inter..slots.end * inter];
                    let outputs = &mut outputs[slots.start * hidden..slots.end * hidden];
                    match &self.kind {
                        Kind::Silu => down.matmul(pool, middle, slots.len(), outputs),
                        Kind::ClampedPairs { down: bias, .. } => {
                            product(&down, pool, middle, slots.len(), outputs);
                            add_bias(bias, expert, outputs);
                        }
                    }
                    if let Some((bad, damage)) = damage(outputs, &[(Projection::Down, down)]) {
                        return Err(pass.store.damaged(self.layer, id, bad, damage).into());
                    }
                    done += slots.len();
                    pass.meter.add(slots.len());
                }
                None if done == slots => return Ok(()),
                None => return Err(ModelError::ExpertsLost { layer: self.layer }),
            }
        }
    }
}

impl Moe {
    /// Values of a token in the scratch of up projections.
    fn up_width(&self) -> usize {
        match self.kind {
            Kind::Silu => self.intermediate,
            Kind::ClampedPairs { .. } => 2 * self.intermediate,
        }
    }

    /// What goes into the down projection of an expert, `middle` [m, intermediate], from `inputs` [m, hidden]. `up_out` is scratch.
    fn gate_up(
        &self,
        pool: &Pool,
        expert: usize,
        [gate, up]: [Matrix<'_>; 2],
        inputs: &[f32],
        up_out: &mut [f32],
        middle: &mut [f32],
    ) {
        let m = inputs.len() / self.hidden;
        match &self.kind {
            Kind::Silu => {
                gate.matmul(pool, inputs, m, middle);
                up.matmul(pool, inputs, m, up_out);
                ops::silu_mul(middle, up_out);
            }
            Kind::ClampedPairs {
                alpha,
                limit,
                gate_up: bias,
                ..
            } => {
                // The gate stands for both.
                product(&gate, pool, inputs, m, up_out);
                add_bias(bias, expert, up_out);
                ops::clamped_swiglu(up_out, *alpha, *limit, middle);
            }
        }
    }
}

/// The product with a matrix of experts in pairs: floats of these are stored by inputs.
fn product(matrix: &Matrix<'_>, pool: &Pool, x: &[f32], n: usize, y: &mut [f32]) {
    match matrix.format().is_floating() {
        true => matrix.matmul_transposed(pool, x, n, y),
        false => matrix.matmul(pool, x, n, y),
    }
}

/// Adds the bias of an expert to each of some rows.
fn add_bias(biases: &Weight, expert: usize, rows: &mut [f32]) {
    let biases = biases.matrix();
    let rows = rows.chunks_mut(biases.cols());
    rows.for_each(|row| biases.add_row(expert, 1.0, row));
}

/// `matrices`, rounded where that is asked for.
fn rounded<'a, const N: usize>(
    rounding: &'a mut Option<&mut Rounding>,
    pool: &Pool,
    matrices: [Matrix<'a>; N],
) -> Result<[Matrix<'a>; N], (usize, NotFinite)> {
    match rounding {
        Some(rounding) => rounding.round(pool, matrices),
        None => Ok(matrices),
    }
}

/// The matrix that made `out` infinite or NaN by a scale or a weight that is, if one did. Such a value always shows in the output, so
/// experts are not searched for them when they are read.
fn damage(out: &[f32], matrices: &[(Projection, Matrix<'_>)]) -> Option<(Projection, Damage)> {
    ops::first_not_finite(out)?;
    let mut found = matrices.iter().filter_map(|(projection, matrix)| {
        let damage = Damage::not_finite(matrix)?;
        Some((*projection, damage))
    });
    found.next()
}

impl Next<'_> {
    /// Predicts this layer's choice from the `residual` [n, hidden] of an earlier layer, and tells the store which experts are likely.
    ///
    /// # Errors
    /// When the store's engine has stopped.
    pub fn predict(
        &self,
        pass: &mut Pass,
        residual: &[f32],
        scratch: &mut MoeScratch,
    ) -> Result<(), ModelError> {
        let ranks = pass.store.candidates(self.layer);
        if ranks == 0 {
            return Ok(());
        }
        let hidden = self.norm.len();
        let n = residual.len() / hidden;
        let normed = resize_scratch(&mut scratch.ahead, n * hidden);
        for (x, normed) in residual.chunks(hidden).zip(normed.chunks_mut(hidden)) {
            ops::rms_norm(x, self.norm, self.eps, normed);
        }
        let (router, ids) = (&mut scratch.router, &mut scratch.candidates);
        let ranks = (self.router).top_candidates(pass.pool, normed, n, ranks, router, ids);
        pass.store.predict(self.layer, ids, ranks)?;
        Ok(())
    }
}
