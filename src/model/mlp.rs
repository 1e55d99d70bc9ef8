//! Computes the gated MLP: down(silu(gate(x)) * up(x)).

use crate::arch::{Part, TensorId};
use crate::model::ops;
use crate::model::scratch::resize_scratch;
use crate::pool::Pool;
use crate::weight::{Loader, Weight, WeightError};

/// Columns that go through the wide middle at once, to bound its scratch.
pub const COLUMNS: usize = 16;

/// A resident MLP: that of a dense layer, or a shared expert.
#[derive(Debug)]
pub struct Mlp {
    gate: Weight,
    up: Weight,
    down: Weight,
}

/// Scratch of an MLP: [`COLUMNS`] times its width, twice.
#[derive(Debug, Default)]
pub struct MlpScratch {
    gate: Vec<f32>,
    up: Vec<f32>,
}

impl Mlp {
    /// Loads gate, up and down: [`Part::DENSE`] or [`Part::SHARED`].
    pub fn load(loader: &mut Loader, layer: usize, parts: [Part; 3]) -> Result<Mlp, WeightError> {
        let [gate, up, down] = parts.map(|part| TensorId::Layer(layer, part));
        Ok(Mlp {
            gate: loader.matrix(gate)?,
            up: loader.matrix(up)?,
            down: loader.matrix(down)?,
        })
    }

    /// `out` [n, hidden] of `x` [n, hidden]. `done` is called with the number of columns completed.
    pub fn forward(
        &self,
        pool: &Pool,
        x: &[f32],
        scratch: &mut MlpScratch,
        out: &mut [f32],
        mut done: impl FnMut(usize),
    ) {
        let (gate, up, down) = (self.gate.matrix(), self.up.matrix(), self.down.matrix());
        let hidden = gate.cols();
        let columns = COLUMNS * hidden;
        for (x, out) in x.chunks(columns).zip(out.chunks_mut(columns)) {
            let n = x.len() / hidden;
            let g = resize_scratch(&mut scratch.gate, n * gate.rows());
            let u = resize_scratch(&mut scratch.up, n * gate.rows());
            gate.matmul(pool, x, n, g);
            up.matmul(pool, x, n, u);
            ops::silu_mul(g, u);
            down.matmul(pool, g, n, out);
            done(n);
        }
    }
}
